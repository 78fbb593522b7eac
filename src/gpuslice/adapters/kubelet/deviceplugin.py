"""Keeps a device plugin served and registered, whatever kubelet does.

When kubelet starts, it deletes every socket in its plugin folder and forgets who was registered. It dials
back while it answers Register. So the socket is served first and registered then, and both are monitored: a
new identity of ``kubelet.sock`` means a new kubelet, a new identity of our own socket means that it was
deleted. The files are polled every `poll_s` seconds, since file events are easily missed (bind mounts, a
recreated folder).

A kubelet that starts examines its pods about half a second after creating its socket. Until we have
registered, it rejects those with an ended container for good; so while it is away the files are polled more
often.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from grpclib import GRPCError
from grpclib.exceptions import StreamTerminatedError

from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.adapters.kubelet.rpc import (
    API_VERSION,
    DevicePluginService,
    RegistrationClient,
    Server,
    unix_channel,
)

KUBELET_SOCKET = "kubelet.sock"
CALL_FAILED = (GRPCError, StreamTerminatedError, OSError, TimeoutError)
"""What a call over a unix socket can raise: refused, broken off, unreachable, too late."""

_log = logging.getLogger(__name__)
Identity = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class PluginAddress:
    """Where a plugin is: `endpoint` is its socket's file name in kubelet's plugin `folder`."""

    folder: Path
    endpoint: str
    resource: str

    @property
    def socket(self) -> Path:
        return self.folder / self.endpoint

    @property
    def kubelet(self) -> Path:
        return self.folder / KUBELET_SOCKET


@dataclass(frozen=True, slots=True)
class Patience:
    """Times in seconds: between polls of the files, and the same while kubelet is away; for Register;

    without a stream before registering again; and at the end for calls in progress, since kubelet fails the
    pod of a call that is broken off.
    """

    poll_s: float = 0.3
    away_s: float = 0.05
    register_s: float = 15.0
    stream_s: float = 5.0
    finish_s: float = 3.0


class PluginServer:
    """Runs `service` at `address` until cancelled. One instance serves one resource.

    `observe` is called with the duration of each call of kubelet, which admits nothing else meanwhile.
    `on_kubelet` is called whenever kubelet comes or goes; at first it is assumed to be there.
    """

    def __init__(
        self,
        service: DevicePluginService,
        address: PluginAddress,
        patience: Patience = Patience(),
        observe: Callable[[float, str], None] = lambda seconds, call: None,
        on_kubelet: Callable[[bool], None] = lambda answers: None,
    ) -> None:
        self.registrations = 0  # successful ones since the start
        self._look = asyncio.Event()  # something happened: do not wait for the next poll
        self._watched = _Watched(service, observe, ended=self._look.set)
        self._address = address
        self._patience = patience
        self._again = False
        self._on_kubelet = on_kubelet
        self._kubelet_answers = True
        self._registered_with: Identity | None = None
        self._waiting_for = ""

    @property
    def registered(self) -> bool:
        """Whether the current kubelet knows us and listens to our list."""
        return self._registered_with is not None and self._watched.streams > 0

    def offer(self, resource: str) -> None:
        """Offer it under this name from the next run on."""
        self._address = replace(self._address, resource=resource)

    def register_again(self) -> None:
        """Register once more even though nothing seems to have changed (SIGHUP)."""
        self._again = True
        self._look.set()

    async def run(self) -> None:
        """Serve and stay registered. Never returns; a failed step is logged and retried."""
        while True:
            try:
                # of two plugins that take the socket from each other, neither works
                while await asyncio.to_thread(_somebody_listens, self._address.socket):
                    self._say_once(f"another plugin serves {self._address.socket}; waiting for it to end")
                    await asyncio.sleep(self._patience.poll_s)
                async with self._served() as identity:
                    await self._stay_registered(identity)
            except OSError as error:
                self._say_once(f"cannot serve {self._address.socket}: {error}")
                await asyncio.sleep(self._patience.poll_s)

    # -- our socket -------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _served(self) -> AsyncIterator[Identity]:
        path = self._address.socket
        path.unlink(missing_ok=True)
        server = Server([self._watched])
        await server.start(path=str(path))
        try:
            identity = socket_identity(path)
            if identity is None:
                raise FileNotFoundError(f"{path} vanished at once")
            yield identity
        finally:
            self._registered_with = None
            if socket_identity(path) == identity:
                path.unlink(missing_ok=True)
            with contextlib.suppress(TimeoutError):
                # before Python 3.11.3 `timeout` does not raise TimeoutError in a task that has been cancelled
                await asyncio.wait_for(self._watched.idle.wait(), self._patience.finish_s)
            server.close()
            await server.wait_closed()

    async def _stay_registered(self, own: Identity) -> None:
        """Returns when our own socket was deleted or replaced."""
        while socket_identity(self._address.socket) == own:
            self._look.clear()
            kubelet = socket_identity(self._address.kubelet)
            answers = self._watched.streams > 0 or await asyncio.to_thread(
                _somebody_listens, self._address.kubelet
            )
            if answers != self._kubelet_answers:
                self._kubelet_answers = answers
                self._on_kubelet(answers)
            if kubelet is None:
                self._registered_with = None
                self._say_once(f"waiting for kubelet: {self._address.kubelet} is not there")
            elif (
                self._again
                or self._registered_with != kubelet
                or self._watched.lonely_s() > self._patience.stream_s
            ):
                self._again = False
                self._registered_with = kubelet if await self._register() else None
            pause_s = self._patience.poll_s if self._kubelet_answers else self._patience.away_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):  # wait_for of 3.11 may lose a cancellation
                    await self._look.wait()

    # -- kubelet ----------------------------------------------------------------------------------

    async def _register(self) -> bool:
        try:
            options = await self._watched.get_device_plugin_options(dp.Empty())
            request = dp.RegisterRequest(
                version=API_VERSION,
                endpoint=self._address.endpoint,
                resource_name=self._address.resource,
                options=options,
            )
            async with unix_channel(self._address.kubelet) as channel:
                await RegistrationClient(channel).register(request, self._patience.register_s)
        except CALL_FAILED as error:
            self._say_once(f"kubelet did not register {self._address.resource}: {call_error(error)}")
            return False
        self.registrations += 1
        self._waiting_for = ""
        self._watched.expect_stream()
        _log.info("registered with kubelet", extra={"resource": self._address.resource})
        return True

    def _say_once(self, reason: str) -> None:
        """Log why we wait, but not each time."""
        if reason != self._waiting_for:
            self._waiting_for = reason
            _log.warning(reason)


class _Watched(DevicePluginService):
    """The service, with its open ListAndWatch streams counted: without one for long, kubelet has lost us.

    `idle` is set while kubelet waits for no answer.
    """

    def __init__(
        self, service: DevicePluginService, observe: Callable[[float, str], None], ended: Callable[[], None]
    ) -> None:
        self.streams = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._calls = 0
        self._service = service
        self._observe = observe
        self._ended = ended  # called at the end of each stream
        self._lonely_since = time.monotonic()

    @contextlib.contextmanager
    def _answering(self, call: str) -> Iterator[None]:
        began_s = time.monotonic()
        self._calls += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._observe(time.monotonic() - began_s, call)
            self._calls -= 1
            if not self._calls:
                self.idle.set()

    def expect_stream(self) -> None:
        self._lonely_since = time.monotonic()

    def lonely_s(self) -> float:
        return 0.0 if self.streams else time.monotonic() - self._lonely_since

    async def list_and_watch(self, request: dp.Empty) -> AsyncGenerator[dp.ListAndWatchResponse]:
        self.streams += 1
        try:
            async with contextlib.aclosing(self._service.list_and_watch(request)) as lists:
                async for each in lists:
                    yield each
        finally:
            self.streams -= 1
            self._lonely_since = time.monotonic()
            self._ended()

    async def get_device_plugin_options(self, request: dp.Empty) -> dp.DevicePluginOptions:
        return await self._service.get_device_plugin_options(request)

    async def get_preferred_allocation(
        self, request: dp.PreferredAllocationRequest
    ) -> dp.PreferredAllocationResponse:
        with self._answering("GetPreferredAllocation"):
            return await self._service.get_preferred_allocation(request)

    async def allocate(self, request: dp.AllocateRequest) -> dp.AllocateResponse:
        with self._answering("Allocate"):
            return await self._service.allocate(request)

    async def pre_start_container(self, request: dp.PreStartContainerRequest) -> dp.PreStartContainerResponse:
        with self._answering("PreStartContainer"):
            return await self._service.pre_start_container(request)


def call_error(error: BaseException) -> str:
    """A failed call in words, as in kubelet's own log."""
    if isinstance(error, GRPCError):
        return f"{error.status.name}: {error.message}"
    return str(error) or type(error).__name__


def socket_identity(path: Path) -> Identity | None:
    """Distinguishes sockets at the same path over time; inode numbers alone are reused immediately."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
