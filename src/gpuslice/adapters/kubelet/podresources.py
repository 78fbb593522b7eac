"""kubelet's own record of who holds which devices: pod-resources v1, as values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuslice.adapters.kubelet.deviceplugin import CALL_FAILED, call_error
from gpuslice.adapters.kubelet.proto import podresources_pb2 as pr
from gpuslice.adapters.kubelet.rpc import PodResourcesClient, unix_channel
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.errors import GpusliceError

Wanted = Callable[[str], bool]


class PodResourcesError(GpusliceError):
    """kubelet's pod-resources socket does not answer: who holds what is unknown, rather than nobody."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """One device that a container got by dynamic resource allocation."""

    namespace: str
    pod: str
    container: str
    claim: str
    claim_namespace: str
    driver: str
    pool: str
    device: str
    share_id: str = ""


@dataclass(frozen=True, slots=True)
class DeviceAssignments:
    """Everything kubelet gave out: device ids by resource, and claims."""

    assignments: dict[str, tuple[DeviceAssignment, ...]]
    claims: tuple[Claimed, ...] = ()


class PodResources:
    """Queries kubelet at `path`. Each query opens a new connection, since kubelet may have restarted."""

    def __init__(self, path: Path, *, timeout_s: float = 5.0) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._last: tuple[Wanted, pr.ListPodResourcesResponse, DeviceAssignments] | None = None

    async def assignments(self, resource: str) -> tuple[DeviceAssignment, ...]:
        """Every container that holds devices of `resource`. Raises `PodResourcesError`.

        Ordinary init containers are not included, since kubelet does not list them.
        """
        return tuple(assignments_of((await self._answer()).pod_resources, resource))

    async def read(self, wanted: Wanted) -> DeviceAssignments:
        """As `assignments`, for every `wanted` resource that is in use, with all claims, in one query.

        Returns the same object as last time if kubelet's answer is the same.
        """
        answer = await self._answer()
        if self._last is not None and self._last[0] == wanted and self._last[1] == answer:
            return self._last[2]
        pods = answer.pod_resources
        names = {
            devices.resource_name
            for pod in pods
            for container in pod.containers
            for devices in container.devices
        }
        assignments = {name: tuple(assignments_of(pods, name)) for name in sorted(names) if wanted(name)}
        found = DeviceAssignments(assignments, tuple(claims_of(pods)))
        self._last = (wanted, answer, found)
        return found

    async def _answer(self) -> pr.ListPodResourcesResponse:
        try:
            async with unix_channel(self._path) as channel:
                return await PodResourcesClient(channel).list(self._timeout_s)
        except CALL_FAILED as error:
            raise PodResourcesError(f"pod-resources at {self._path}: {call_error(error)}") from error


def assignments_of(pods: Iterable[pr.PodResources], resource: str) -> Iterable[DeviceAssignment]:
    """The ids of one resource by container; kubelet sends them one by one, they are joined here."""
    for pod in pods:
        for container in pod.containers:
            ids = frozenset(
                identifier
                for devices in container.devices
                if devices.resource_name == resource
                for identifier in devices.device_ids
            )
            if ids:
                yield DeviceAssignment(pod.namespace, pod.name, container.name, ids)


def claims_of(pods: Iterable[pr.PodResources]) -> Iterable[Claimed]:
    """Every device of every claim; kubelet lists them where its feature for that is on."""
    for pod in pods:
        for container in pod.containers:
            for dynamic in container.dynamic_resources:
                for device in dynamic.claim_resources:
                    yield Claimed(
                        pod.namespace,
                        pod.name,
                        container.name,
                        dynamic.claim_name,
                        dynamic.claim_namespace,
                        device.driver_name,
                        device.pool_name,
                        device.device_name,
                        device.share_id,
                    )
