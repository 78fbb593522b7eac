"""kubelet's manager of claims: finds drivers by their sockets, has claims prepared, reads their CDI devices.

A kubelet that is started again asks the drivers anew; the real one has a checkpoint for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.resources import RESOURCE_CLAIMS, RESOURCE_SLICES
from gpuslice.adapters.kubelet.deviceplugin import CALL_FAILED, socket_identity
from gpuslice.adapters.kubelet.draplugin import DRA_VERSIONS, DraClient, RegistrationReader
from gpuslice.adapters.kubelet.proto import draplugin_pb2 as dra
from gpuslice.adapters.kubelet.proto import podresources_pb2 as pr
from gpuslice.adapters.kubelet.rpc import unix_channel
from simcluster.controllers.claims import names
from simcluster.kubelet.environment import ConfigError
from simcluster.kubelet.node_services import DeviceOptions
from simcluster.kubelet.plugins import error_text
from simcluster.kubelet.rootfs import Mount
from simcluster.kubelet.settings import KubeletSettings
from simcluster.scheduler.amounts import Object

_log = logging.getLogger(__name__)
CALL_TIMEOUT_S = 45.0
LOOK_S = 0.1
WIPE_AFTER_S = 30.0
"""How long after a driver's socket went its ResourceSlices are deleted."""


class ClaimError(Exception):
    """The pod's claims are not prepared; kubelet says so in an event and tries again."""


@dataclass(frozen=True, slots=True)
class Driver:
    socket: Path
    version: str
    identity: object  # of the registration socket


@dataclass(slots=True)
class PreparedClaim:
    """What drivers answered; `pods` are the uids of those that use it here."""

    message: dra.Claim
    devices: dict[str, list[dra.Device]] = field(default_factory=dict)  # by driver
    pods: set[str] = field(default_factory=set)


class ClaimManager:
    """The claims of one node."""

    def __init__(self, settings: KubeletSettings, client: KubeClient) -> None:
        self._settings = settings
        self._client = client
        self._drivers: dict[str, Driver] = {}
        self._lost: dict[str, float] = {}  # drivers whose socket went, and when
        self._prepared: dict[tuple[str, str], PreparedClaim] = {}  # by namespace and name

    # -- drivers ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the folder of registration sockets; slices from before this kubelet are out of date."""
        await self._wipe(f"spec.nodeName={self._settings.name}")
        while True:
            present = {path: socket_identity(path) for path in self._settings.plugin_registry.glob("*.sock")}
            for name, driver in list(self._drivers.items()):
                if driver.identity not in present.values():
                    del self._drivers[name]
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
                reader = RegistrationReader(channel)
                info = await reader.get_info(CALL_TIMEOUT_S)
                offered = [each for each in DRA_VERSIONS if f"{each}.DRAPlugin" in info.supported_versions]
                if info.type != "DRAPlugin" or not offered:
                    error = f"plugin of type {info.type} offers {', '.join(info.supported_versions)}"
                    await reader.notify(dra.RegistrationStatus(error=error), CALL_TIMEOUT_S)
                    return
                self._drivers[info.name] = Driver(Path(info.endpoint), offered[0], identity)
                self._lost.pop(info.name, None)
                await reader.notify(dra.RegistrationStatus(plugin_registered=True), CALL_TIMEOUT_S)
        except CALL_FAILED as error:  # the socket is older than who serves it, or newer
            _log.info("driver not registered yet", extra={"socket": path.name, "error": error_text(error)})

    async def _wipe(self, fields: str) -> None:
        with contextlib.suppress(KubeError):
            for each in (await self._client.list(RESOURCE_SLICES, fields=fields)).items or ():
                await self._client.delete(RESOURCE_SLICES, each["metadata"]["name"])

    # -- claims -----------------------------------------------------------------------------------------

    async def prepare(self, pod: Object) -> None:
        """Every claim of the pod, before its first container. Raises ClaimError."""
        asked: dict[str, list[PreparedClaim]] = defaultdict(list)
        for name in names(pod).values():
            claim = await self._reserved(pod, name)
            meta = claim["metadata"]
            message = dra.Claim(namespace=meta["namespace"], name=name, uid=meta["uid"])
            held = self._prepared.get((meta["namespace"], name))
            if held is None or held.message.uid != meta["uid"]:
                held = self._prepared[meta["namespace"], name] = PreparedClaim(message)
            held.pods.add(pod["metadata"]["uid"])
            for driver in {each["driver"] for each in claim["status"]["allocation"]["devices"]["results"]}:
                if driver not in held.devices:
                    asked[driver].append(held)
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

    async def unprepare(self, pod: Object) -> None:
        """When its last container has ended: claims that no other pod here uses. Raises ClaimError."""
        for name in names(pod).values():
            key = (pod["metadata"]["namespace"], name)
            held = self._prepared.get(key)
            if held is None:
                continue
            if held.pods <= {pod["metadata"]["uid"]}:
                for driver in list(held.devices):
                    async with self._dial(driver) as client:
                        answer = await client.unprepare([held.message], CALL_TIMEOUT_S)
                    if error := answer.claims[held.message.uid].error:
                        raise ClaimError(f"NodeUnprepareResources failed for ResourceClaim {name}: {error}")
                    del held.devices[driver]
                del self._prepared[key]
            held.pods.discard(pod["metadata"]["uid"])

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
        environ: dict[str, str] = {}
        mounts: list[Mount] = []
        edits = self._cdi_devices() if ids else {}
        for each in ids:
            if each not in edits:
                raise ConfigError(f"failed to inject CDI devices: unresolvable CDI devices {each}")
            environ |= dict(pair.split("=", 1) for pair in edits[each].get("env") or ())
            mounts += [
                Mount(mount["containerPath"], Path(mount["hostPath"]))
                for mount in edits[each].get("mounts") or ()
            ]
        return DeviceOptions(environ, tuple(mounts), {})

    def dynamic_resources(self, pod: Object, container: Object) -> list[pr.DynamicResource]:
        """As the pod-resources socket tells them."""
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
            for driver, device in _devices_of(claim, pod, container)
        ]

    def _claims(self, pod: Object, container: Object) -> list[PreparedClaim]:
        made = names(pod)
        used = (made.get(each["name"], "") for each in (container.get("resources") or {}).get("claims") or ())
        keys = dict.fromkeys((pod["metadata"]["namespace"], name) for name in used)
        return [self._prepared[key] for key in keys if key in self._prepared]

    def _devices(self, pod: Object, container: Object) -> Iterator[tuple[str, dra.Device]]:
        for claim in self._claims(pod, container):
            yield from _devices_of(claim, pod, container)

    def _cdi_devices(self) -> dict[str, dict[str, Any]]:
        """Every CDI device of the node, by its full name."""
        found = {}
        for path in sorted(self._settings.cdi_folder.glob("*.json")):
            document = json.loads(path.read_bytes())
            for each in document["devices"]:
                found[f"{document['kind']}={each['name']}"] = each["containerEdits"]
        return found


def _devices_of(claim: PreparedClaim, pod: Object, container: Object) -> Iterable[tuple[str, dra.Device]]:
    """Of a claim, what the requests that the container names were given; all of it where it names none."""
    made = names(pod)
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
