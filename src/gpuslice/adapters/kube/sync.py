"""The blocking client of the command line: it must start at once, so it knows neither asyncio nor aiohttp."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlencode, urlsplit

from gpuslice.adapters.kube import requests
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.credentials import Secret, authorization, tls_context
from gpuslice.adapters.kube.errors import ConfigError, NotFoundError, UnavailableError
from gpuslice.adapters.kube.http import BUSY_TRIES, ApiRequest, ApiResponse, proxy_authorization
from gpuslice.adapters.kube.requests import Listing
from gpuslice.adapters.kube.resources import Resource
from gpuslice.core.errors import without_login
from gpuslice.core.hosts import bracketed

T = TypeVar("T")


class SyncTransport:
    """One connection at a time, kept open between requests. Not for several threads."""

    def __init__(self, connection: Connection, *, timeout_s: float = 30) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._open: tuple[Secret, http.client.HTTPConnection] | None = None

    def __enter__(self) -> SyncTransport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def request(self, request: ApiRequest) -> ApiResponse:
        """The answer, whatever its status; UnavailableError when there was none."""
        answer = self._authorized(request)
        for _ in range(BUSY_TRIES - 1):
            if (wait_s := answer.asks_to_wait_s) is None:
                break
            time.sleep(wait_s)
            answer = self._authorized(request)
        return answer

    def _authorized(self, request: ApiRequest) -> ApiResponse:
        secret = self._connection.credentials.current()
        answer = self._once(request, secret)
        if answer.status == 401:
            self._connection.credentials.forget()
            renewed = self._connection.credentials.current()
            if renewed != secret:
                return self._once(request, renewed)
        return answer

    def _once(self, request: ApiRequest, secret: Secret) -> ApiResponse:
        reused = self._open is not None
        try:
            return self._exchange(request, secret)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
            self.close()
            if reused and request.method == "GET":  # the server closed an idle connection: not an answer
                return self._once(request, secret)
            raise UnavailableError(f"{request}: connection lost: {error}") from error
        except TimeoutError as error:
            self.close()
            raise UnavailableError(f"{request}: no answer within {self._timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            refused = isinstance(error, (ConnectionRefusedError, socket.gaierror, ssl.SSLError))
            self.close()
            words = getattr(error, "strerror", None) or str(error) or type(error).__name__
            proxy = urlsplit(self._connection.proxy_url).netloc.rpartition("@")[2]
            server = without_login(self._connection.server)
            place = server + (f", through the proxy {proxy}" if proxy else "")
            message = f"{request}: {place}: {words}"
            raise UnavailableError(message, outcome_unknown=not refused) from error

    def _exchange(self, request: ApiRequest, secret: Secret) -> ApiResponse:
        if self._open is None or self._open[0].certificate != secret.certificate:
            self.close()
            self._open = (secret, self._new(secret))
        connection = self._open[1]
        headers = {
            "Accept": requests.JSON,
            **self._connection.headers,
            **authorization(secret),
            **(proxy_authorization(self._connection.proxy_url) if self._through_proxy else {}),
            **request.headers,
        }
        server = urlsplit(self._connection.server)
        target = server.path + request.path + (f"?{urlencode(request.query)}" if request.query else "")
        if self._through_proxy:
            target = f"{server.scheme}://{server.netloc}{target}"
        connection.request(request.method, target, request.body or None, headers)
        answer = connection.getresponse()
        lower = {name.lower(): value for name, value in answer.getheaders()}
        return ApiResponse(answer.status, lower, answer.read())

    @property
    def _through_proxy(self) -> bool:
        """Whether a proxy reads the requests; in a tunnel it does not."""
        return bool(self._connection.proxy_url) and self._connection.server.startswith("http:")

    def _new(self, secret: Secret) -> http.client.HTTPConnection:
        server, proxy = urlsplit(self._connection.server), urlsplit(self._connection.proxy_url)
        if proxy.scheme == "https":  # TLS in TLS is beyond http.client
            place = proxy.netloc.rpartition("@")[2]
            raise ConfigError(f'the proxy is "https://{place}", must be an http URL')
        first = proxy if proxy.hostname else server
        if server.scheme == "http":
            return http.client.HTTPConnection(first.hostname or "", first.port or 80, timeout=self._timeout_s)
        tls = self._connection.tls
        context = tls_context(tls, secret)
        connection = _NamedServer(first, context, tls.server_name or server.hostname or "", self._timeout_s)
        if proxy.hostname:
            login = proxy_authorization(self._connection.proxy_url)
            host = server.hostname or ""  # http.client of Python 3.11 puts no brackets around it
            connection.set_tunnel(bracketed(host), server.port or 443, login)
        return connection


class _NamedServer(http.client.HTTPSConnection):
    """HTTPS that expects a certificate for `server_name`, wherever it connects to."""

    def __init__(self, url: SplitResult, context: ssl.SSLContext, server_name: str, timeout_s: float) -> None:
        port = url.port or (443 if url.scheme == "https" else 80)
        super().__init__(url.hostname or "", port, timeout=timeout_s, context=context)
        self._server_name = server_name
        self._tls = context

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server_name)


class SyncClient:
    """What the command line asks of the API: to read, and for `gpuslice migrate` to write."""

    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def get(self, resource: Resource[T], name: str, namespace: str = "") -> T:
        return self._decoded(resource, ApiRequest("GET", resource.path(namespace, name)))

    def create(self, resource: Resource[T], document: Any, namespace: str = "") -> T:
        """Create it; AlreadyExistsError when the name is taken."""
        _, _, whole = requests.named(resource, document)
        return self._decoded(resource, requests.write("POST", resource.path(namespace), whole))

    def json_patch(
        self,
        resource: Resource[T],
        name: str,
        operations: Sequence[Mapping[str, Any]],
        namespace: str = "",
        *,
        resource_version: str = "",
    ) -> T:
        """Apply RFC 6902 `operations`; ConflictError when it is not `resource_version` any more."""
        document = requests.guarded_operations(operations, "", resource_version)
        path = resource.path(namespace, name)
        return self._decoded(resource, requests.write("PATCH", path, document, requests.JSON_PATCH))

    def merge_patch(
        self, resource: Resource[T], name: str, patch: Mapping[str, Any], namespace: str = ""
    ) -> T:
        path = resource.path(namespace, name)
        return self._decoded(resource, requests.write("PATCH", path, patch, requests.MERGE_PATCH))

    def delete(self, resource: Resource[Any], name: str, namespace: str = "") -> None:
        """Delete it and what it owns; nothing is wrong where it is gone already."""
        path = resource.path(namespace, name)
        request = requests.deletion(path, "", "", grace_s=None, propagation="Background", dry_run=False)
        with contextlib.suppress(NotFoundError):
            requests.expect_object(self._transport.request(request), request)

    def _decoded(self, resource: Resource[T], request: ApiRequest) -> T:
        return requests.decode(resource.type, self._transport.request(request), request)

    def read(self, path: str) -> bytes:
        """What the server answers under a path of its own, such as a pod's ``proxy``."""
        request = ApiRequest("GET", path)
        response = self._transport.request(request)
        requests.expect_success(response, request)
        return response.body

    def list(
        self, resource: Resource[T], namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> list[T]:
        """All objects, fetched in pages."""
        items: list[T] = []
        token = ""
        while True:
            request = requests.list_page(
                resource, namespace, labels, fields, limit=requests.PAGE, token=token
            )
            kind: Any = Listing[resource.type]  # type: ignore[name-defined]  # known at run time
            answer = requests.decode(kind, self._transport.request(request), request)
            items += answer.items or []
            token = answer.metadata.continue_
            if not token:
                return items
