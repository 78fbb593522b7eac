"""The kubelet of one node: wires sockets, pods and the node object together."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, UnavailableError
from gpuslice.adapters.kube.events import EventRecorder
from gpuslice.adapters.kube.resources import NODES, PODS
from gpuslice.adapters.kube.watch import Change, ChangeKind, Reflector
from simcluster.cluster.amounts import Object
from simcluster.kubelet import checkpoint, exclusive
from simcluster.kubelet.admission import Admission
from simcluster.kubelet.claims import ClaimManager
from simcluster.kubelet.devices import DeviceAssignments
from simcluster.kubelet.node import NodeStatus
from simcluster.kubelet.node_services import NodeServices
from simcluster.kubelet.plugins import PluginEndpoints
from simcluster.kubelet.podresources import PodResources
from simcluster.kubelet.processes import ProcessTable
from simcluster.kubelet.records import timestamp
from simcluster.kubelet.runtime import Runtime
from simcluster.kubelet.server import KubeletServer
from simcluster.kubelet.settings import KubeletSettings
from simcluster.kubelet.troubles import Rejection, Troubles
from simcluster.kubelet.worker import PodWorker, remove
from simcluster.scheduler.nodes import FINISHED
from simcluster.workload.images import ImageRegistry

_log = logging.getLogger(__name__)
_Pod = dict[str, Any]


class Kubelet:
    """`run` it until cancelled, which is a crash; another one with the same `runtime` then continues."""

    def __init__(
        self,
        settings: KubeletSettings,
        client: KubeClient,
        runtime: Runtime,
        registry: ImageRegistry,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings
        self.device_manager = DeviceAssignments(rng or random.Random(), settings.topology)
        self.ready = asyncio.Event()
        self.troubles = Troubles()
        self._client = client
        self._runtime = runtime
        self._workers: dict[str, PodWorker] = {}
        self._admissions: asyncio.Queue[tuple[_Pod, bool]] = asyncio.Queue()
        self._removals: asyncio.Queue[_Pod] = asyncio.Queue()
        self._tasks = asyncio.TaskGroup()
        self._endpoints = PluginEndpoints(settings.plugin_folder, self.device_manager, self._devices_changed)
        self._claims = ClaimManager(settings, client, self._health_changed)
        self._pod_resources = PodResources(
            settings.pod_resources_socket, self.device_manager, self._admitted_pods, self._claims
        )
        self._pods = Reflector(client, PODS.as_dict(), self._on_pod, fields=f"spec.nodeName={settings.name}")
        self._server = KubeletServer(self._find, runtime, self._pods_folder, settings.host, settings.port)
        self._admission = Admission(
            settings,
            self.device_manager,
            self._endpoints,
            runtime,
            self.troubles,
            active=self._active_pods,
            admitted=self._admitted_pods,
            node=self._own_node,
        )
        recorder = EventRecorder(client, "kubelet", host=settings.name)
        self._services = NodeServices(
            settings, client, recorder, runtime, registry, self.device_manager, self._endpoints, self._claims
        )
        self._addresses = itertools.count(2)

    @property
    def _pods_folder(self) -> Path:
        return self.settings.root / "pods"

    async def run(self) -> None:
        self._recover()
        await self._server.start()
        status = NodeStatus(
            self._client, self.settings, self.device_manager, self._server.url, troubles=self.troubles
        )
        try:
            await self._endpoints.start()
            await self._pod_resources.start()
            # kubelet treats an empty folder as a new machine: any file counts as a checkpoint, even its
            # socket
            folder = self.settings.plugin_folder
            await _persist(lambda: status.register(reset_extended=not any(folder.iterdir())))
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._report(status), name="node status")
                self._tasks.create_task(self._beat(status), name="node lease")
                self._tasks.create_task(self._admit_all(), name="admission")
                self._tasks.create_task(self._remove_all(), name="pod removal")
                self._tasks.create_task(self._pods.run(), name="pods of the node")
                self._tasks.create_task(self._claims.run(), name="drivers of claims")
                if self.settings.gpu_state is not None:
                    table = ProcessTable(self.settings.proc, self._runtime)
                    self._runtime.on_created = table.refresh
                    self._tasks.create_task(table.run(), name="process table")
                    whole = exclusive.run_while_installed(
                        self.settings.manifests, self.settings.plugin_folder, self.settings.gpu_state
                    )
                    self._tasks.create_task(whole, name="plugin of whole cards")
                await self._pods.synced.wait()
                reconciling = self._claims.reconcile(self._active_pods)
                self._tasks.create_task(reconciling, name="claims of pods that are gone")
                self.ready.set()
        finally:
            await self._pod_resources.stop()
            await self._endpoints.stop()
            await self._server.stop()

    def _recover(self) -> None:
        """Clean the plugin folder and restore the checkpoints. Raises CorruptClaimsError."""
        self.settings.plugin_folder.mkdir(parents=True, exist_ok=True)
        self.settings.plugin_registry.mkdir(exist_ok=True)
        own = self.settings.host_root / "var" / "lib" / "kubelet"
        own.parent.mkdir(parents=True, exist_ok=True)
        if not own.is_symlink():
            own.symlink_to(self.settings.root)
        checkpoint.remove_sockets(self.settings.plugin_folder)
        self._claims.recover()
        try:
            saved = checkpoint.read(self.settings.plugin_folder)
        except checkpoint.CorruptCheckpointError as error:
            _log.error("checkpoint is corrupt, going on without it", extra={"error": str(error)})
            return
        if saved is not None:
            self.device_manager.restore(saved.assignments, saved.registered, time.monotonic())

    # -- the node --------------------------------------------------------------------------------

    async def _report(self, status: NodeStatus) -> None:
        while True:
            with contextlib.suppress(KubeError):
                await status.report()
            await asyncio.sleep(self.settings.node_status_s)

    async def _beat(self, status: NodeStatus) -> None:
        while True:
            with contextlib.suppress(KubeError):
                await status.heartbeat()
            await asyncio.sleep(self.settings.lease_s)

    def _devices_changed(self) -> None:
        self._admission.save()

    def _health_changed(self, uids: set[str]) -> None:
        for uid in uids & self._workers.keys():
            self._workers[uid].touch()

    async def _own_node(self) -> Object | None:
        try:
            return await self._client.get(NODES.as_dict(), self.settings.name)
        except KubeError:
            return None

    # -- pods ------------------------------------------------------------------------------------

    def _on_pod(self, change: Change[_Pod]) -> None:
        pod = change.object
        if pod is None:
            return
        worker = self._workers.get(pod["metadata"]["uid"])
        if change.kind is ChangeKind.DELETED:
            if worker is not None:
                worker.vanished()
        elif worker is not None:
            worker.update(pod)
        elif change.kind is ChangeKind.ADDED:
            self._admissions.put_nowait((pod, self._pods.synced.is_set()))
        elif pod["metadata"].get("deletionTimestamp") and _is_over(pod):
            self._removals.put_nowait(pod)

    async def _admit_all(self) -> None:
        """One pod after another, in the order of creation."""
        while True:
            waiting = [await self._admissions.get()]
            while not self._admissions.empty():
                waiting.append(self._admissions.get_nowait())
            waiting.sort(key=lambda one: one[0]["metadata"].get("creationTimestamp") or "")
            for pod, sources_ready in waiting:
                current = self._pods.objects.get((pod["metadata"]["namespace"], pod["metadata"]["name"]))
                if current is None or current["metadata"]["uid"] != pod["metadata"]["uid"]:
                    continue  # deleted while it was waiting
                if _is_over(current) or current["metadata"].get("deletionTimestamp"):
                    await self._put_away(current)
                    continue
                rejection = await self._admission.admit(current, sources_ready=sources_ready)
                if rejection is not None:
                    await self._reject(current, rejection)
                    continue
                self._start(current)

    async def _put_away(self, pod: _Pod) -> None:
        """A pod that has ended, or that is being deleted before it started here."""
        if not pod["metadata"].get("deletionTimestamp"):
            return
        if self._runtime.of_pod(pod["metadata"]["uid"]):
            self._start(pod)
            self._workers[pod["metadata"]["uid"]].update(pod)
        else:
            self._removals.put_nowait(pod)

    def _start(self, pod: _Pod) -> None:
        uid = pod["metadata"]["uid"]
        folder = self._pods_folder / uid
        worker = PodWorker(self._services, pod, folder, self._address(pod), self._admission.allocate_again)
        self._workers[uid] = worker
        self._tasks.create_task(self._run_worker(uid, worker), name=f"worker of {uid}")
        # what happened to the pod while it was admitted
        current = self._pods.objects.get((pod["metadata"]["namespace"], pod["metadata"]["name"]))
        if current is None or current["metadata"]["uid"] != uid:
            worker.vanished()
        else:
            worker.update(current)

    async def _run_worker(self, uid: str, worker: PodWorker) -> None:
        """An unexpected error with one pod must not stop the others."""
        try:
            await worker.run()
        except Exception:
            _log.exception("pod worker failed", extra={"pod": worker.pod["metadata"]["name"]})
        del self._workers[uid]

    async def _remove_all(self) -> None:
        while True:
            await remove(self._client, await self._removals.get())

    async def _reject(self, pod: _Pod, rejection: Rejection) -> None:
        """Final: kubelet does not retry; only a controller's new pod gets another chance."""
        metadata = pod["metadata"]
        await self._services.event(pod, rejection.reason, rejection.message, warning=True)
        status = {
            "phase": "Failed",
            "reason": rejection.reason,
            "message": f"Pod was rejected: {rejection.message}",
            "startTime": timestamp(datetime.now(UTC)),
        }
        await _persist(
            lambda: self._client.patch_status(
                PODS.as_dict(), metadata["name"], status, metadata["namespace"], uid=metadata["uid"]
            )
        )

    def _address(self, pod: _Pod) -> str:
        if pod["spec"].get("hostNetwork"):
            return self.settings.internal_ip
        known = pod.get("status", {}).get("podIP")
        taken = {worker.pod_ip for worker in self._workers.values()}
        while not known or known in taken:
            known = f"{self.settings.pod_subnet}.{next(self._addresses) % 253 + 2}"
        return str(known)

    def _admitted_pods(self) -> Iterator[Object]:
        return (worker.pod for worker in self._workers.values() if not worker.finished)

    def _active_pods(self) -> Iterator[Object]:
        """Admitted or about to be, and not ended: these keep what they hold."""
        waiting = (
            pod
            for pod in self._pods.objects.values()
            if pod["metadata"]["uid"] not in self._workers and not _is_over(pod)
        )
        return itertools.chain(self._admitted_pods(), waiting)

    def _find(self, namespace: str, name: str) -> PodWorker | None:
        for worker in self._workers.values():
            metadata = worker.pod["metadata"]
            if (metadata["namespace"], metadata["name"]) == (namespace, name):
                return worker
        return None


def _is_over(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in FINISHED


async def _persist(action: Any) -> None:
    """Retry until the API server answers; what it rejects is logged and dropped."""
    delay_s = 0.2
    while True:
        try:
            await action()
            return
        except KubeError as error:
            if not isinstance(error, UnavailableError):
                _log.warning("API server refused", extra={"error": str(error)})
                return
            await asyncio.sleep(delay_s)
            delay_s = min(5.0, delay_s * 2)
