"""The life cycle of one admitted pod: volumes, init containers, sidecars, app containers, status, the end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import ConflictError, KubeError, NotFoundError
from gpuslice.adapters.kube.resources import PODS
from gpuslice.core.model import ContainerKind
from simcluster.cluster.amounts import Object
from simcluster.kubelet import references, status, volumes
from simcluster.kubelet.claims import ClaimError
from simcluster.kubelet.container import DEFAULT_GRACE_S, RETRY_S, ContainerLife
from simcluster.kubelet.environment import ConfigError
from simcluster.kubelet.node_services import NodeServices
from simcluster.kubelet.records import ContainerRecord, WaitingState, timestamp
from simcluster.kubelet.specification import PodFacts

_log = logging.getLogger(__name__)


class PodWorker:
    """Runs one pod. `allocate` gives a container its devices again if they were forgotten."""

    def __init__(
        self,
        node: NodeServices,
        pod: dict[str, Any],
        folder: Path,
        pod_ip: str,
        allocate: Callable[[dict[str, Any], str], Awaitable[None]],
    ) -> None:
        self.pod = pod
        self._node = node
        self._folder = folder
        self.pod_ip = pod_ip
        self._allocate = allocate
        self._records = [_record(spec, kind, pod) for spec, kind in containers_of(pod)]
        self._lives: list[ContainerLife] = []
        self._ephemeral: dict[str, tuple[ContainerLife, asyncio.Task[None]]] = {}
        self._facts: PodFacts | None = None
        self._changed = asyncio.Event()
        self._deleted = asyncio.Event()
        self._conditions = status.by_type(pod.get("status", {}).get("conditions"))
        self._reported: dict[str, Any] = {}
        self._started = pod.get("status", {}).get("startTime") or timestamp(datetime.now(UTC))
        self.finished = False
        self._terminated = False

    @property
    def uid(self) -> str:
        return str(self.pod["metadata"]["uid"])

    def update(self, pod: dict[str, Any]) -> None:
        """The pod's present state on the API server; a deletion timestamp ends the pod."""
        self.pod = pod
        theirs = status.by_type(pod.get("status", {}).get("conditions"))
        self._conditions = {
            **theirs,
            **{kind: one for kind, one in self._conditions.items() if kind in theirs},
        }
        self._start_ephemeral()
        if pod["metadata"].get("deletionTimestamp"):
            self._deleted.set()

    def touch(self) -> None:
        """Something shown in its status may have changed."""
        self._changed.set()

    def vanished(self) -> None:
        """The API server no longer has this pod: stop without grace."""
        self.pod = {**self.pod, "metadata": {**self.pod["metadata"], "deletionGracePeriodSeconds": 0}}
        self._deleted.set()

    def record(self, container: str) -> ContainerRecord | None:
        if container in self._ephemeral:
            return self._ephemeral[container][0].record
        return next((one for one in self._records if one.name == container), None)

    async def run(self) -> None:
        """Runs until the pod has ended or is deleted. If cancelled (kubelet stops), containers live on."""
        reporting = asyncio.create_task(self._report(), name=f"status of {self.uid}")
        running = asyncio.create_task(self._run_containers(), name=f"pod {self.uid}")
        deleted = asyncio.create_task(self._deleted.wait(), name=f"deletion of {self.uid}")
        try:
            await asyncio.wait({running, deleted}, return_when=asyncio.FIRST_COMPLETED)
            if running.done() and not self._deleted.is_set():
                running.result()
                self.finished = True
                self._changed.set()
                await self._let_claims_go()
                await deleted
            await _cancel(running, *(task for _, task in self._ephemeral.values()))
            await self._stop(self._ephemeral, 0)
            # app containers first, sidecars after them, each with the pod's grace
            for kinds in ({ContainerKind.APP, ContainerKind.INIT}, {ContainerKind.SIDECAR}):
                names = [one.name for one in self._records if one.kind in kinds]
                metadata = self.pod["metadata"]
                grace = metadata.get("deletionGracePeriodSeconds")
                if grace is None:
                    grace = self.pod["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
                await self._stop(names, float(grace))
            self._terminated = True
            self._changed.set()
        finally:
            await _cancel(running, deleted, reporting, *(task for _, task in self._ephemeral.values()))
        await self._let_claims_go()
        # write the last status, then remove the pod from the API server, then from the disk
        with contextlib.suppress(KubeError):
            await self._write_status()
        await remove(self._node.client, self.pod)
        self._node.runtime.forget(self.uid)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    # -- running ---------------------------------------------------------------------------------

    async def _run_containers(self) -> None:
        await self._prepare_claims()
        self._facts = facts = await self._known_facts()
        self._changed.set()
        self._start_ephemeral()
        self._lives = [
            ContainerLife(self._node, facts, spec, record, self._changed.set)
            for (spec, _), record in zip(containers_of(self.pod), self._records, strict=True)
        ]
        async with asyncio.TaskGroup() as sidecars:
            started = []
            for life in itertools.takewhile(_is_not_app, self._lives):
                if life.record.kind is ContainerKind.SIDECAR:
                    started.append(sidecars.create_task(life.run(), name=f"sidecar {life.record.name}"))
                    await life.running.wait()
                    continue
                await life.run()
                if not life.record.ready:
                    return
            for record in self._records:
                if record.kind is ContainerKind.APP and isinstance(record.state, WaitingState):
                    record.state = WaitingState(
                        "PodInitializing" if len(self._lives) > 1 else "ContainerCreating"
                    )
            async with asyncio.TaskGroup() as apps:
                for life in self._lives:
                    if life.record.kind is ContainerKind.APP:
                        apps.create_task(life.run(), name=f"container {life.record.name}")
            for task in started:  # sidecars end with the last app container
                task.cancel()
        await self._stop([life.record.name for life in self._lives])

    def _start_ephemeral(self) -> None:
        """Beside what runs already. Such a container asks for no device and is never restarted."""
        for spec in self.pod["spec"].get("ephemeralContainers") or ():
            if self._facts is not None and spec["name"] not in self._ephemeral:
                never = {**self.pod, "spec": {**self.pod["spec"], "restartPolicy": "Never"}}
                record = _record(spec, ContainerKind.APP, self.pod)
                life = ContainerLife(
                    self._node, replace(self._facts, pod=never), spec, record, self._changed.set
                )
                task = asyncio.create_task(life.run(), name=f"ephemeral container {record.name}")
                self._ephemeral[record.name] = life, task

    async def _prepare_claims(self) -> None:
        """Before its first container; a kubelet that finds containers running calls no driver."""
        if any(one.running for one in self._node.runtime.of_pod(self.uid)):
            return
        while True:
            try:
                await self._node.claims.prepare(self.pod)
                return
            except ClaimError as error:
                words = f"Failed to prepare dynamic resources: {error}"
                await self._node.event(self.pod, "FailedPrepareDynamicResources", words, warning=True)
                await asyncio.sleep(RETRY_S / self._node.settings.speed_up)

    async def _let_claims_go(self) -> None:
        while True:
            try:
                return await self._node.claims.unprepare(self.pod)
            except ClaimError as error:
                _log.warning("claims not let go, will try again", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S / self._node.settings.speed_up)

    async def _known_facts(self) -> PodFacts:
        """Retries volumes until the objects that they name exist."""
        while True:
            try:
                read = await references.fetch(self._node.client, self.pod)
                made = volumes.prepare(
                    self.pod, self._folder / "volumes", self._node.settings.host_root, read
                )
                break
            except (ConfigError, KubeError) as error:
                words = f"MountVolume.SetUp failed for volume : {error}"
                await self._node.event(self.pod, "FailedMount", words, warning=True)
                await asyncio.sleep(RETRY_S / self._node.settings.speed_up)
        return PodFacts(self.pod, self._folder, made, self.pod_ip, self._allocate_again)

    async def _allocate_again(self, container: str) -> None:
        await self._allocate(self.pod, container)

    # -- the end ---------------------------------------------------------------------------------

    async def _stop(self, names: Iterable[str], grace_s: float = DEFAULT_GRACE_S) -> None:
        wanted = set(names)
        running = [
            one for one in self._node.runtime.of_pod(self.uid) if one.spec.name in wanted and one.running
        ]
        for one in running:
            words = f"Stopping container {one.spec.name}"
            await self._node.event(self.pod, "Killing", words, container=one.spec.name)
        await asyncio.gather(*(self._node.runtime.stop(one, grace_s) for one in running))
        for life in (*self._lives, *(each for each, _ in self._ephemeral.values())):
            life.settle()

    # -- status ----------------------------------------------------------------------------------

    async def _report(self) -> None:
        """Write the status after each change; simultaneous changes become one write."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._write_status()
            except (NotFoundError, ConflictError):
                pass  # deleted or recreated: the watch will report it
            except KubeError:
                await asyncio.sleep(1.0)
                self._changed.set()

    async def _write_status(self) -> None:
        fresh = self.as_status()
        if fresh == self._reported:
            return
        metadata = self.pod["metadata"]
        await self._node.client.patch_status(
            PODS.as_dict(), metadata["name"], fresh, metadata["namespace"], uid=self.uid
        )
        self._reported = fresh

    def as_status(self) -> dict[str, Any]:
        phase = status.phase_of(self.pod, self._records)
        if self._terminated:
            phase = status.final_phase(self._records)
        now = timestamp(datetime.now(UTC))
        listed = status.conditions(phase, self._records, self._conditions, now)
        self._conditions = status.by_type(listed)
        apps = [self._shown(one) for one in self._records if one.kind is ContainerKind.APP]
        init = [one.as_json() for one in self._records if one.kind is not ContainerKind.APP]
        ephemeral = [life.record.as_json() for life, _ in self._ephemeral.values()]
        host_ip = self._node.settings.internal_ip
        return {
            "phase": phase,
            "conditions": listed,
            "hostIP": host_ip,
            "hostIPs": [{"ip": host_ip}],
            "podIP": self.pod_ip,
            "podIPs": [{"ip": self.pod_ip}],
            "startTime": self._started,
            "containerStatuses": apps,
            **({"initContainerStatuses": init} if init else {}),
            **({"ephemeralContainerStatuses": ephemeral} if ephemeral else {}),
        }

    def _shown(self, record: ContainerRecord) -> dict[str, Any]:
        """Includes the health of the devices that its claims gave it."""
        spec = next(one for one in self.pod["spec"]["containers"] if one["name"] == record.name)
        health = self._node.claims.resource_status(self.pod, spec)
        return {**record.as_json(), **({"allocatedResourcesStatus": health} if health else {})}


async def remove(client: KubeClient, pod: Object) -> None:
    """Remove a pod that has ended from the API server; retries until it answers."""
    metadata = pod["metadata"]
    while True:
        try:
            await client.delete(PODS, metadata["name"], metadata["namespace"], uid=metadata["uid"], grace_s=0)
            return
        except (NotFoundError, ConflictError):
            return  # gone, or another pod with that name
        except KubeError:
            await asyncio.sleep(1.0)


def containers_of(pod: Object) -> list[tuple[dict[str, Any], ContainerKind]]:
    """Init containers and sidecars in their order, then app containers."""
    spec = pod["spec"]
    init = [
        (one, ContainerKind.SIDECAR if one.get("restartPolicy") == "Always" else ContainerKind.INIT)
        for one in spec.get("initContainers") or ()
    ]
    return [*init, *((one, ContainerKind.APP) for one in spec["containers"])]


def _record(spec: dict[str, Any], kind: ContainerKind, pod: Object) -> ContainerRecord:
    """From the API server's status, so that a restarted kubelet continues to count."""
    reason = "PodInitializing" if pod["spec"].get("initContainers") else "ContainerCreating"
    known = pod.get("status", {}).get("containerStatuses") or ()
    restarts = next((one.get("restartCount", 0) for one in known if one["name"] == spec["name"]), 0)
    return ContainerRecord(
        spec["name"], spec.get("image", ""), kind, WaitingState(reason), restart_count=restarts
    )


def _is_not_app(life: ContainerLife) -> bool:
    return life.record.kind is not ContainerKind.APP


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
