"""The seam under the Kubernetes client: bytes to the API server and back.

Production uses `AiohttpTransport`; a test may plug anything that answers like an API server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Protocol

import aiohttp

from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.credentials import Secret, authorization, tls_context
from gpuslice.adapters.kube.errors import ConfigError, KubeError, UnavailableError, error_of
from gpuslice.adapters.kube.http import NO_STRINGS, Request, Response

_GRACE_S = 15.0  # a watch that outlives its own timeout by this much hangs on a dead connection


class Transport(Protocol):
    """Carries requests. Header names of a `Response` are lower case; paths start with a slash."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = NO_STRINGS,
        headers: Mapping[str, str] = NO_STRINGS,
        body: bytes = b"",
    ) -> Response:
        """The answer, whatever its status; UnavailableError when there was none."""

    def stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = NO_STRINGS,
        headers: Mapping[str, str] = NO_STRINGS,
    ) -> AsyncIterator[bytes]:
        """The lines of an endless answer, without line ends; a KubeError when it is no 2xx or breaks off."""


class AiohttpTransport:
    """HTTP(S) with connection reuse. Credentials are looked at for every request, so they may rotate.

    `timeout_s` is for one request to be answered whole; streams end by their own ``timeoutSeconds``.
    """

    def __init__(self, connection: Connection, *, timeout_s: float = 30, connections: int = 20) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None
        self._tls: tuple[Secret, Any] | None = None

    async def __aenter__(self) -> AiohttpTransport:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; the transport can be used again afterwards."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = NO_STRINGS,
        headers: Mapping[str, str] = NO_STRINGS,
        body: bytes = b"",
    ) -> Response:
        request = Request(method, path, query, headers, body)
        answer = await self._once(request)
        if answer.status == 401 and await self._renewed():
            answer = await self._once(request)
        return answer

    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = NO_STRINGS,
        headers: Mapping[str, str] = NO_STRINGS,
    ) -> AsyncIterator[bytes]:
        request = Request(method, path, query, headers)
        lasts_s = float(query.get("timeoutSeconds", "0"))
        limits = aiohttp.ClientTimeout(
            total=lasts_s + _GRACE_S if lasts_s else None, sock_connect=self._timeout_s
        )
        async with contextlib.AsyncExitStack() as stack:
            with _as_unavailable(request):
                answer = await stack.enter_async_context(await self._send(request, limits))
                await self._expect_stream(answer, request)
            async for line in _lines(answer.content, request):
                yield line

    async def _expect_stream(self, answer: aiohttp.ClientResponse, request: Request) -> None:
        if answer.status == 401:
            await self._renewed()
        if not 200 <= answer.status < 300:
            raise error_of(answer.status, await answer.read(), _lower(answer.headers), what=str(request))

    async def _once(self, request: Request) -> Response:
        with _as_unavailable(request):
            async with await self._send(request, aiohttp.ClientTimeout(total=self._timeout_s)) as answer:
                return Response(answer.status, _lower(answer.headers), await answer.read())

    async def _send(self, request: Request, limits: aiohttp.ClientTimeout) -> Any:
        secret = await self._secret()
        connection = self._connection
        return self._open().request(
            request.method,
            connection.server + request.path,
            params=request.query,
            headers={**connection.headers, **authorization(secret), **request.headers},
            data=request.body or None,
            ssl=self._context(secret),
            proxy=connection.proxy_url or None,
            server_hostname=connection.tls.server_name or None,
            timeout=limits,
            allow_redirects=False,
        )

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=self._connections, keepalive_timeout=30)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=True)
        return self._session

    async def _secret(self) -> Secret:
        """Who we are now. What cannot be had now may be had later: a plugin asks over the network too."""
        credentials = self._connection.credentials
        try:
            if credentials.blocks():  # it may take seconds: not on the event loop
                return await asyncio.to_thread(credentials.current)
            return credentials.current()
        except ConfigError as error:
            raise UnavailableError(f"no credentials: {error}", outcome_unknown=False) from error

    async def _renewed(self) -> bool:
        """After a 401: whether reading the credentials anew gave others than those refused."""
        before = await self._secret()
        self._connection.credentials.forget()
        return await self._secret() != before

    def _context(self, secret: Secret) -> Any:
        """The TLS context; made anew only when the client certificate changed."""
        if not self._connection.server.startswith("https:"):
            return True
        if self._tls is None or self._tls[0].certificate != secret.certificate:
            self._tls = (secret, tls_context(self._connection.tls, secret))
        return self._tls[1]


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@contextlib.contextmanager
def _as_unavailable(request: Request) -> Iterator[None]:
    """Every way a connection can fail becomes UnavailableError, which says if the request may have worked."""
    try:
        yield
    except KubeError:
        raise
    except aiohttp.ClientConnectorError as error:
        raise UnavailableError(f"{request}: cannot connect: {error}", outcome_unknown=False) from error
    except TimeoutError as error:
        raise UnavailableError(f"{request}: no answer in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise UnavailableError(f"{request}: connection lost: {error!r}") from error


async def _lines(content: aiohttp.StreamReader, request: Request) -> AsyncIterator[bytes]:
    """Split at newlines. Not `readline`: it refuses lines over 128 KiB and an object may have 1.5 MiB."""
    rest = b""
    with _as_unavailable(request):
        async for chunk in content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line:
                    yield line
    if rest.strip():
        yield rest
