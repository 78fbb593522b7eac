"""NVIDIA's device plugin for whole cards (``nvidia.com/gpu``), as a static pod of the node.

This kubelet supports only this static pod: the plugin runs while its manifest exists.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.adapters.kubelet.rpc import (
    API_VERSION,
    HEALTHY,
    DevicePluginService,
    RegistrationClient,
    Server,
    unix_channel,
)
from gpuslice.core.contract import ENV_VISIBLE, EXCLUSIVE_GPU
from simcluster import gpu

ENDPOINT = "nvidia-gpu.sock"
MANIFEST = "nvidia-device-plugin.yml"
_MANIFEST_TEXT = """\
apiVersion: v1
kind: Pod
metadata: {name: nvidia-device-plugin, namespace: kube-system}
spec: {hostNetwork: true, containers: [{name: nvidia-device-plugin-ctr, image: nvidia/k8s-device-plugin}]}
"""
_LOOK_S = 0.2  # kubelet uses inotify, and in addition looks every 20 s
_REGISTER_TIMEOUT_S = 5.0


def install(manifests: Path) -> None:
    """Put the plugin's manifest where kubelet finds it, as the vendor's nodes come up."""
    manifests.mkdir(parents=True, exist_ok=True)
    (manifests / MANIFEST).write_text(_MANIFEST_TEXT)


async def run_while_installed(manifests: Path, plugins: Path, state: Path) -> None:
    """Start and stop the plugin of the cards in `state` as its manifest comes and goes; until cancelled."""
    with gpu.Machine(state) as machine:
        uuids = [card.uuid for card in machine.cards()]
    plugin = None
    try:
        while True:
            wanted = (manifests / MANIFEST).exists()
            if wanted and plugin is None:
                plugin = ExclusiveCards(plugins, uuids)
                await plugin.start()
            elif not wanted and plugin is not None:
                await plugin.stop()
                plugin = None
            await asyncio.sleep(_LOOK_S)
    finally:
        if plugin is not None:
            await plugin.stop()


class ExclusiveCards(DevicePluginService):
    """One device for each card; a container sees the cards it holds and no other."""

    def __init__(self, folder: Path, uuids: Sequence[str]) -> None:
        self._folder = folder
        self._devices = [dp.Device(ID=one, health=HEALTHY) for one in uuids]
        self._ended = asyncio.Event()
        self._server: Server | None = None

    async def start(self) -> None:
        """Serve first, then register, because kubelet dials back during registration."""
        self._server = Server([self])
        await self._server.start(path=str(self._folder / ENDPOINT))
        request = dp.RegisterRequest(version=API_VERSION, endpoint=ENDPOINT, resource_name=EXCLUSIVE_GPU)
        async with unix_channel(self._folder / "kubelet.sock") as channel:
            await RegistrationClient(channel).register(request, _REGISTER_TIMEOUT_S)

    async def stop(self) -> None:
        """End the stream, which makes the cards unallocatable immediately."""
        self._ended.set()
        await asyncio.sleep(0)
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def get_device_plugin_options(self, request: dp.Empty) -> dp.DevicePluginOptions:
        return dp.DevicePluginOptions()

    async def list_and_watch(self, request: dp.Empty) -> AsyncGenerator[dp.ListAndWatchResponse]:
        yield dp.ListAndWatchResponse(devices=self._devices)
        await self._ended.wait()

    async def get_preferred_allocation(
        self, request: dp.PreferredAllocationRequest
    ) -> dp.PreferredAllocationResponse:
        return dp.PreferredAllocationResponse()

    async def allocate(self, request: dp.AllocateRequest) -> dp.AllocateResponse:
        answers = [
            dp.ContainerAllocateResponse(envs={ENV_VISIBLE: ",".join(sorted(one.devices_ids))})
            for one in request.container_requests
        ]
        return dp.AllocateResponse(container_responses=answers)

    async def pre_start_container(self, request: dp.PreStartContainerRequest) -> dp.PreStartContainerResponse:
        return dp.PreStartContainerResponse()
