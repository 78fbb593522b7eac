"""Both transports over sockets that are encrypted, proxied, slow or broken."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from gpuslice.adapters.kube.config import Connection, connect, in_cluster
from gpuslice.adapters.kube.credentials import Fixed, Secret, Tls, TokenFile
from gpuslice.adapters.kube.errors import ConfigError, ForbiddenError, UnavailableError
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice_demo.ports import free_port
from tests import HANG_S


async def ask(connection: Connection, path: str, timeout_s: float = HANG_S) -> ApiResponse:
    async with HttpTransport(connection, timeout_s=timeout_s) as transport:
        return await transport.request(ApiRequest("GET", path, query={"a": "b c"}))


LOGIN = "Basic " + base64.b64encode(b"me:p@ss").decode()


@dataclass
class Authority:
    """Throw-away certificates, and the server side that wants one from its clients too."""

    ca: trustme.CA

    @property
    def pem(self) -> str:
        return self.ca.cert_pem.bytes().decode()

    def client(self, name: str = "me") -> Secret:
        certificate = self.ca.issue_cert(common_name=name)
        chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
        return Secret(certificate=chain.decode(), key=certificate.private_key_pem.bytes().decode())

    def server(self, *names: str, wants_certificate: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert(*names).configure_cert(context)
        if wants_certificate:
            context.verify_mode = ssl.CERT_REQUIRED
            self.ca.configure_trust(context)
        return context


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority(trustme.CA())


@contextlib.asynccontextmanager
async def serving(handler: Any, tls: ssl.SSLContext | None = None, port: int = 0) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def echo(request: web.Request) -> web.Response:
    """Tells what arrived."""
    peer = request.transport.get_extra_info("peercert") if request.transport is not None else None
    subject = dict(part[0] for part in peer["subject"]) if peer else {}
    return web.json_response(
        {
            "path": request.path_qs,
            "authorization": request.headers.get("Authorization", ""),
            "who": subject.get("commonName", ""),
            "impersonated": request.headers.get("Impersonate-User", ""),
        }
    )


async def test_plain_http_with_token_and_headers() -> None:
    async with serving(echo) as url:
        connection = Connection(
            f"{url}/prefix", credentials=Fixed(Secret(token="t")), headers={"Impersonate-User": "jane"}
        )
        answer = await ask(connection, "/api")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("application/json")
    heard = json.loads(answer.body)
    assert heard["path"] in ("/prefix/api?a=b+c", "/prefix/api?a=b%20c")
    assert (heard["authorization"], heard["impersonated"]) == ("Bearer t", "jane")


async def test_a_client_certificate_says_who_we_are(authority: Authority) -> None:
    async with serving(echo, authority.server("127.0.0.1", wants_certificate=True)) as url:
        connection = Connection(url, tls=Tls(authority.pem), credentials=Fixed(authority.client("me")))
        assert json.loads((await ask(connection, "/")).body)["who"] == "me"


async def test_a_server_of_another_authority_is_not_trusted(authority: Authority) -> None:
    async with serving(echo, authority.server("127.0.0.1")) as url:
        other = Authority(trustme.CA())
        with pytest.raises(UnavailableError, match="certificate verify failed") as caught:
            await ask(Connection(url, tls=Tls(other.pem)), "/")
        assert not caught.value.outcome_unknown
        assert (await ask(Connection(url, tls=Tls(insecure=True)), "/")).status == 200


async def test_the_name_in_the_certificate_can_be_told(authority: Authority) -> None:
    async with serving(echo, authority.server("kubernetes.example")) as url:
        with pytest.raises(UnavailableError):
            await ask(Connection(url, tls=Tls(authority.pem)), "/")
        named = Tls(authority.pem, server_name="kubernetes.example")
        assert (await ask(Connection(url, tls=named), "/")).status == 200


@pytest.mark.parametrize(
    ("tls", "secret", "words"),
    [
        (Tls("no certificate"), Secret(), "certificate-authority is not a PEM"),
        (Tls(), Secret(certificate="x", key="y"), "cannot be used together"),
    ],
)
async def test_unusable_certificates_are_named(tls: Tls, secret: Secret, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await ask(Connection("https://127.0.0.1:1", tls=tls, credentials=Fixed(secret)), "/")


async def test_nobody_listening_is_surely_not_done() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        connection = Connection(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(UnavailableError) as caught:
            await ask(connection, "/")
    assert not caught.value.outcome_unknown


async def test_no_answer_in_time_may_have_worked() -> None:
    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    async with serving(hang) as url:
        with pytest.raises(UnavailableError, match="no answer") as caught:
            await ask(Connection(url), "/", 0.5)
    assert caught.value.outcome_unknown


async def test_a_connection_cut_in_the_middle_may_have_worked() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        writer.close()

    async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UnavailableError) as caught:
            await ask(Connection(f"http://127.0.0.1:{port}"), "/")
    assert caught.value.outcome_unknown


async def test_a_401_is_answered_once_with_a_rotated_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    heard: list[str] = []

    async def only_new(request: web.Request) -> web.Response:
        heard.append(request.headers["Authorization"])
        path.write_text("new")
        return web.Response(status=200 if heard[-1] == "Bearer new" else 401)

    async with serving(only_new) as url:
        connection = Connection(url, credentials=TokenFile(str(path)))
        assert (await ask(connection, "/")).status == 200
    assert heard == ["Bearer old", "Bearer new"]


async def test_a_401_with_the_same_token_is_an_answer() -> None:
    heard: list[str] = []

    async def refuse(request: web.Request) -> web.Response:
        heard.append(request.path)
        return web.Response(status=401)

    async with serving(refuse) as url:
        assert (await ask(Connection(url, credentials=Fixed(Secret(token="t"))), "/")).status == 401
    assert len(heard) == 1


async def test_plain_http_goes_through_a_proxy() -> None:
    known: list[str | None] = []

    async def proxy(request: web.Request) -> web.Response:
        known.append(request.headers.get("Proxy-Authorization"))
        return web.Response()

    async with serving(proxy) as url:
        for place in (url, url.replace("://", "://me:p%40ss@")):
            answer = await ask(Connection("http://api.example:8080", proxy_url=place), "/api")
            assert answer.status == 200
    assert known == [None, LOGIN]


@pytest.mark.parametrize(("name", "written"), [("api.example", "api.example"), ("fd00::1", "[fd00::1]")])
async def test_https_goes_through_a_tunnel(authority: Authority, name: str, written: str) -> None:
    asked: list[str] = []

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    async with serving(echo, authority.server(name)) as url:
        target = int(url.rpartition(":")[2])
        async with await asyncio.start_server(tunnel, "127.0.0.1", 0) as proxy:
            port = proxy.sockets[0].getsockname()[1]
            connection = Connection(
                f"https://{written}:6443",
                tls=Tls(authority.pem),
                proxy_url=f"http://me:p%40ss@127.0.0.1:{port}",
            )
            assert (await ask(connection, "/")).status == 200
    (head,) = asked
    assert head.startswith(f"CONNECT {written}:6443 ")
    assert f"\r\nProxy-Authorization: {LOGIN}\r\n" in head


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_a_rotated_authority_is_used(authority: Authority, tmp_path: Path) -> None:
    file, after, port = tmp_path / "ca.crt", Authority(trustme.CA()), free_port()
    file.write_text(authority.pem)
    (tmp_path / "token").write_text("secret")
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
    server = serving(echo, after.server("127.0.0.1"), port)
    async with server, HttpTransport(in_cluster(environ, str(tmp_path))) as transport:
        with pytest.raises(UnavailableError, match="certificate verify failed"):
            await transport.request(ApiRequest("GET", "/"))
        file.write_text(authority.pem + after.pem)  # as kubelet replaces a pod's
        assert (await transport.request(ApiRequest("GET", "/"))).status == 200


async def test_a_renewed_client_certificate_is_used(authority: Authority) -> None:
    credentials = Rotating(authority.client("before"))
    async with serving(echo, authority.server("127.0.0.1", wants_certificate=True)) as url:
        connection = Connection(url, tls=Tls(authority.pem), credentials=credentials)
        async with HttpTransport(connection) as transport:
            first = await transport.request(ApiRequest("GET", "/"))
            credentials.secret = authority.client("after")
            second = await transport.request(ApiRequest("GET", "/"))
    assert [json.loads(answer.body)["who"] for answer in (first, second)] == ["before", "after"]


@dataclass
class Rotating:
    secret: Secret

    def current(self) -> Secret:
        return self.secret

    def forget(self) -> None:
        pass

    def blocks(self) -> bool:
        return False


async def lines_of(url: str, **query: str) -> list[bytes]:
    async with HttpTransport(Connection(url)) as transport:
        return [line async for line in transport.stream(ApiRequest("GET", "/", query=query))]


async def test_a_stream_is_split_at_newlines_whatever_the_chunks() -> None:
    long = b"x" * 1_500_000

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b"on", b"e\ntw", b"o\n\n", long, b"\nlast"):
            await response.write(piece)
        return response

    async with serving(stream) as url:
        assert await lines_of(url) == [b"one", b"two", long, b"last"]


async def test_a_stream_that_is_refused_says_why() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"kind": "Status", "reason": "Forbidden", "message": "no"}, status=403)

    async with serving(refuse) as url:
        with pytest.raises(ForbiddenError, match="no"):
            await lines_of(url)


async def test_a_stream_cut_in_the_middle_is_unavailable() -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"one\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serving(cut) as url:
        with pytest.raises(UnavailableError):
            await lines_of(url)


async def test_a_transport_can_be_used_again_after_closing() -> None:
    async with serving(echo) as url:
        transport = HttpTransport(replace(Connection("http://x"), server=url))
        await transport.request(ApiRequest("GET", "/"))
        await transport.close()
        assert (await transport.request(ApiRequest("GET", "/"))).status == 200
        await transport.close()


async def test_credentials_that_fail_at_run_time_are_asked_for_again_later(tmp_path: Path) -> None:
    path = tmp_path / "token"
    async with (
        serving(echo) as url,
        HttpTransport(Connection(url, credentials=TokenFile(str(path)))) as transport,
    ):
        with pytest.raises(UnavailableError, match=f"no credentials: token file {path}") as caught:
            await transport.request(ApiRequest("GET", "/"))
        assert not caught.value.outcome_unknown
        path.write_text("now")
        assert (await transport.request(ApiRequest("GET", "/"))).status == 200


async def test_each_context_has_its_own_certificate_files(authority: Authority, tmp_path: Path) -> None:
    """A kubeconfig as kubeadm and others write it: files beside it, several users, one current context."""
    (tmp_path / "ca.crt").write_text(authority.pem)
    users = []
    for name in ("admin", "viewer"):
        secret = authority.client(name)
        (tmp_path / f"{name}.crt").write_text(secret.certificate)
        (tmp_path / f"{name}.key").write_text(secret.key)
        files = {"client-certificate": f"{name}.crt", "client-key": f"{name}.key"}
        users.append({"name": name, "user": files})
    async with serving(echo, authority.server("127.0.0.1", wants_certificate=True)) as url:
        clusters = [{"name": "c", "cluster": {"server": url, "certificate-authority": "ca.crt"}}]
        contexts = [
            {"name": f"{each['name']}@c", "context": {"cluster": "c", "user": each["name"]}} for each in users
        ]
        document = {"clusters": clusters, "users": users, "contexts": contexts, "current-context": "viewer@c"}
        (tmp_path / "config").write_text(json.dumps(document))
        for context, who in (("", "viewer"), ("admin@c", "admin")):
            connection = connect({}, kubeconfig=str(tmp_path / "config"), context=context)
            assert json.loads((await ask(connection, "/")).body)["who"] == who
