"""The pod-resources socket: which container of which pod holds which device ids.

As in Kubernetes 1.36: only active pods, sidecars but no ordinary init container, no pod uid, and one
`ContainerDevices` entry for each device id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from grpclib import GRPCError, Status

from gpuslice.adapters.kubelet.proto import podresources_pb2 as pr
from gpuslice.adapters.kubelet.rpc import Server
from simcluster.cluster.amounts import Object
from simcluster.kubelet.claims import ClaimManager
from simcluster.kubelet.devices import DeviceAssignments
from simcluster.kubelet.rpc import PodResourcesService


class PodResources(PodResourcesService):
    """Answers from the device manager; `active_pods` gives the pods that kubelet calls active."""

    def __init__(
        self,
        path: Path,
        device_manager: DeviceAssignments,
        active_pods: Callable[[], Iterable[Object]],
        claims: ClaimManager | None = None,
    ) -> None:
        self._path = path
        self._device_manager = device_manager
        self._claims = claims
        self._active_pods = active_pods
        self._server: Server | None = None

    async def start(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        self._server = Server([self])
        await self._server.start(path=str(self._path))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def list(self, request: pr.ListPodResourcesRequest) -> pr.ListPodResourcesResponse:
        return pr.ListPodResourcesResponse(pod_resources=[self._pod(pod) for pod in self._active_pods()])

    async def get(self, request: pr.GetPodResourcesRequest) -> pr.GetPodResourcesResponse:
        for pod in self._active_pods():
            metadata = pod["metadata"]
            if (metadata["namespace"], metadata["name"]) == (request.pod_namespace, request.pod_name):
                return pr.GetPodResourcesResponse(pod_resources=self._pod(pod))
        raise GRPCError(
            Status.UNKNOWN, f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
        )

    async def get_allocatable_resources(
        self, request: pr.AllocatableResourcesRequest
    ) -> pr.AllocatableResourcesResponse:
        devices = [
            pr.ContainerDevices(resource_name=resource, device_ids=[identifier])
            for resource, ids in self._device_manager.registered().items()
            for identifier in sorted(ids)
        ]
        return pr.AllocatableResourcesResponse(devices=devices)

    def _pod(self, pod: Object) -> pr.PodResources:
        metadata, spec = pod["metadata"], pod["spec"]
        inits = spec.get("initContainers") or ()
        sidecars = [each for each in inits if each.get("restartPolicy") == "Always"]
        return pr.PodResources(
            name=metadata["name"],
            namespace=metadata["namespace"],
            containers=[self._container(pod, each) for each in (*sidecars, *spec["containers"])],
        )

    def _container(self, pod: Object, container: Object) -> pr.ContainerResources:
        devices = [
            pr.ContainerDevices(resource_name=one.resource, device_ids=[identifier])
            for one in self._device_manager.assignments_of(pod["metadata"]["uid"], container["name"])
            for identifier in sorted(one.ids)
        ]
        claimed = self._claims.dynamic_resources(pod, container) if self._claims is not None else []
        return pr.ContainerResources(name=container["name"], devices=devices, dynamic_resources=claimed)
