"""Whether a pod may start here: devices first, then the node's own filters, strictly one pod at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from simcluster.cluster.amounts import Object, add, amounts_of, pod_requests, total
from simcluster.kubelet import checkpoint
from simcluster.kubelet.devices import (
    AdmissionError,
    ContainerDemand,
    DeviceAssignments,
    TopologyAffinityError,
)
from simcluster.kubelet.node import device_limits, is_extended
from simcluster.kubelet.plugins import PluginEndpoints
from simcluster.kubelet.runtime import Runtime
from simcluster.kubelet.settings import KubeletSettings
from simcluster.kubelet.troubles import Rejection, Troubles
from simcluster.kubelet.worker import containers_of
from simcluster.scheduler import filters
from simcluster.scheduler.nodes import NodeInfo


class Admission:
    """`active` returns the pods that may hold devices now, `admitted` those already admitted, `node` the node
    object.
    """

    def __init__(
        self,
        settings: KubeletSettings,
        device_manager: DeviceAssignments,
        endpoints: PluginEndpoints,
        runtime: Runtime,
        troubles: Troubles,
        *,
        active: Callable[[], Iterable[Object]],
        admitted: Callable[[], Iterable[Object]],
        node: Callable[[], Awaitable[Object | None]],
    ) -> None:
        self._settings = settings
        self._device_manager = device_manager
        self._endpoints = endpoints
        self._runtime = runtime
        self._troubles = troubles
        self._active = active
        self._admitted = admitted
        self._node = node

    async def admit(self, pod: Object, *, sources_ready: bool = True) -> Rejection | None:
        """Give the pod its devices and check everything else; None if it may run."""
        if (kept_away := self._troubles.keep_away(pod)) is not None:
            return kept_away
        demands = demands_of(pod)
        try:
            active = self._active_uids(pod, sources_ready=sources_ready)
            self._device_manager.align_pod(pod["metadata"]["uid"], demands, active)
            for demand in demands:
                await self._allocate(pod, demand, sources_ready=sources_ready)
        except TopologyAffinityError as error:
            return Rejection("TopologyAffinityError", str(error))
        except AdmissionError as error:
            message = f"Allocate failed due to {error}, which is unexpected"
            return Rejection("UnexpectedAdmissionError", message)
        return self._does_not_fit(pod) or await self._wrong_node(pod)

    async def allocate_again(self, pod: Object, container: str) -> None:
        """For a container whose devices kubelet has forgotten. Raises AdmissionError."""
        for demand in demands_of(pod):
            if demand.name == container and demand.limits:
                await self._allocate(pod, demand)

    def save(self) -> None:
        """Write the checkpoint, as after every allocation and every device list."""
        raw = checkpoint.encode(self._device_manager.assignments(), self._device_manager.registered())
        checkpoint.write(self._settings.plugin_folder, raw)

    async def _allocate(self, pod: Object, demand: ContainerDemand, *, sources_ready: bool = True) -> None:
        uid = pod["metadata"]["uid"]
        held = self._device_manager.assignments()
        active = self._active_uids(pod, sources_ready=sources_ready)
        running = self._runtime.find(uid, demand.name)
        already = not sources_ready and running is not None and running.running
        await self._endpoints.answer(self._device_manager.allocate(uid, demand, active, already))
        if self._device_manager.assignments() != held:
            self.save()

    def _active_uids(self, pod: Object, *, sources_ready: bool) -> set[str]:
        active = {one["metadata"]["uid"] for one in self._active()} | {pod["metadata"]["uid"]}
        if not sources_ready:  # pods not yet read may hold devices
            active |= {one.pod_uid for one in self._device_manager.assignments()}
        return active

    def _does_not_fit(self, pod: Object) -> Rejection | None:
        others = list(self._admitted())
        used = total(pod_requests(one) for one in others)
        capacity = amounts_of(dict(self._settings.capacity))
        for name, asked in add({"pods": 1}, pod_requests(pod)).items():
            taken = len(others) if name == "pods" else used.get(name, 0)
            if is_extended(name) or asked == 0 or taken + asked <= capacity.get(name, 0):
                continue
            return Rejection(
                f"OutOf{name}",
                f"Node didn't have enough resource: {name}, requested: {asked}, "
                f"used: {taken}, capacity: {capacity.get(name, 0)}",
            )
        return None

    async def _wrong_node(self, pod: Object) -> Rejection | None:
        """Uses the labels that the node has now; while it cannot be read, no pod is refused."""
        spec = pod["spec"]
        node = await self._node() if spec.get("nodeSelector") or spec.get("affinity") else None
        if node is None:
            return None
        failure = filters.node_affinity(pod, NodeInfo(self._settings.name, node, {}), frozenset())
        if failure is None:
            return None
        return Rejection("NodeAffinity", f"Predicate NodeAffinity failed: {failure.reasons[0]}")


def demands_of(pod: Object) -> list[ContainerDemand]:
    """Its containers' limits of devices, in the order in which kubelet serves them."""
    return [ContainerDemand(spec["name"], device_limits(spec), kind) for spec, kind in containers_of(pod)]
