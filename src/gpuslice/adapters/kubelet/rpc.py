"""Our side of kubelet's three services, over grpclib: a device plugin is served, kubelet is called.

A server class lists its methods in ``__mapping__`` (grpclib's way); a client class has one method for each.
Handlers take and return whole messages and raise `grpclib.GRPCError` for a refusal. Service paths are
kubelet's ("v1beta1", "v1") while the messages' package is ours: only the path is on the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpclib.server
from google.protobuf.message import DecodeError
from grpclib import GRPCError, Status
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Cardinality, Handler
from grpclib.exceptions import ProtocolError, StreamTerminatedError
from h2.exceptions import H2Error

from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.adapters.kubelet.proto import podresources_pb2 as pr

API_VERSION = "v1beta1"
HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"
ATTACHING_ITERATIONS, ACCEPTING_ITERATIONS = 2, 100
UNREADABLE = (DecodeError, AssertionError, NotImplementedError)
"""What grpclib raises at a message that is no protobuf, is cut off or missing, or is compressed."""

REGISTRATION = "/v1beta1.Registration"
DEVICE_PLUGIN = "/v1beta1.DevicePlugin"
POD_RESOURCES = "/v1.PodResourcesLister"


# -- servers -----------------------------------------------------------------------------------------
class Server(grpclib.server.Server):  # type: ignore[misc]  # grpclib has no types
    """A server that hangs up when it is closed.

    grpclib leaves that to the clients, and since Python 3.12 ``wait_closed`` of asyncio's servers waits until
    they have: a plugin would not end before kubelet does.
    """

    def __init__(self, services: Sequence[Any]) -> None:
        super().__init__(services)
        self._connected: weakref.WeakSet[Any] = weakref.WeakSet()

    def _protocol_factory(self) -> Any:
        protocol = super()._protocol_factory()
        self._connected.add(protocol)
        return protocol

    def close(self) -> None:
        """Accept nobody from now on; `wait_closed` does the rest.

        asyncio attaches a client in the next turn of the loop, and loses one whose server was closed
        meanwhile: its socket stays open until it is collected.
        """
        for listening in self._server.sockets if self._server is not None else ():
            self._loop.remove_reader(listening.fileno())

    async def wait_closed(self) -> None:
        """Until every call has ended and every client is gone."""
        for _ in range(ATTACHING_ITERATIONS):
            await asyncio.sleep(0)
        super().close()
        for protocol in list(self._connected):
            await protocol.handler.wait_closed()
            for _ in range(ACCEPTING_ITERATIONS):  # a client accepted just now is connected in one or two
                if hasattr(protocol, "connection"):
                    protocol.connection.close()
                    break
                await asyncio.sleep(0)
        await super().wait_closed()


class DevicePluginService(ABC):
    """What a device plugin serves at its own socket."""

    @abstractmethod
    async def get_device_plugin_options(self, request: dp.Empty) -> dp.DevicePluginOptions: ...

    @abstractmethod
    def list_and_watch(self, request: dp.Empty) -> AsyncGenerator[dp.ListAndWatchResponse]:
        """Yields the complete list at once and again after every change, until kubelet goes away."""

    @abstractmethod
    async def get_preferred_allocation(
        self, request: dp.PreferredAllocationRequest
    ) -> dp.PreferredAllocationResponse: ...

    @abstractmethod
    async def allocate(self, request: dp.AllocateRequest) -> dp.AllocateResponse: ...

    @abstractmethod
    async def pre_start_container(
        self, request: dp.PreStartContainerRequest
    ) -> dp.PreStartContainerResponse: ...

    def __mapping__(self) -> dict[str, Any]:
        preferred = unary(
            self.get_preferred_allocation, dp.PreferredAllocationRequest, dp.PreferredAllocationResponse
        )
        pre_start = unary(self.pre_start_container, dp.PreStartContainerRequest, dp.PreStartContainerResponse)
        return {
            f"{DEVICE_PLUGIN}/GetDevicePluginOptions": unary(
                self.get_device_plugin_options, dp.Empty, dp.DevicePluginOptions
            ),
            f"{DEVICE_PLUGIN}/ListAndWatch": server_stream(
                self.list_and_watch, dp.Empty, dp.ListAndWatchResponse
            ),
            f"{DEVICE_PLUGIN}/GetPreferredAllocation": preferred,
            f"{DEVICE_PLUGIN}/Allocate": unary(self.allocate, dp.AllocateRequest, dp.AllocateResponse),
            f"{DEVICE_PLUGIN}/PreStartContainer": pre_start,
        }


async def _request(stream: Any) -> Any:
    """What is asked. Raises `GRPCError`, which is answered, where it cannot be read."""
    try:
        request = await stream.recv_message()
    except UNREADABLE as error:
        raise GRPCError(Status.INTERNAL, f"the request cannot be read: {error}") from error
    if request is None:
        raise GRPCError(Status.INTERNAL, "the request cannot be read: it has no message")
    return request


def unary(call: Callable[[Any], Awaitable[Any]], request_type: type, reply_type: type) -> Any:
    async def handler(stream: Any) -> None:
        request = await _request(stream)
        try:
            reply = await call(request)
        except asyncio.CancelledError:
            await _say_ending(stream)
            raise
        await stream.send_message(reply)

    return Handler(handler, Cardinality.UNARY_UNARY, request_type, reply_type)


def server_stream(call: Callable[[Any], AsyncGenerator[Any]], request_type: type, reply_type: type) -> Any:
    async def handler(stream: Any) -> None:
        replies = call(await _request(stream))
        try:
            async for reply in replies:
                await stream.send_message(reply)
        except asyncio.CancelledError:
            await _say_ending(stream)
            raise
        finally:
            await replies.aclose()

    return Handler(handler, Cardinality.UNARY_STREAM, request_type, reply_type)


async def _say_ending(stream: Any) -> None:
    """grpclib would leave the other side waiting for ever on a connection that stays open.

    Where that side has gone first, uvloop says so by a RuntimeError; where it has given this call up, as
    kubelet does when its time is over, h2 does.
    """
    with contextlib.suppress(StreamTerminatedError, ProtocolError, OSError, RuntimeError, H2Error):
        await stream.send_trailing_metadata(status=Status.UNAVAILABLE, status_message="ending")


# -- clients -----------------------------------------------------------------------------------------
async def complete(call: Coroutine[Any, Any, Any]) -> Any:
    """What a call returns or raises, made in a task of its own: `GRPCError` where the answer cannot be read.

    Where a connection breaks, grpclib ends the call by cancelling the task that it runs in, and does not take
    that back; the cancellation may even come when the call is over. A task that goes on afterwards would end
    at its next wait: before Python 3.11.3 at its next `asyncio.timeout`.
    """
    task = asyncio.create_task(call)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    if task.cancelled():
        raise StreamTerminatedError("the call was cut off")
    try:
        return task.result()
    except UNREADABLE as error:
        raise GRPCError(Status.INTERNAL, f"the answer cannot be read: {error}") from error
    except AttributeError as error:  # grpclib takes its attributes from a connection that was lost meanwhile
        raise StreamTerminatedError("the connection was lost as the call began") from error


class RegistrationClient:
    """Tells kubelet of a plugin, at ``kubelet.sock``."""

    def __init__(self, channel: Channel) -> None:
        self._register = UnaryUnaryMethod(channel, f"{REGISTRATION}/Register", dp.RegisterRequest, dp.Empty)

    async def register(self, request: dp.RegisterRequest, timeout_s: float) -> None:
        await complete(self._register(request, timeout=timeout_s))


class PodResourcesClient:
    """Asks at ``pod-resources/kubelet.sock``; `podresources` turns the messages into values."""

    def __init__(self, channel: Channel) -> None:
        self._list = UnaryUnaryMethod(
            channel, f"{POD_RESOURCES}/List", pr.ListPodResourcesRequest, pr.ListPodResourcesResponse
        )

    async def list(self, timeout_s: float) -> pr.ListPodResourcesResponse:
        reply: pr.ListPodResourcesResponse = await complete(
            self._list(pr.ListPodResourcesRequest(), timeout=timeout_s)
        )
        return reply


@contextlib.asynccontextmanager
async def unix_channel(path: Path) -> AsyncIterator[Channel]:
    """A gRPC channel over the unix socket at `path`; it connects at the first call, closes at the end."""
    channel = Channel(path=str(path))
    try:
        yield channel
    finally:
        channel.close()
