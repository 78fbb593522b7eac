"""What all of our servers share: probes, errors as sentences, renewed certificates, an end that waits."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import random
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import pytest
import trustme
import uvloop

from gpuslice.adapters.web.app import Probes, Route, for_known_clients, get, make_app, post
from gpuslice.adapters.web.clients import App
from gpuslice.adapters.web.exposition import Family, Format, MetricKind, Piece, pieces
from gpuslice.adapters.web.logs import REPEAT_AFTER_S, JsonFormatter, RepeatFilter
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, text_answer
from gpuslice.adapters.web.serve import Listen, serving, work_until
from tests import HANG_S
from tests.tools import find


def app_of(*routes: Route, not_ready: Callable[[], str] = lambda: "") -> App:
    return make_app(Probes("1.2.3", not_ready, a_page), routes)


def a_page(format: Format) -> list[Piece]:
    return pieces([Family("up", MetricKind.GAUGE, "Whether.", [("", 1)])], format)


async def test_probes_answer_as_kubernetes_and_prometheus_expect() -> None:
    reason = "still reading"
    app = app_of(not_ready=lambda: reason)
    async with serving(app, Listen(0, "127.0.0.1")) as port, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}"
        async with session.get(f"{url}/readyz") as answer:
            assert (answer.status, await answer.text()) == (503, "still reading")
        reason = ""
        async with session.get(f"{url}/readyz") as answer:
            assert answer.status == 200
        async with session.get(f"{url}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert "gauge\nup 1\n" in await answer.text()
        async with session.get(f"{url}/version") as answer:
            assert await answer.text() == "1.2.3"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel knows no IPv6")
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("tls", [False, True])
def test_probes_come_by_ipv4_and_by_ipv6(
    loop: Callable[[], asyncio.AbstractEventLoop], tls: bool, tmp_path: Path
) -> None:
    """In a cluster with IPv6 alone kubelet, the API server and Prometheus have no other way."""
    authority = trustme.CA()
    write_certificate(tmp_path, authority, "127.0.0.1", "::1")
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    files = {"certificate": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem")} if tls else {}

    async def asked() -> None:
        async with serving(app_of(), Listen(0, **files)) as port, aiohttp.ClientSession() as client:  # type: ignore[arg-type]
            for host in ("127.0.0.1", "[::1]"):
                async with client.get(f"http{'s' * tls}://{host}:{port}/healthz", ssl=trust) as answer:
                    assert answer.status == 200

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asked())


@pytest.mark.parametrize("coding", ["gzip", "identity"])
async def test_who_asks_for_openmetrics_gets_it(coding: str) -> None:
    kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    asked = {"Accept": f"{kind},text/plain;version=0.0.4;q=0.5", "Accept-Encoding": coding}
    async with (
        serving(app_of(), Listen(0, "127.0.0.1")) as port,
        aiohttp.ClientSession(headers=asked) as session,
        session.get(f"http://127.0.0.1:{port}/metrics") as answer,
    ):
        assert answer.headers["Content-Type"] == kind
        assert answer.headers["Vary"] == "Accept, Accept-Encoding"
        assert answer.headers.get("Content-Encoding", "identity") == coding
        page = await answer.text()
        assert "gauge\nup 1\n" in page
        assert page.endswith("\n# EOF\n")
        assert page.count("# EOF") == 1


async def test_a_prometheus_server_understands_the_page_of_every_process() -> None:
    answer = app_of()(HttpRequest("GET", "/metrics"))
    assert isinstance(answer, HttpResponse)
    page = b"".join([answer.body, *answer.more])
    tool = await asyncio.create_subprocess_exec(
        find("promtool"), "check", "metrics", stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    _, said = await tool.communicate(page)
    assert (tool.returncode, said.decode()) == (0, "")


async def test_stacks_are_for_who_is_on_this_machine() -> None:
    app = app_of()
    for local, status in ((True, 200), (False, 403)):
        answer = app(HttpRequest("GET", "/debug/stacks", local=local))
        assert isinstance(answer, HttpResponse)
        assert answer.status == status
        assert (b"test_stacks_are_for" in answer.body) is local


async def test_a_server_that_is_cancelled_ends_although_an_answer_never_comes() -> None:
    asked = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def never(_: HttpRequest) -> HttpResponse:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody ends this")

    async def serve() -> None:
        async with serving(app_of(get("/never", never)), Listen(0, "127.0.0.1", drain_s=0.1)) as listening:
            port.set_result(listening)
            await asyncio.Event().wait()

    server = asyncio.create_task(serve())
    reader, writer = await asyncio.open_connection("127.0.0.1", await port)
    writer.write(b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n")
    await asked.wait()
    server.cancel()
    with pytest.raises(asyncio.CancelledError):
        await server
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


async def test_a_broken_handler_answers_a_sentence_and_the_server_goes_on() -> None:
    async def broken(_: HttpRequest) -> HttpResponse:
        raise RuntimeError("boom")

    async with (
        serving(app_of(get("/broken", broken)), Listen(0, "127.0.0.1")) as port,
        aiohttp.ClientSession() as session,
    ):
        async with session.get(f"http://127.0.0.1:{port}/broken") as answer:
            assert answer.status == 500
            assert "GET /broken failed" in (await answer.json())["error"]
        async with session.get(f"http://127.0.0.1:{port}/nothing") as answer:
            assert answer.status == 404


async def test_the_end_waits_for_what_is_under_way() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(_: HttpRequest) -> HttpResponse:
        begun.set()
        await go_on.wait()
        return text_answer("done")

    async with aiohttp.ClientSession() as session:
        async with serving(app_of(get("/slow", slow)), Listen(0, "127.0.0.1")) as port:
            asked = asyncio.create_task(session.get(f"http://127.0.0.1:{port}/slow"))
            await begun.wait()
            asyncio.get_running_loop().call_later(0.05, go_on.set)
        async with await asked as answer:
            assert await answer.text() == "done"


def write_certificate(folder: Path, authority: trustme.CA, *names: str) -> int:
    """Issue a certificate for localhost and these names into the folder; returns its serial number."""
    issued = authority.issue_cert("localhost", *names)
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    return serial_of(ssl.PEM_cert_to_DER_cert((folder / "cert.pem").read_text()))


def serial_of(der: bytes) -> int:
    from cryptography import x509

    return x509.load_der_x509_certificate(der).serial_number


async def served_serial(port: int, authority: trustme.CA) -> int:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    _, writer = await asyncio.open_connection("localhost", port, ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return serial_of(der)


async def test_a_renewed_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    authority = trustme.CA()
    first = write_certificate(tmp_path, authority)
    listen = Listen(
        0,
        "localhost",
        certificate=str(tmp_path / "cert.pem"),
        key=str(tmp_path / "key.pem"),
        reload_every_s=0.02,
    )
    async with serving(app_of(), listen) as port:
        assert await served_serial(port, authority) == first
        (tmp_path / "cert.pem").write_text("half written")
        await asyncio.sleep(0.05)
        assert await served_serial(port, authority) == first
        (tmp_path / "cert.pem").unlink()  # a volume that is made anew
        await asyncio.sleep(0.05)
        assert await served_serial(port, authority) == first
        second = write_certificate(tmp_path, authority)
        async with asyncio.timeout(HANG_S):
            while await served_serial(port, authority) != second:
                pass


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("tls", [False, True])
def test_a_large_answer_in_pieces_arrives_whole(
    loop: Callable[[], asyncio.AbstractEventLoop], tls: bool, tmp_path: Path
) -> None:
    authority = trustme.CA()
    write_certificate(tmp_path, authority)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    plain = Listen(0, "localhost")
    listen = (
        replace(plain, certificate=str(tmp_path / "cert.pem"), key=str(tmp_path / "key.pem"))
        if tls
        else plain
    )
    large = random.Random(1).randbytes(3 << 20)
    pieces = (b"", memoryview(large), b"", memoryview(msgspec.Raw(b"{}")))
    handler = get("/large", lambda _: HttpResponse(b"[", content_type="x/y", more=pieces))

    async def fetched() -> None:
        async with serving(app_of(handler), listen) as port:
            url = f"http{'s' * tls}://localhost:{port}/large"
            async with aiohttp.ClientSession() as client, client.get(url, ssl=trust) as answer:
                assert await answer.read() == b"[" + large + b"{}"
            async with aiohttp.ClientSession() as client, client.head(url, ssl=trust) as answer:
                assert answer.headers["Content-Length"] == str(len(large) + 3)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(fetched())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_is_for_known_clients_is_for_no_others(
    loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    """Who is known is told by a certificate of one CA; a probe shows none and sees what is for all."""
    authority, of_clients, of_others = trustme.CA(), trustme.CA(), trustme.CA()
    write_certificate(tmp_path, authority)
    of_clients.cert_pem.write_to_path(str(tmp_path / "clients.pem"))
    listen = Listen(
        0,
        "localhost",
        certificate=str(tmp_path / "cert.pem"),
        key=str(tmp_path / "key.pem"),
        client_ca=str(tmp_path / "clients.pem"),
        reload_every_s=0.02,
    )
    routes = [
        for_known_clients(post("/act", lambda _: text_answer("done"))),
        get("/see", lambda _: HttpResponse()),
    ]

    async def asked(port: int, issuer: trustme.CA | None, method: str, path: str) -> int:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        if issuer is not None:
            issuer.issue_cert("scheduler@example.org").configure_cert(context)
        async with (
            aiohttp.ClientSession() as client,
            client.request(method, f"https://localhost:{port}{path}", ssl=context) as answer,
        ):
            return answer.status

    async def accepted(port: int, issuer: trustme.CA) -> bool:
        try:
            return await asked(port, issuer, "POST", "/act") == 200
        except aiohttp.ClientError:
            return False

    async def all_of_it() -> None:
        async with serving(app_of(*routes), listen) as port:
            assert await asked(port, of_clients, "POST", "/act") == 200
            assert await asked(port, None, "POST", "/act") == 403
            assert await asked(port, None, "GET", "/see") == 200
            with pytest.raises(aiohttp.ClientError):
                await asked(port, of_others, "POST", "/act")
            of_others.cert_pem.write_to_path(str(tmp_path / "clients.pem"), append=True)  # the CA is renewed
            async with asyncio.timeout(HANG_S):
                while not await accepted(port, of_others):
                    pass
            assert await asked(port, of_clients, "POST", "/act") == 200

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(all_of_it())


async def test_the_tasks_of_a_process_end_with_it() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    await work_until(began.wait(), {"work": work()})
    assert ended.is_set()


async def test_a_task_that_fails_ends_its_process_though_nobody_asked_it_to() -> None:
    """Serving on with a dead task would be a healthy process that does nothing."""

    async def fail() -> None:
        raise LookupError("why")

    with pytest.raises(ExceptionGroup) as caught:
        await work_until(asyncio.Event().wait(), {"other": asyncio.sleep(3600), "failing": fail()})
    assert caught.group_contains(LookupError, match="why")


async def test_a_task_that_is_cancelled_though_nobody_asked_for_it_ends_its_process() -> None:
    """As a library does to a task that waits on a connection that it lost."""

    async def cut_off() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with pytest.raises(ExceptionGroup) as caught:
        await work_until(asyncio.Event().wait(), {"other": asyncio.sleep(3600), "plugin": cut_off()})
    assert caught.group_contains(RuntimeError, match="the task 'plugin' was cancelled")


async def test_a_process_that_is_stopped_at_once_ends_without_a_complaint() -> None:
    await work_until(asyncio.sleep(0), {"work": asyncio.sleep(3600)})


def test_a_log_line_is_an_event_with_fields() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("gpuslice.sample")
    logger.addHandler(handler)
    logger.warning("pod %s refused", "a", extra={"node": "n1", "units": 4, "path": Path("/x")})
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["level"], first["logger"]) == (
        "pod a refused",
        "warning",
        "gpuslice.sample",
    )
    assert (first["node"], first["units"], first["path"]) == ("n1", 4, "/x")
    assert "ValueError: why" in second["traceback"]


def test_a_warning_that_repeats_is_written_now_and_then() -> None:
    """A loop that fails every few seconds would bury all else."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(RepeatFilter())

    def say(level: int, at_s: float, **fields: object) -> None:
        record = logging.makeLogRecord(
            {"name": "gpuslice", "levelno": level, "msg": "not written", "created": at_s, **fields}
        )
        handler.handle(record)

    for second in range(int(2 * REPEAT_AFTER_S) + 1):
        say(logging.WARNING, second, error="refused", retry_in_s=second / 7)
    say(logging.WARNING, second, error="no answer in time", gpu=0)
    say(logging.WARNING, second, error="no answer in time", gpu=1)
    for _ in range(3):
        say(logging.INFO, second, error="refused")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line.get("repeated") for line in lines[:3]] == [None, REPEAT_AFTER_S - 1, REPEAT_AFTER_S - 1]
    assert [line.get("gpu") for line in lines[3:]] == [0, 1, None, None, None]


def test_a_process_that_hangs_tells_where_when_it_is_asked() -> None:
    """Its loop is blocked, so that no handler of Python's own would run."""
    code = (
        "import os, signal, time\n"
        "from gpuslice.adapters.web.serve import run\n"
        "async def hangs():\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "run(hangs())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "in hangs" in done.stderr
