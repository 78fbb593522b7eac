"""Connections to the API server: plain, encrypted, or through a proxy."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from dataclasses import dataclass
from typing import cast
from urllib.parse import SplitResult, urlsplit

from gpuslice.adapters.kube.http import proxy_authorization
from gpuslice.adapters.kube.http_connection import HttpConnection
from gpuslice.core.errors import without_login, words_of
from gpuslice.core.hosts import bracketed

_LONGEST_HEAD_BYTES = 16 << 10
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Route:
    """How to reach `server`: directly, or through the proxy at `proxy_url`. Both are URLs."""

    server: str
    proxy_url: str = ""
    server_name: str = ""

    def __str__(self) -> str:
        proxy = urlsplit(self.proxy_url).netloc.rpartition("@")[2]
        return without_login(self.server) + (f", through the proxy {proxy}" if proxy else "")

    @property
    def tunnelled(self) -> bool:
        return bool(self.proxy_url) and self.server.startswith("https:")

    def target(self, path: str) -> str:
        """The target in the request line: a proxy without a tunnel needs the whole URL."""
        server = urlsplit(self.server)
        own = server.path.rstrip("/") + path
        return f"http://{server.netloc}{own}" if self.proxy_url and not self.tunnelled else own

    def head(self) -> dict[str, str]:
        """The headers that every request on this route carries."""
        headers = {"Host": urlsplit(self.server).netloc.rpartition("@")[2], "User-Agent": "gpuslice"}
        if self.proxy_url and not self.tunnelled:
            headers |= proxy_authorization(self.proxy_url)
        return headers


def reason_of(error: OSError) -> str:
    """Why there is no connection, in the system's words; asyncio's own name the address once more."""
    if isinstance(error, ssl.SSLError | socket.gaierror) or error.errno is None:
        return words_of(error)
    return os.strerror(error.errno)


async def dial(route: Route, context: ssl.SSLContext | None) -> HttpConnection:
    """A new connection. OSError if there is none, also for TLS. `context` is for https servers."""
    if route.tunnelled:
        assert context is not None
        return await _through_tunnel(route, context)
    first = urlsplit(route.proxy_url or route.server)
    _, connection = await asyncio.get_running_loop().create_connection(
        HttpConnection,
        first.hostname or "",
        _port(first),
        ssl=_context_for(first, context),
        server_hostname=_name(route) if context is not None else None,
    )
    return connection


async def _through_tunnel(route: Route, context: ssl.SSLContext) -> HttpConnection:
    """Ask the proxy for a tunnel and speak TLS with the server inside it."""
    loop = asyncio.get_running_loop()
    proxy, server = urlsplit(route.proxy_url), urlsplit(route.server)
    transport, opening = await loop.create_connection(
        _TunnelOpening, proxy.hostname or "", _port(proxy), ssl=_context_for(proxy, None)
    )
    try:
        host = server.hostname or ""
        where = f"{bracketed(host)}:{_port(server)}"
        headers = {"Host": where, **proxy_authorization(route.proxy_url)}
        lines = [f"CONNECT {where} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        transport.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        await opening.opened
        connection = HttpConnection()
        inner = await loop.start_tls(transport, connection, context, server_hostname=_name(route))
    except BaseException:
        transport.abort()
        raise
    connection.connection_made(cast(asyncio.BaseTransport, inner))
    return connection


class _TunnelOpening(asyncio.Protocol):
    """Reads the proxy's answer to CONNECT, of which only the head matters."""

    def __init__(self) -> None:
        self.opened = asyncio.get_running_loop().create_future()
        self._head = b""

    def data_received(self, data: bytes) -> None:
        self._head += data
        if b"\r\n\r\n" in self._head or len(self._head) > _LONGEST_HEAD_BYTES:
            status_line = self._head.partition(b"\r\n")[0].decode("latin-1")
            self._settle("" if status_line[8:11] == " 20" else f"the proxy says {status_line!r} to a tunnel")

    def connection_lost(self, error: Exception | None) -> None:
        self._settle(f"the proxy closed the connection{f': {error}' if error else ''}")

    def _settle(self, problem: str) -> None:
        if self.opened.done():
            return
        if problem:
            self.opened.set_exception(ConnectionError(problem))
        else:
            self.opened.set_result(None)


def _context_for(first: SplitResult, context: ssl.SSLContext | None) -> ssl.SSLContext | None:
    """TLS with whom we connect to first: the server with its context, a proxy as the system trusts."""
    if first.scheme != "https":
        return None
    return context or ssl.create_default_context()


def _name(route: Route) -> str:
    """The name that the server's certificate must have."""
    return route.server_name or urlsplit(route.server).hostname or ""


def _port(url: SplitResult) -> int:
    return url.port or _PORTS.get(url.scheme, 443)
