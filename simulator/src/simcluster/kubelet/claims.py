"""kubelet's manager of claims: finds drivers by their sockets, has claims prepared, reads their CDI devices.

As in Kubernetes 1.36 a restarted kubelet knows from its checkpoint what was prepared: it calls drivers again
for pods whose containers it must start, and unprepares the claims of pods that are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.resources import RESOURCE_CLAIMS, RESOURCE_SLICES
from gpuslice.adapters.kubelet.deviceplugin import CALL_FAILED, socket_identity
from gpuslice.adapters.kubelet.draplugin import DRA_VERSIONS
from gpuslice.adapters.kubelet.proto import draplugin_pb2 as dra
from gpuslice.adapters.kubelet.proto import podresources_pb2 as pr
from gpuslice.adapters.kubelet.rpc import unix_channel
from simcluster.cluster.amounts import Object
from simcluster.controllers.claims import names
from simcluster.kubelet import claim_checkpoint
from simcluster.kubelet.claim_checkpoint import PreparedClaim
from simcluster.kubelet.node_services import DeviceOptions, cdi_options
from simcluster.kubelet.plugins import error_text
from simcluster.kubelet.rpc import DraClient, DriverRegistrationClient
from simcluster.kubelet.settings import KubeletSettings

_log = logging.getLogger(__name__)
CALL_TIMEOUT_S = 45.0
LOOK_S = 0.1
WIPE_AFTER_S = 30.0
"""How long after a driver's socket has disappeared its ResourceSlices are deleted."""
RECONCILE_S = 60.0
HEALTH_VERSION = "v1alpha1"
"""The version that Kubernetes 1.36 reads."""
HEALTHS = {dra.HEALTHY: "Healthy", dra.UNHEALTHY: "Unhealthy"}
HEALTH_AGAIN_S = 5.0
FRESH_S = 30.0
"""How long a device's health is considered current if the driver names no other time."""


class ClaimError(Exception):
    """The pod's claims could not be prepared; kubelet reports that in an event and retries."""


@dataclass(frozen=True, slots=True)
class Driver:
    socket: Path
    version: str
    identity: object  # of the registration socket
    following: asyncio.Task[None] | None  # the health of its devices, if it reports that


@dataclass(frozen=True, slots=True)
class Health:
    """A device's health as reported by a driver, and until when that is valid (monotonic)."""

    word: str
    message: str
    until_s: float


class ClaimManager:
    """The claims of one node. `health_changed` is called with the uids of the pods concerned."""

    def __init__(
        self, settings: KubeletSettings, client: KubeClient, health_changed: Callable[[set[str]], None]
    ) -> None:
        self._settings = settings
        self._client = client
        self._health_changed = health_changed
        self._drivers: dict[str, Driver] = {}
        self._lost: dict[str, float] = {}  # drivers whose socket disappeared, and when
        self._prepared: dict[tuple[str, str], PreparedClaim] = {}  # by namespace and name
        self._health: dict[str, dict[tuple[str, str], Health]] = {}  # by driver; by pool and device

    def recover(self) -> None:
        """Restore what the previous kubelet had prepared. Raises CorruptClaimsError."""
        for each in claim_checkpoint.read(self._settings.root):
            self._prepared[each.message.namespace, each.message.name] = each

    def _save(self) -> None:
        claim_checkpoint.write(self._settings.root, self._prepared.values())

    # -- drivers ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the folder of registration sockets; slices from before this kubelet are outdated."""
        await self._wipe(f"spec.nodeName={self._settings.name}")
        try:
            await self._follow_sockets()
        finally:
            for driver in self._drivers.values():
                _end(driver.following)

    async def _follow_sockets(self) -> None:
        while True:
            present = {path: socket_identity(path) for path in self._settings.plugin_registry.glob("*.sock")}
            for name, driver in list(self._drivers.items()):
                if driver.identity not in present.values():
                    _end(self._drivers.pop(name).following)
                    self._lost[name] = time.monotonic()
            known = {driver.identity for driver in self._drivers.values()}
            for path, identity in present.items():
                if identity not in known:
                    await self._register(path, identity)
            for name, since_s in list(self._lost.items()):
                if time.monotonic() - since_s > WIPE_AFTER_S:
                    await self._wipe(f"spec.nodeName={self._settings.name},spec.driver={name}")
                    del self._lost[name]
            await asyncio.sleep(LOOK_S)

    async def _register(self, path: Path, identity: object) -> None:
        try:
            async with unix_channel(path) as channel:
                reader = DriverRegistrationClient(channel)
                info = await reader.get_info(CALL_TIMEOUT_S)
                offered = [each for each in DRA_VERSIONS if f"{each}.DRAPlugin" in info.supported_versions]
                if info.type != "DRAPlugin" or not offered:
                    error = f"plugin of type {info.type} offers {', '.join(info.supported_versions)}"
                    await reader.notify(dra.RegistrationStatus(error=error), CALL_TIMEOUT_S)
                    return
                following = None
                if f"{HEALTH_VERSION}.DRAResourceHealth" in info.supported_versions:
                    watching = self._follow_health(info.name, Path(info.endpoint))
                    following = asyncio.create_task(watching, name=f"health of {info.name}")
                self._drivers[info.name] = Driver(Path(info.endpoint), offered[0], identity, following)
                self._lost.pop(info.name, None)
                await reader.notify(dra.RegistrationStatus(plugin_registered=True), CALL_TIMEOUT_S)
        except CALL_FAILED as error:  # the socket is older than its server, or newer
            _log.info("driver not registered yet", extra={"socket": path.name, "error": error_text(error)})

    async def _follow_health(self, name: str, socket: Path) -> None:
        """Runs forever: when the stream ends, the health of its devices is unknown until there is another."""
        while True:
            try:
                async with unix_channel(socket) as channel:
                    async for news in DraClient(channel, health=HEALTH_VERSION).health():
                        self._tell_health(name, dict(map(_health_of, news.devices)))
            except CALL_FAILED as error:
                words = {"driver": name, "error": error_text(error)}
                _log.info("health of devices is not told, will ask again", extra=words)
            finally:
                self._tell_health(name, {})
            await asyncio.sleep(HEALTH_AGAIN_S / self._settings.speed_up)

    def _tell_health(self, driver: str, found: dict[tuple[str, str], Health]) -> None:
        before, self._health[driver] = self._health.get(driver, {}), found
        words = {key: (each.word, each.message) for key, each in found.items()}
        if words != {key: (each.word, each.message) for key, each in before.items()}:
            self._health_changed(
                {uid for claim in self._prepared.values() if driver in claim.devices for uid in claim.pods}
            )

    async def _wipe(self, fields: str) -> None:
        with contextlib.suppress(KubeError):
            for each in (await self._client.list(RESOURCE_SLICES, fields=fields)).items or ():
                await self._client.delete(RESOURCE_SLICES, each["metadata"]["name"])

    # -- claims -----------------------------------------------------------------------------------------

    async def prepare(self, pod: Object) -> None:
        """Prepare every claim of the pod, before its first container. Raises ClaimError."""
        asked: dict[str, list[PreparedClaim]] = defaultdict(list)
        for name in names(pod).values():
            claim = await self._reserved(pod, name)
            meta = claim["metadata"]
            message = dra.Claim(namespace=meta["namespace"], name=name, uid=meta["uid"])
            held = self._prepared.get((meta["namespace"], name), PreparedClaim(message))
            if held.message.uid != meta["uid"]:
                words = f"different UID {held.message.uid} still exists (previous pod force-deleted?!)"
                raise ClaimError(f"old ResourceClaim with same name {name} and {words}")
            drivers = {each["driver"] for each in claim["status"]["allocation"]["devices"]["results"]}
            for driver in drivers:
                if driver not in self._drivers:
                    raise ClaimError(f"DRA driver {driver} is not registered")
            self._prepared[meta["namespace"], name] = held
            held.pods.add(pod["metadata"]["uid"])
            for driver in drivers - held.asked:
                asked[driver].append(held)
        self._save()
        for driver, claims in asked.items():
            async with self._dial(driver) as client:
                answer = await client.prepare([each.message for each in claims], CALL_TIMEOUT_S)
            for each in claims:
                found = answer.claims.get(each.message.uid)
                if found is None or found.error:
                    why = found.error if found is not None else "the driver did not answer for it"
                    raise ClaimError(
                        f"NodePrepareResources failed for ResourceClaim {each.message.name}: {why}"
                    )
                each.devices[driver] = list(found.devices)
                each.asked.add(driver)
            self._save()

    async def unprepare(self, pod: Object) -> None:
        """Unprepare claims that no other pod here uses, after the last container has ended. Raises
        ClaimError.
        """
        uid = pod["metadata"]["uid"]
        for held in [each for each in self._prepared.values() if uid in each.pods]:
            await self._let_go(held, uid)

    async def reconcile(self, active: Callable[[], Iterable[Object]]) -> None:
        """Unprepare the claims of pods that disappeared while nobody watched; runs forever."""
        while True:
            alive = {pod["metadata"]["uid"] for pod in active()}
            for held in list(self._prepared.values()):
                for uid in held.pods - alive:
                    try:
                        await self._let_go(held, uid)
                    except ClaimError as error:
                        _log.warning("claims not let go, will try again", extra={"error": str(error)})
            await asyncio.sleep(RECONCILE_S / self._settings.speed_up)

    async def _let_go(self, held: PreparedClaim, uid: str) -> None:
        """Remove one pod; after the last one, drivers unprepare the claim. Raises ClaimError."""
        message = held.message
        if held.pods <= {uid}:
            for driver in list(held.devices):
                async with self._dial(driver) as client:
                    answer = await client.unprepare([message], CALL_TIMEOUT_S)
                if error := answer.claims[message.uid].error:
                    raise ClaimError(
                        f"NodeUnprepareResources failed for ResourceClaim {message.name}: {error}"
                    )
                del held.devices[driver]
            self._prepared.pop((message.namespace, message.name), None)
        held.pods.discard(uid)
        self._save()

    async def _reserved(self, pod: Object, name: str) -> dict[str, Any]:
        meta = pod["metadata"]
        try:
            claim = await self._client.get(RESOURCE_CLAIMS.as_dict(), name, meta["namespace"])
        except KubeError as error:
            raise ClaimError(f"fetch ResourceClaim {name}: {error}") from error
        users = (claim.get("status") or {}).get("reservedFor") or ()
        if meta["uid"] not in {each["uid"] for each in users}:
            uid = claim["metadata"]["uid"]
            words = f"pod {meta['name']} ({meta['uid']}) is not allowed to use ResourceClaim {name} ({uid})"
            raise ClaimError(words)
        return claim

    @contextlib.asynccontextmanager
    async def _dial(self, driver: str) -> Any:
        known = self._drivers.get(driver)
        if known is None:
            raise ClaimError(f"DRA driver {driver} is not registered")
        try:
            async with unix_channel(known.socket) as channel:
                yield DraClient(channel, known.version)
        except CALL_FAILED as error:
            raise ClaimError(f"DRA driver {driver}: {error_text(error)}") from error

    # -- containers -------------------------------------------------------------------------------------

    def options(self, pod: Object, container: Object) -> DeviceOptions:
        """What the CDI devices of its claims add to a container. Raises ConfigError."""
        ids = [each for _, device in self._devices(pod, container) for each in device.cdi_device_ids]
        return cdi_options(self._settings.cdi_folder, ids)

    def dynamic_resources(self, pod: Object, container: Object) -> list[pr.DynamicResource]:
        """As the pod-resources socket reports them."""
        return [
            pr.DynamicResource(
                claim_name=claim.message.name,
                claim_namespace=claim.message.namespace,
                claim_resources=[
                    pr.ClaimResource(
                        driver_name=driver,
                        pool_name=device.pool_name,
                        device_name=device.device_name,
                        share_id=device.share_id or None,
                        cdi_devices=[pr.CDIDevice(name=each) for each in device.cdi_device_ids],
                    )
                ],
            )
            for claim in self._claims(pod, container)
            for driver, devices in claim.devices.items()
            for device in devices  # of all its requests, as the real one does
        ]

    def resource_status(self, pod: Object, container: Object) -> list[dict[str, Any]]:
        """The health of the devices that its claims gave a container, for its status."""
        made, found = names(pod), []
        for use in (container.get("resources") or {}).get("claims") or ():
            held = self._prepared.get((pod["metadata"]["namespace"], made.get(use["name"], "")))
            if held is None:
                continue
            resources: dict[str, dict[str, Any]] = {}
            for driver, devices in held.devices.items():
                for device in devices:
                    if use.get("request", "") in ("", *device.request_names):
                        unnamed = f"{driver}/{device.pool_name}/{device.device_name}"
                        identity = next(iter(device.cdi_device_ids), unnamed)
                        word, message = self._healthy(driver, device)
                        resources.setdefault(identity, {"resourceID": identity, "health": word})
                        if message:
                            resources[identity].setdefault("message", message)
            name = "/".join(filter(None, (f"claim:{use['name']}", use.get("request"))))
            found += [{"name": name, "resources": list(resources.values())}] if resources else []
        return found

    def _healthy(self, driver: str, device: dra.Device) -> tuple[str, str]:
        known = self._health.get(driver, {}).get((device.pool_name, device.device_name))
        if known is None or known.until_s < time.monotonic():
            return "Unknown", ""
        return known.word, known.message

    def _claims(self, pod: Object, container: Object) -> list[PreparedClaim]:
        made = names(pod)
        used = (made.get(each["name"], "") for each in (container.get("resources") or {}).get("claims") or ())
        keys = dict.fromkeys((pod["metadata"]["namespace"], name) for name in used)
        return [self._prepared[key] for key in keys if key in self._prepared]

    def _devices(self, pod: Object, container: Object) -> Iterator[tuple[str, dra.Device]]:
        """For each claim, what the requests named by the container were given; all if it names none."""
        made = names(pod)
        for claim in self._claims(pod, container):
            uses = [
                each.get("request", "")
                for each in (container.get("resources") or {}).get("claims") or ()
                if made.get(each["name"]) == claim.message.name
            ]
            for driver, devices in claim.devices.items():
                for device in devices:
                    requests = {name.partition("/")[0] for name in device.request_names}
                    if "" in uses or not requests.isdisjoint(uses):
                        yield driver, device


def _health_of(news: dra.DeviceHealth) -> tuple[tuple[str, str], Health]:
    until_s = time.monotonic() + (news.health_check_timeout_seconds or FRESH_S)
    health = Health(HEALTHS.get(news.health, "Unknown"), news.message, until_s)
    return (news.device.pool_name, news.device.device_name), health


def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
