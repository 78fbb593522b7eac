"""kubelet's side of the device-plugin sockets: takes registrations, dials back, follows the lists.

As in Kubernetes 1.36 the dial back and GetDevicePluginOptions happen *inside* Register, and the end of a
plugin's stream makes its devices unhealthy at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from grpclib import GRPCError, Status
from grpclib.client import Channel
from grpclib.exceptions import StreamTerminatedError

from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.adapters.kubelet.rpc import API_VERSION, HEALTHY, Server
from simcluster.kubelet.devices import Device, DeviceAssignments, Options
from simcluster.kubelet.plugin_calls import Allocation, Call, PluginError, PreferredCall, Response, carry_out
from simcluster.kubelet.rpc import DevicePluginClient, RegistrationService

KUBELET_SOCKET = "kubelet.sock"
DIAL_TIMEOUT_S = 10.0
PRE_START_TIMEOUT_S = 30.0
_EXTENDED = re.compile(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
_BROKEN = (GRPCError, StreamTerminatedError, OSError, asyncio.TimeoutError)
_log = logging.getLogger(__name__)


class PluginEndpoints(RegistrationService):
    """The plugins of one node. `changed` is called after every change of the devices."""

    def __init__(self, folder: Path, device_manager: DeviceAssignments, changed: Callable[[], None]) -> None:
        self._folder = folder
        self._device_manager = device_manager
        self._changed = changed
        self._server: Server | None = None
        self._clients: dict[str, DevicePluginClient] = {}
        self._channels: dict[str, Channel] = {}
        self._watches: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = Server([self])
        await self._server.start(path=str(self._folder / KUBELET_SOCKET))

    async def stop(self) -> None:
        """As when the process dies: every connection closes, and nobody is notified."""
        for task in list(self._watches):
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for channel in self._channels.values():
            channel.close()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    # -- registration ----------------------------------------------------------------------------

    async def register(self, request: dp.RegisterRequest) -> dp.Empty:
        if request.version != API_VERSION:
            raise GRPCError(
                Status.UNKNOWN,
                f'requested API version "{request.version}" is not supported by kubelet. '
                f'Supported versions are ["{API_VERSION}"]',
            )
        if not _EXTENDED.match(request.resource_name) or "kubernetes.io/" in request.resource_name:
            raise GRPCError(Status.UNKNOWN, f'the ResourceName "{request.resource_name}" is invalid')
        channel = Channel(path=str(self._folder / request.endpoint))
        client = DevicePluginClient(channel)
        try:
            answer = await client.get_device_plugin_options(timeout_s=DIAL_TIMEOUT_S)
        except _BROKEN as error:
            channel.close()
            raise GRPCError(
                Status.UNKNOWN, f"failed to dial device plugin {request.endpoint}: {error_text(error)}"
            ) from error
        except asyncio.CancelledError:  # the plugin closed the connection
            channel.close()
            raise
        resource = request.resource_name
        options = Options(answer.pre_start_required, answer.get_preferred_allocation_available)
        old = self._channels.pop(resource, None)
        self._clients[resource], self._channels[resource] = client, channel
        generation = self._device_manager.register(resource, options)
        if old is not None:
            old.close()
        task = asyncio.create_task(self._follow(resource, generation, client), name=f"devices of {resource}")
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)
        return dp.Empty()

    async def _follow(self, resource: str, generation: int, client: DevicePluginClient) -> None:
        try:
            async with contextlib.aclosing(client.list_and_watch()) as lists:
                async for message in lists:
                    if self._device_manager.update(resource, generation, map(device_of, message.devices)):
                        self._changed()
        except _BROKEN as error:
            _log.info("plugin stream ended", extra={"resource": resource, "error": error_text(error)})
        if self._device_manager.stop(resource, generation, time.monotonic()):
            self._changed()

    # -- calls -----------------------------------------------------------------------------------

    async def answer(self, steps: Allocation) -> None:
        """Carry out the calls of one container's allocation. Raises AdmissionError."""
        await carry_out(steps, self._call)

    async def pre_start(self, resource: str, ids: Iterable[str]) -> None:
        """PreStartContainer, if the plugin requires it. Raises PluginError."""
        if not self._device_manager.options(resource).pre_start_required:
            return
        request = dp.PreStartContainerRequest(devices_ids=list(ids))
        try:
            await self._client(resource).pre_start_container(request, timeout_s=PRE_START_TIMEOUT_S)
        except _BROKEN as error:
            raise PluginError(
                f"device plugin PreStartContainer rpc failed with err: {error_text(error)}"
            ) from error

    async def _call(self, call: Call) -> Response:
        client = self._client(call.resource)
        try:
            if isinstance(call, PreferredCall):
                one = dp.ContainerPreferredAllocationRequest(
                    available_deviceIDs=list(call.available),
                    must_include_deviceIDs=list(call.must_include),
                    allocation_size=call.size,
                )
                preferred = await client.get_preferred_allocation(
                    dp.PreferredAllocationRequest(container_requests=[one])
                )
                responses = preferred.container_responses
                return tuple(responses[0].deviceIDs) if responses else ()
            request = dp.AllocateRequest(
                container_requests=[dp.ContainerAllocateRequest(devices_ids=list(call.ids))]
            )
            answer = await client.allocate(request)  # no time limit, as in kubelet
        except _BROKEN as error:
            raise PluginError(error_text(error)) from error
        if not answer.container_responses:
            raise PluginError(f"no containers return in allocation response {answer}")
        return answer.container_responses[0].SerializeToString()

    def _client(self, resource: str) -> DevicePluginClient:
        client = self._clients.get(resource)
        if client is None:
            raise PluginError(f"unknown Device Plugin {resource}")
        return client


def error_text(error: BaseException) -> str:
    """As Go prints a gRPC error; a broken connection is what grpc-go calls Unavailable."""
    if isinstance(error, GRPCError):
        code = "".join(part.capitalize() for part in error.status.name.split("_"))
        return f"rpc error: code = {code} desc = {error.message or ''}"
    if isinstance(error, asyncio.TimeoutError):
        return "rpc error: code = DeadlineExceeded desc = context deadline exceeded"
    return f"rpc error: code = Unavailable desc = connection error: {error}"


def device_of(message: dp.Device) -> Device:
    nodes = tuple(node.ID for node in message.topology.nodes)
    empty = message.HasField("topology") and not nodes
    return Device(message.ID, message.health == HEALTHY, nodes, empty)
