"""What keeps the exporter small and its pauses short; bench/exporter.py measures the rest."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from gpuslice.adapters.kubelet.podresources import PodResources
from gpuslice.adapters.kubelet.proto import podresources_pb2 as pr
from gpuslice.adapters.kubelet.rpc import Server
from gpuslice.apps.exporter.device_grants import is_card_resource
from gpuslice.core.contract import GPU_MEM
from simcluster.kubelet.rpc import PodResourcesService

HEAVY = ("aiohttp", "numpy", "prometheus_client", "rich", "uvloop", "yaml")


def test_the_exporter_starts_without_what_it_does_not_need() -> None:
    code = "import sys, gpuslice.apps.exporter.main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(HEAVY) & {name.partition(".")[0] for name in loaded.split()} == set()


class Kubelet(PodResourcesService):
    """A kubelet that gave one container these ids."""

    def __init__(self, *ids: str) -> None:
        self.ids = ids

    async def list(self, request: pr.ListPodResourcesRequest) -> pr.ListPodResourcesResponse:
        devices = [pr.ContainerDevices(resource_name=GPU_MEM, device_ids=self.ids)]
        container = pr.ContainerResources(name="main", devices=devices)
        pod = pr.PodResources(name="app", namespace="default", containers=[container])
        return pr.ListPodResourcesResponse(pod_resources=[pod])

    async def get(self, request: pr.GetPodResourcesRequest) -> pr.GetPodResourcesResponse:
        raise NotImplementedError

    async def get_allocatable_resources(
        self, request: pr.AllocatableResourcesRequest
    ) -> pr.AllocatableResourcesResponse:
        raise NotImplementedError


async def test_kubelets_book_is_taken_apart_again_only_when_it_changed() -> None:
    with tempfile.TemporaryDirectory(prefix="gs-") as folder:
        kubelet, socket = Kubelet("GPU-a-_-0"), Path(folder) / "kubelet.sock"
        server = Server([kubelet])
        await server.start(path=str(socket))
        reader = PodResources(socket)
        first = await reader.read(is_card_resource)
        assert await reader.read(is_card_resource) is first
        kubelet.ids = ("GPU-a-_-0", "GPU-a-_-1")
        (changed,) = (await reader.read(is_card_resource)).assignments[GPU_MEM]
        assert changed.ids == {"GPU-a-_-0", "GPU-a-_-1"}
        assert (await reader.read(lambda _: False)).assignments == {}
        server.close()
        await server.wait_closed()
