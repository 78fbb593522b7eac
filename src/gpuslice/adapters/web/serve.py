"""Serves an application until told to stop, then lets requests finish; certificates may change meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import faulthandler
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpuslice.adapters.limits import LIMITS, Limits
from gpuslice.adapters.web.clients import Admit, App, Client, Clients, address_of
from gpuslice.adapters.web.connection import Connection
from gpuslice.adapters.web.server_tls import HTTP2, CertificateError, ServerTls, TlsFiles
from gpuslice.core.errors import GpusliceError, words_of
from gpuslice.core.hosts import bracketed

_log = logging.getLogger(__name__)
RELOAD_EVERY_S = 1.0
BACKLOG = 1024
ACCEPT_AGAIN_S = 0.1  # after an error for too many open files
SWEEP_EVERY_S = 1.0
FIRST_INHERITED = 3  # the first socket from systemd
EVERYWHERE = "::"
"""All addresses of this machine, including IPv4; only IPv4 if the kernel has no IPv6."""


class CannotServeError(GpusliceError):
    """The address or the certificate cannot be used; the message says which.

    `in_use`: another program has the port.
    """

    def __init__(self, message: str, *, in_use: bool = False) -> None:
        super().__init__(message)
        self.in_use = in_use


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen. `certificate`, `key` and `client_ca` are as in `TlsFiles`.

    `tls_files`: instead of them, what a configuration file says now. `client_names`: as `Clients.names`.
    `http2`: offered to clients over TLS; HTTP/1.1 is always served. `inherited`: a listening socket opened by
    somebody else, instead of host and port. `admit`: as in `Clients`.
    """

    port: int
    host: str = EVERYWHERE
    certificate: str = ""
    key: str = ""
    client_ca: str = ""
    tls_files: Callable[[], TlsFiles] | None = None
    client_names: frozenset[str] = frozenset()
    http2: bool = False
    drain_s: float = 5.0  # how long a request in progress gets to finish
    reload_every_s: float = RELOAD_EVERY_S  # how often the files are checked, besides at each connection
    inherited: socket.socket | None = None
    limits: Limits = LIMITS
    admit: Admit | None = None

    @property
    def tls(self) -> bool:
        return bool(self.certificate)


@contextlib.asynccontextmanager
async def serving(
    app: App, listen: Listen, met: Callable[[Clients], None] = lambda _: None
) -> AsyncIterator[int]:
    """Serve `app` inside the block; yields the port, which the system chose if 0 was requested.

    `met` is called with the clients, for code that must disconnect them. Raises `CannotServeError`.
    """
    try:
        tls = _server_tls(listen)
    except CertificateError as error:
        raise CannotServeError(str(error)) from error
    clients = Clients(app, listen.limits, names=listen.client_names, admit=listen.admit)
    if tls is not None:
        clients.trusts = tls.trusts
    met(clients)
    try:
        server = await _listening(clients, listen)
    except (OSError, UnicodeError) as error:
        in_use = getattr(error, "errno", None) == errno.EADDRINUSE
        why = "another program uses it" if in_use else words_of(error)
        place = f"{bracketed(listen.host)}:{listen.port}"
        raise CannotServeError(f"cannot listen on {place}: {why}", in_use=in_use) from error
    beside = [asyncio.create_task(_sweep(clients), name="cut off slow clients")]
    if tls is not None:
        beside.append(asyncio.create_task(_reload(tls, clients, listen), name="reload certificates"))
    accepting = []
    for each in server.sockets:
        listening = socket.socket(fileno=os.dup(each.fileno()))
        listening.setblocking(False)
        listening.listen(BACKLOG)
        work = _accept(listening, _protocols(clients, listen), tls, listen.limits)
        accepting.append(asyncio.create_task(work, name="accept"))
    try:
        address = server.sockets[0].getsockname()
        port = int(address[1]) if isinstance(address, tuple) else 0  # a unix socket has none
        encrypted = tls is not None and tls.context is not None
        _log.info("serving", extra={"host": listen.host, "port": port, "tls": encrypted})
        yield port
    finally:
        server.close()
        for task in accepting:
            task.cancel()
        await clients.drain(listen.drain_s)
        for task in beside:
            task.cancel()
        await asyncio.gather(*accepting, *beside, return_exceptions=True)
        await server.wait_closed()


def _server_tls(listen: Listen) -> ServerTls | None:
    """None where it is plain HTTP and stays so."""
    files = TlsFiles(listen.certificate, listen.key, listen.client_ca)
    wanted = listen.tls_files or (lambda: files)
    if wanted is not listen.tls_files and not listen.certificate:
        return None
    return ServerTls(wanted, http2=listen.http2, settled_s=listen.reload_every_s)


async def _listening(clients: Clients, listen: Listen) -> asyncio.Server:
    """Bound, but accepting nobody by itself: it would accept all that wait in one turn of the loop."""
    loop = asyncio.get_running_loop()
    protocols = partial(Connection, clients)
    bound = listen.inherited
    if bound is None and listen.host == EVERYWHERE and socket.has_dualstack_ipv6():
        # one socket for both: asyncio would open two, with different ports if the system chooses
        bound = socket.create_server((EVERYWHERE, listen.port), family=socket.AF_INET6, dualstack_ipv6=True)
    if bound is None:
        host = "0.0.0.0" if listen.host == EVERYWHERE else listen.host
        return await loop.create_server(protocols, host, listen.port, backlog=BACKLOG, start_serving=False)
    if bound.family == socket.AF_UNIX:
        return await loop.create_unix_server(protocols, sock=bound, backlog=BACKLOG, start_serving=False)
    return await loop.create_server(protocols, sock=bound, backlog=BACKLOG, start_serving=False)


def _protocols(clients: Clients, listen: Listen) -> Callable[[], asyncio.BaseProtocol]:
    """Creates the protocol for a new client that uses TLS."""
    if not listen.http2:
        return partial(Connection, clients)
    from gpuslice.adapters.web.http2 import Http2Connection  # 3 MiB that most processes do not need

    return partial(_ByAlpn, clients, Http2Connection)


class _ByAlpn(asyncio.Protocol):
    """A client after the handshake, in which it named the HTTP version that it speaks."""

    def __init__(self, clients: Clients, http2: type[Client]) -> None:
        self._clients = clients
        self._http2 = http2

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        session = transport.get_extra_info("ssl_object")
        chosen = session.selected_alpn_protocol() if session is not None else None
        kind = self._http2 if chosen == HTTP2 else Connection
        connection = kind(self._clients)
        transport.set_protocol(connection)
        connection.connection_made(transport)


async def _accept(
    listening: socket.socket,
    protocols: Callable[[], asyncio.BaseProtocol],
    tls: ServerTls | None,
    limits: Limits,
) -> None:
    """Accept connections for ever, each by what the files of certificates say at that moment.

    An asyncio server would begin with all that come, in their order. Here one begins in each turn of the
    loop, of another address than the one before, so that whoever floods us waits behind himself; and the
    oldest handshake ends if there are too many.
    """
    loop = asyncio.get_running_loop()
    arrived = Arrived(limits.clients)
    shaking: dict[asyncio.Task[None], None] = {}

    async def shake(connection: socket.socket) -> None:
        if tls is not None:
            tls.refresh()
        context = tls.context if tls is not None else None
        timeout_s = limits.handshake_s if context is not None else None
        with contextlib.suppress(OSError):  # the client's problem, even if it does not speak TLS
            await loop.connect_accepted_socket(
                protocols, connection, ssl=context, ssl_handshake_timeout=timeout_s
            )

    with contextlib.closing(listening), contextlib.closing(arrived):
        try:
            while True:
                try:
                    if not arrived:
                        arrived.add(*await loop.sock_accept(listening))
                    for _ in range(limits.clients):
                        arrived.add(*listening.accept())
                except BlockingIOError:
                    pass
                except OSError as error:
                    _log.warning("connection not accepted", extra={"error": words_of(error)})
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                    continue
                if len(shaking) >= limits.handshakes:
                    oldest = next(iter(shaking))
                    oldest.cancel()
                    del shaking[oldest]
                task = loop.create_task(shake(arrived.next()), name="handshake")
                shaking[task] = None
                task.add_done_callback(lambda done: shaking.pop(done, None))
                await asyncio.sleep(0)
        finally:
            for task in shaking:
                task.cancel()


class Arrived:
    """Connections that nothing has been done for yet, by the address that they come from."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._by_address: dict[str, deque[socket.socket]] = {}  # in the order of their turns

    def __len__(self) -> int:
        return self._count

    def add(self, connection: socket.socket, peer: object) -> None:
        """If there are too many, the oldest from the busiest address goes."""
        connection.setblocking(False)
        self._by_address.setdefault(address_of(peer), deque()).append(connection)
        self._count += 1
        if self._count > self._most:
            self._count -= 1
            busiest = max(self._by_address, key=lambda each: len(self._by_address[each]))
            self._by_address[busiest].popleft().close()
            if not self._by_address[busiest]:
                del self._by_address[busiest]

    def next(self) -> socket.socket:
        address = next(iter(self._by_address))
        waiting = self._by_address.pop(address)
        self._count -= 1
        found = waiting.popleft()
        if waiting:
            self._by_address[address] = waiting
        return found

    def close(self) -> None:
        for waiting in self._by_address.values():
            for connection in waiting:
                connection.close()


async def _sweep(clients: Clients) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(SWEEP_EVERY_S)
        clients.sweep(loop.time())


def inherited_socket(environ: Mapping[str, str] = os.environ) -> socket.socket | None:
    """The first socket that systemd opened for this process (sd_listen_fds); None without any."""
    if environ.get("LISTEN_PID") != str(os.getpid()) or environ.get("LISTEN_FDS", "0") == "0":
        return None
    return socket.socket(fileno=FIRST_INHERITED)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a process on uvloop if it is installed, otherwise on asyncio's own loop."""
    tell_stacks_on_signal()
    make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        make_loop = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main)


def tell_stacks_on_signal() -> None:
    """On SIGUSR1, write to stderr what the process's threads are doing, even if its loop hangs."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def until_stopped() -> Awaitable[None]:
    """Returns when the process is told to end: SIGTERM or SIGINT."""
    return _Stopped()


def memory_limit_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The container's memory limit, from its cgroup; None without a limit, or if it is unknown."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int((root / name).read_text())
            return limit if limit < 1 << 62 else None
    return None


class _Stopped:
    """Not a coroutine: a process that fails to start never awaits it, and Python would complain."""

    def __await__(self) -> Generator[Any, None, Any]:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop(number: signal.Signals) -> None:
            _log.info("ending", extra={"signal": number.name})
            stopped.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        return stopped.wait().__await__()


async def work_until(stopped: Awaitable[object], tasks: Mapping[str, Coroutine[Any, Any, None]]) -> None:
    """Run the long tasks of a process, by name, until `stopped`. One that fails ends all, and is raised.

    So does one that is cancelled although nobody here asked for it: some libraries report a lost connection
    to a task by cancelling it. A TaskGroup would take that for its normal end, and the process would continue
    without it.
    """
    ending = False

    async def kept(name: str, work: Coroutine[Any, Any, None]) -> None:
        nonlocal ending
        try:
            await work
        except asyncio.CancelledError:
            if ending:
                raise
            ending = True
            raise RuntimeError(f"the task {name!r} was cancelled amid its work") from None
        except BaseException:
            ending = True
            raise

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(kept(name, work), name=name) for name, work in tasks.items()]
            try:
                await stopped
            finally:
                ending = True
                for task in running:
                    task.cancel()
    finally:
        for work in tasks.values():
            work.close()  # if it was cancelled before it began


async def _reload(tls: ServerTls, clients: Clients, listen: Listen) -> None:
    """Follow the files also while nobody connects, and end connections of those who are trusted no more."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(listen.reload_every_s)
        tls.refresh()
        clients.end_untrusted(loop.time(), listen.drain_s)
