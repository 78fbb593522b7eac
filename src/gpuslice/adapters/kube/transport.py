"""The seam under the Kubernetes client: bytes to the API server and back.

Production uses `HttpTransport`, wrapped in a `TimedTransport` if request times are published; a test may plug
in anything that answers like an API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from urllib.parse import urlencode

from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.credentials import Secret, authorization, tls_context
from gpuslice.adapters.kube.dial import Route, dial, reason_of
from gpuslice.adapters.kube.errors import ConfigError, UnavailableError, error_of
from gpuslice.adapters.kube.followed_config import FollowedConfig
from gpuslice.adapters.kube.http import BUSY_TRIES, ApiRequest, ApiResponse
from gpuslice.adapters.kube.http_connection import BrokenConnectionError, HttpConnection
from gpuslice.core.errors import without_login

_log = logging.getLogger(__name__)

_GRACE_S = 15.0  # a watch that outlives its own timeout by this much hangs on a dead connection
_FOREVER_S = 1e9
_IDLE_S = 30.0  # longer than this a connection is not trusted to be open still
FOLLOW_EVERY_S = 1.0
LAST_ANSWERS_S = 5.0  # for requests in progress when the way to the server changes
_AWAY_S = 3.0  # shorter failures are not worth a log line
_HEADER = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


class Transport(Protocol):
    """Carries requests. Header names of an `ApiResponse` are lower case; paths start with a slash."""

    async def request(self, request: ApiRequest) -> ApiResponse:
        """The answer, whatever its status; UnavailableError if there was none."""

    def stream(self, request: ApiRequest) -> AsyncGenerator[bytes]:
        """The lines of an endless answer, without line ends; a KubeError if it is not a 2xx or breaks off."""


class HttpTransport:
    """HTTP(S) with connection reuse. Credentials are checked for every request, so they may rotate; the files
    of the connection are followed while it is open.

    `timeout_s` limits one request, up to the end of its answer; streams end by their own ``timeoutSeconds``.
    Answers are requested uncompressed: near the API server, compression costs more than the network.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        timeout_s: float = 30,
        connections: int = 20,
        follow_every_s: float = FOLLOW_EVERY_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._follow_every_s = follow_every_s
        self._followed = FollowedConfig(connection, follow_every_s)
        self._configure()
        self._following: asyncio.TimerHandle | None = None
        self._free = asyncio.Semaphore(connections)
        self._open: set[HttpConnection] = set()
        self._idle: list[HttpConnection] = []  # the last one used is used next
        self._failing_since: float | None = None  # each request since then failed
        self._is_away = False  # and that has been logged

    def _configure(self) -> None:
        self._config = config = self._followed.current
        self._route = Route(config.server, config.proxy_url, config.tls.server_name)
        self._tls: tuple[Secret, ssl.SSLContext] | None = None
        self._same: tuple[Secret, str] | None = None  # the headers of all requests with one secret

    async def __aenter__(self) -> HttpTransport:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; the transport can be used again afterwards."""
        if self._following is not None:
            self._following.cancel()
            self._following = None
        self._idle.clear()
        await asyncio.gather(*(connection.close() for connection in self._open))
        self._open.clear()

    async def request(self, request: ApiRequest) -> ApiResponse:
        answer = await self._once(request)
        if answer.status == 401 and await self._renewed():
            answer = await self._once(request)
        for _ in range(BUSY_TRIES - 1):
            if (wait_s := answer.asks_to_wait_s) is None:
                break
            await asyncio.sleep(wait_s)
            answer = await self._once(request)
        return answer

    async def stream(self, request: ApiRequest) -> AsyncGenerator[bytes]:
        async with self._free:
            connection = await self._started(request)
            lasts_s = float(request.query.get("timeoutSeconds", "0"))
            end = asyncio.get_running_loop().call_later(
                lasts_s + _GRACE_S if lasts_s else _FOREVER_S, connection.abandon, "no end in time"
            )
            try:
                async with contextlib.aclosing(self._lines(connection, request)) as texts:
                    async for text in texts:
                        yield text
            finally:
                end.cancel()
                self._put_back(connection)

    async def _started(self, request: ApiRequest) -> HttpConnection:
        """A connection on which the answer to `request` has begun, with a 2xx."""
        sent = _Sent()
        connection = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._send(request, sent)
                await connection.start()
                answer = await connection.whole() if not 200 <= connection.status < 300 else None
        except BaseException as error:
            if connection is not None:
                self._discard(connection)
            if isinstance(error, FAILURES):
                failure = self._as_unavailable(error, request, sent)
                self._note_failure(failure)
                raise failure from error
            raise
        self._note_answer()
        if answer is None:
            return connection
        self._put_back(connection)
        if answer.status == 401:
            await self._renewed()
        raise error_of(answer.status, answer.body, answer.headers, what=str(request))

    async def _once(self, request: ApiRequest) -> ApiResponse:
        sent = _Sent()
        try:
            async with self._free:
                try:
                    return await self._exchange(request, sent)
                except BrokenConnectionError as error:
                    if not (sent.reused and error.untouched and request.method == "GET"):
                        raise
                # the server closed an idle connection: that is not an answer, and repeating a GET is harmless
                self._drop_idle()
                return await self._exchange(request, sent)
        except FAILURES as error:
            failure = self._as_unavailable(error, request, sent)
            self._note_failure(failure)
            raise failure from error

    async def _exchange(self, request: ApiRequest, sent: _Sent) -> ApiResponse:
        connection = await self._send(request, sent)
        end = asyncio.get_running_loop().call_later(self._timeout_s, connection.expire)
        try:
            answer = await connection.whole()
            self._note_answer()
            return answer
        finally:
            end.cancel()
            self._put_back(connection)

    async def _send(self, request: ApiRequest, sent: _Sent) -> HttpConnection:
        secret = await self._secret()
        if self._same is None or self._same[0] != secret:
            same = {**self._route.head(), **self._config.headers, **authorization(secret)}
            self._same = (secret, _header_lines(same))
        query = _query(tuple(request.query.items()))
        own = _own_header_lines(tuple(request.headers.items()))
        writes = request.method in ("POST", "PUT", "PATCH")
        length = f"Content-Length: {len(request.body)}\r\n" if request.body or writes else ""
        head = (
            f"{request.method} {self._route.target(request.path)}{query} HTTP/1.1\r\n"
            f"{self._same[1]}{own}{length}\r\n"
        ).encode("latin-1")
        connection = await self._connect(secret)
        sent.reused = not connection.fresh
        sent.begun = True
        connection.send(head, request.body)
        return connection

    # -- connections ---------------------------------------------------------------------------------------

    async def _connect(self, secret: Secret) -> HttpConnection:
        """An idle connection, else a new one."""
        # the TLS context; a new client certificate needs a new one, and new connections
        if not self._config.server.startswith("https:"):
            context = None
        else:
            if self._tls is None or self._tls[0].certificate != secret.certificate:
                self._tls = (secret, tls_context(self._config.tls, secret))
                self._drop_idle()
            context = self._tls[1]
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and now - connection.idle_since < _IDLE_S:
                return connection
            self._discard(connection)
        config = self._config
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await dial(self._route, context)
        except ssl.SSLError:
            if self._follow(at_once=True):  # the server's authority has been rotated
                return await self._connect(secret)
            raise
        if self._config is not config:
            connection.abandon()
            return await self._connect(secret)
        self._open.add(connection)
        self._keep_following()
        return connection

    def _put_back(self, connection: HttpConnection) -> None:
        if connection.usable and connection in self._open:
            self._idle.append(connection)
        else:
            self._discard(connection)

    def _discard(self, connection: HttpConnection) -> None:
        connection.abandon()
        self._open.discard(connection)

    def _drop_idle(self) -> None:
        while self._idle:
            self._discard(self._idle.pop())

    # -- the files that say where and who --------------------------------------------------------------------

    def _keep_following(self) -> None:
        if self._following is None and self._open and self._followed.may_change:
            self._following = asyncio.get_running_loop().call_later(self._follow_every_s, self._follow)

    def _follow(self, *, at_once: bool = False) -> bool:
        """Do as the files say now; whether that is something else. Connections by what they said before end:
        idle ones and watches at once, requests in progress soon."""
        if self._following is not None:
            self._following.cancel()
            self._following = None
        if not self._followed.refresh(at_once=at_once):
            self._keep_following()
            return False
        self._configure()
        self._drop_idle()
        for connection in self._open:
            if connection.streaming:
                connection.abandon("how to reach the API server has changed")
            else:
                asyncio.get_running_loop().call_later(LAST_ANSWERS_S, connection.abandon)
        self._open.clear()
        return True

    async def _lines(self, connection: HttpConnection, request: ApiRequest) -> AsyncGenerator[bytes]:
        """The answer's body split at newlines, however long: an object may have 1.5 MiB."""
        rest = b""
        while True:
            try:
                part = await connection.part()
            except FAILURES as error:
                raise self._as_unavailable(error, request, _Sent(begun=True)) from error
            if not part:
                break
            rest, start = rest + part, 0
            while (end := rest.find(b"\n", start)) >= 0:
                if end > start:
                    yield rest[start:end]
                start = end + 1
            rest = rest[start:]
        if rest.strip():
            yield rest

    def _as_unavailable(self, error: BaseException, request: ApiRequest, sent: _Sent) -> UnavailableError:
        """The error that callers get for a failure, with whether the request may have worked."""
        place = f"{request}: {self._route}"
        if isinstance(error, TimeoutError):
            what = f"no answer within {self._timeout_s:g} s"
            return UnavailableError(f"{place}: {what}", outcome_unknown=sent.begun)
        if isinstance(error, BrokenConnectionError):
            return UnavailableError(f"{place}: {error}")
        assert isinstance(error, OSError)
        return UnavailableError(f"{place}: {reason_of(error)}", outcome_unknown=False)

    # -- whether it answers ----------------------------------------------------------------------------------

    def _note_failure(self, failure: UnavailableError) -> None:
        """Log once that the server no longer answers; the callers log what they could not do."""
        now = asyncio.get_running_loop().time()
        if self._failing_since is None:
            self._failing_since = now
        elif not self._is_away and now - self._failing_since >= _AWAY_S:
            self._is_away = True
            server = without_login(self._config.server)
            extra = {"server": server, "error": str(failure)}
            _log.warning("the API server does not answer", extra=extra)

    def _note_answer(self) -> None:
        if self._is_away and self._failing_since is not None:
            away_s = round(asyncio.get_running_loop().time() - self._failing_since)
            _log.info("the API server answers again", extra={"after_s": away_s})
        self._failing_since, self._is_away = None, False

    # -- who we are ------------------------------------------------------------------------------------------

    async def _secret(self) -> Secret:
        """The current credentials. A failure may be temporary: a plugin, too, uses the network."""
        credentials = self._config.credentials
        try:
            if credentials.blocks():  # for seconds, or as long as a person needs: not on the event loop
                return await asyncio.to_thread(credentials.current)
            return credentials.current()
        except ConfigError as error:
            raise UnavailableError(f"no credentials: {error}", outcome_unknown=False) from error

    async def _renewed(self) -> bool:
        """After a 401: whether reading the credentials again gave different ones."""
        before = await self._secret()
        self._config.credentials.forget()
        return await self._secret() != before


@dataclass(slots=True)
class _Sent:
    """How far a request came: sending has `begun`, on a `reused` connection."""

    begun: bool = False
    reused: bool = False


Pairs = tuple[tuple[str, str], ...]


@lru_cache(maxsize=64)  # nearly every request has one of a few
def _query(pairs: Pairs) -> str:
    return f"?{urlencode(pairs)}" if pairs else ""


@lru_cache(maxsize=64)
def _own_header_lines(pairs: Pairs) -> str:
    return _header_lines(dict(pairs))


def _header_lines(headers: Mapping[str, str]) -> str:
    """ConfigError if a value would become two headers: it came from a kubeconfig or a token file."""
    for name, value in headers.items():
        if not _HEADER.fullmatch(value):
            raise ConfigError(f"the value for the header {name} has characters that no header may have")
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


FAILURES = (TimeoutError, BrokenConnectionError, OSError)
"""Every way in which a connection can fail."""


Observe = Callable[[float, str, str], None]
"""Arguments: seconds, method, resource."""


class TimedTransport:
    """`observe` is called for every request that was answered or has failed; not for watches."""

    def __init__(self, inner: Transport, observe: Observe) -> None:
        self._inner = inner
        self._observe = observe

    async def request(self, request: ApiRequest) -> ApiResponse:
        began = time.perf_counter()
        try:
            return await self._inner.request(request)
        finally:
            self._observe(time.perf_counter() - began, request.method, resource_of(request.path))

    def stream(self, request: ApiRequest) -> AsyncGenerator[bytes]:
        return self._inner.stream(request)


@lru_cache(maxsize=1024)
def resource_of(path: str) -> str:
    """``pods/binding`` of ``/api/v1/namespaces/a/pods/b/binding``: as an RBAC rule writes it."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]  # after the version; groups are one part more
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    return "/".join(parts[::2])
