"""kubelet's side of gRPC with other processes on the node: what it serves, and what it calls.

A device plugin registers and is then called; a driver of claims is found by its socket, queried for its name,
and called; monitoring queries what was given out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

from grpclib.client import Channel, UnaryStreamMethod, UnaryUnaryMethod

from gpuslice.adapters.kubelet.draplugin import DRA, HEALTH
from gpuslice.adapters.kubelet.draplugin import REGISTRATION as DRIVER_REGISTRATION
from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.adapters.kubelet.proto import draplugin_pb2 as dra
from gpuslice.adapters.kubelet.proto import podresources_pb2 as pr
from gpuslice.adapters.kubelet.rpc import DEVICE_PLUGIN, POD_RESOURCES, REGISTRATION, complete, unary


class RegistrationService(ABC):
    """What kubelet serves at ``kubelet.sock``."""

    @abstractmethod
    async def register(self, request: dp.RegisterRequest) -> dp.Empty: ...

    def __mapping__(self) -> dict[str, Any]:
        return {f"{REGISTRATION}/Register": unary(self.register, dp.RegisterRequest, dp.Empty)}


class PodResourcesService(ABC):
    """What kubelet serves at ``pod-resources/kubelet.sock``."""

    @abstractmethod
    async def list(self, request: pr.ListPodResourcesRequest) -> pr.ListPodResourcesResponse: ...

    @abstractmethod
    async def get(self, request: pr.GetPodResourcesRequest) -> pr.GetPodResourcesResponse: ...

    @abstractmethod
    async def get_allocatable_resources(
        self, request: pr.AllocatableResourcesRequest
    ) -> pr.AllocatableResourcesResponse: ...

    def __mapping__(self) -> dict[str, Any]:
        return {
            f"{POD_RESOURCES}/List": unary(
                self.list, pr.ListPodResourcesRequest, pr.ListPodResourcesResponse
            ),
            f"{POD_RESOURCES}/Get": unary(self.get, pr.GetPodResourcesRequest, pr.GetPodResourcesResponse),
            f"{POD_RESOURCES}/GetAllocatableResources": unary(
                self.get_allocatable_resources,
                pr.AllocatableResourcesRequest,
                pr.AllocatableResourcesResponse,
            ),
        }


class DevicePluginClient:
    """Calls a device plugin; each call except the stream may have a time limit in seconds."""

    def __init__(self, channel: Channel) -> None:
        self._options = UnaryUnaryMethod(
            channel, f"{DEVICE_PLUGIN}/GetDevicePluginOptions", dp.Empty, dp.DevicePluginOptions
        )
        self._watch = UnaryStreamMethod(
            channel, f"{DEVICE_PLUGIN}/ListAndWatch", dp.Empty, dp.ListAndWatchResponse
        )
        self._preferred = UnaryUnaryMethod(
            channel,
            f"{DEVICE_PLUGIN}/GetPreferredAllocation",
            dp.PreferredAllocationRequest,
            dp.PreferredAllocationResponse,
        )
        self._allocate = UnaryUnaryMethod(
            channel, f"{DEVICE_PLUGIN}/Allocate", dp.AllocateRequest, dp.AllocateResponse
        )
        self._pre_start = UnaryUnaryMethod(
            channel,
            f"{DEVICE_PLUGIN}/PreStartContainer",
            dp.PreStartContainerRequest,
            dp.PreStartContainerResponse,
        )

    async def get_device_plugin_options(self, timeout_s: float | None = None) -> dp.DevicePluginOptions:
        reply: dp.DevicePluginOptions = await complete(self._options(dp.Empty(), timeout=timeout_s))
        return reply

    async def list_and_watch(self) -> AsyncGenerator[dp.ListAndWatchResponse]:
        """Yields every list the plugin sends; ends when its stream does, raises when it breaks."""
        async with self._watch.open() as stream:
            await stream.send_message(dp.Empty(), end=True)
            async for reply in stream:
                yield reply

    async def get_preferred_allocation(
        self, request: dp.PreferredAllocationRequest, timeout_s: float | None = None
    ) -> dp.PreferredAllocationResponse:
        reply: dp.PreferredAllocationResponse = await complete(self._preferred(request, timeout=timeout_s))
        return reply

    async def allocate(
        self, request: dp.AllocateRequest, timeout_s: float | None = None
    ) -> dp.AllocateResponse:
        reply: dp.AllocateResponse = await complete(self._allocate(request, timeout=timeout_s))
        return reply

    async def pre_start_container(
        self, request: dp.PreStartContainerRequest, timeout_s: float | None = None
    ) -> dp.PreStartContainerResponse:
        reply: dp.PreStartContainerResponse = await complete(self._pre_start(request, timeout=timeout_s))
        return reply


class DriverRegistrationClient:
    """Queries a driver at its registration socket for its name."""

    def __init__(self, channel: Channel) -> None:
        self._info = UnaryUnaryMethod(
            channel, f"{DRIVER_REGISTRATION}/GetInfo", dra.InfoRequest, dra.PluginInfo
        )
        self._notify = UnaryUnaryMethod(
            channel,
            f"{DRIVER_REGISTRATION}/NotifyRegistrationStatus",
            dra.RegistrationStatus,
            dra.RegistrationStatusResponse,
        )

    async def get_info(self, timeout_s: float) -> dra.PluginInfo:
        reply: dra.PluginInfo = await complete(self._info(dra.InfoRequest(), timeout=timeout_s))
        return reply

    async def notify(self, status: dra.RegistrationStatus, timeout_s: float) -> None:
        await complete(self._notify(status, timeout=timeout_s))


class DraClient:
    """Calls a driver of claims."""

    def __init__(self, channel: Channel, version: str = "v1", health: str = "v1alpha1") -> None:
        path = DRA.format(version=version)
        self._prepare = UnaryUnaryMethod(
            channel,
            f"{path}/NodePrepareResources",
            dra.NodePrepareResourcesRequest,
            dra.NodePrepareResourcesResponse,
        )
        self._unprepare = UnaryUnaryMethod(
            channel,
            f"{path}/NodeUnprepareResources",
            dra.NodeUnprepareResourcesRequest,
            dra.NodeUnprepareResourcesResponse,
        )
        self._watch = UnaryStreamMethod(
            channel,
            f"{HEALTH.format(version=health)}/NodeWatchResources",
            dra.NodeWatchResourcesRequest,
            dra.NodeWatchResourcesResponse,
        )

    async def prepare(self, claims: list[dra.Claim], timeout_s: float) -> dra.NodePrepareResourcesResponse:
        request = dra.NodePrepareResourcesRequest(claims=claims)
        reply: dra.NodePrepareResourcesResponse = await complete(self._prepare(request, timeout=timeout_s))
        return reply

    async def unprepare(
        self, claims: list[dra.Claim], timeout_s: float
    ) -> dra.NodeUnprepareResourcesResponse:
        request = dra.NodeUnprepareResourcesRequest(claims=claims)
        reply: dra.NodeUnprepareResourcesResponse = await complete(
            self._unprepare(request, timeout=timeout_s)
        )
        return reply

    async def health(self) -> AsyncGenerator[dra.NodeWatchResourcesResponse]:
        async with self._watch.open() as stream:
            await stream.send_message(dra.NodeWatchResourcesRequest(), end=True)
            async for reply in stream:
                yield reply
