"""Our HTTP server on real sockets: bytes cut anywhere, clients that are wrong, slow or gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import pytest
import uvloop

from gpuslice.adapters.limits import Limits
from gpuslice.adapters.web.app import Probes, get, make_app, post
from gpuslice.adapters.web.clients import Clients
from gpuslice.adapters.web.connection import Connection
from gpuslice.adapters.web.exposition import Piece
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, text_answer
from tests import HANG_S
from tests.integration.agent_bench import eventually

HEAD = "Host: x\r\n"
LIMIT_BYTES = 1000
LIMITS = Limits(body_bytes=LIMIT_BYTES)
POST_ECHO = f"POST /echo HTTP/1.1\r\n{HEAD}"


def echo(request: HttpRequest) -> HttpResponse:
    return text_answer(f"{request.method} {request.path} {request.query} {request.part} {request.body!r}")


async def later(request: HttpRequest) -> HttpResponse:
    await asyncio.sleep(0)
    return echo(request)


@dataclass
class Server:
    clients: Clients
    port: int

    async def line(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))

    async def ask(self, text: str | bytes) -> Reply:
        """What comes back for these bytes on a connection of its own."""
        async with contextlib.aclosing(await self.line()) as line:
            line.send(text)
            return await line.reply()


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, text: str | bytes) -> None:
        self.writer.write(text.encode() if isinstance(text, str) else text)

    async def reply(self, *, with_body: bool = True) -> Reply:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:-2])}
        length = int(headers.get("content-length", 0)) if with_body else 0
        return Reply(int(head[0].split()[1]), headers, await self.reader.readexactly(length))

    async def ended(self) -> bool:
        with contextlib.suppress(ConnectionError):
            return await self.reader.read() == b""
        return True

    async def aclose(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(limits: Limits = LIMITS) -> AsyncIterator[Server]:
    routes = [post("/echo", echo), get("/echo", echo), post("/later", later), get("/in/{}", echo)]
    routes.append(get("/empty", lambda _: HttpResponse(b"")))
    app = make_app(Probes("1", lambda: "", lambda _: [Piece(b"up 1\n", 1)]), routes)
    clients = Clients(app, limits)
    server = await asyncio.get_running_loop().create_server(partial(Connection, clients), "127.0.0.1", 0)
    try:
        yield Server(clients, server.sockets[0].getsockname()[1])
    finally:
        server.close()
        await clients.drain(0.2)
        await server.wait_closed()


def request(path: str = "/echo", body: str = "hello", *, more: str = "", method: str = "POST") -> str:
    return f"{method} {path} HTTP/1.1\r\n{HEAD}{more}Content-Length: {len(body)}\r\n\r\n{body}"


def chunked(*parts: str) -> str:
    chunks = "".join(f"{len(part):x};note=1\r\n{part}\r\n" for part in parts)
    return f"POST /echo HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n{chunks}0\r\nTrailer: x\r\n\r\n"


async def test_a_request_is_the_same_wherever_its_bytes_are_cut() -> None:
    sent = (
        request() + chunked("he", "llo") + request("/later", "again") + request("/in/node-1?a=b%20c", "")
    ).encode()
    sent = sent.replace(b"POST /in", b"GET /in")
    dice = random.Random(1)
    async with serving() as server:
        for cut in [*range(1, len(sent), 7), *(dice.randrange(1, len(sent)) for _ in range(10))]:
            async with contextlib.aclosing(await server.line()) as line:
                line.send(sent[:cut])
                await line.writer.drain()
                await asyncio.sleep(0)
                line.send(sent[cut:])
                bodies = [(await line.reply()).body for _ in range(4)]
            assert bodies == [
                b"POST /echo {}  b'hello'",
                b"POST /echo {}  b'hello'",
                b"POST /later {}  b'again'",
                b"GET /in/node-1 {'a': 'b c'} node-1 b''",
            ]


async def test_bytes_that_drip_one_by_one_are_a_request() -> None:
    async with serving() as server, contextlib.aclosing(await server.line()) as line:
        for byte in request("/later").encode():
            line.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await line.reply()).body == b"POST /later {}  b'hello'"


async def test_requests_sent_ahead_are_answered_one_at_a_time_and_in_order() -> None:
    async with serving() as server, contextlib.aclosing(await server.line()) as line:
        line.send("".join(request("/later" if number % 3 else "/echo", str(number)) for number in range(500)))
        for number in range(500):
            assert (await line.reply()).body.endswith(f"b'{number}'".encode())


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        ("nonsense\r\n\r\n", 400, "this is not HTTP/1.1"),
        ("GET /echo HTTP/1.1\r\n\r\n", 400, "Host header is missing"),
        (f"GET /echo HTTP/1.1\r\n{HEAD}Content-Length: x\r\n\r\n", 400, "this is not HTTP/1.1"),
        (f"{POST_ECHO}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "not HTTP/1.1"),
        (f"GET /echo HTTP/1.1\r\n{HEAD}Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "not HTTP"),
        (f"{POST_ECHO}Content-Length: {LIMIT_BYTES + 1}\r\n\r\n", 413, "more than 1000 bytes"),
        (chunked(*["x" * 100] * 11), 413, "more than 1000 bytes"),
        (f"GET /echo HTTP/1.1\r\n{HEAD}Long: {'x' * 600_000}", 431, "head has more than"),
        (f"{POST_ECHO}Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello", 415, "encoded as gzip"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400, "this is not HTTP/1.1"),  # TLS on a plain port
    ],
)  # fmt: skip
async def test_what_is_no_request_is_refused_with_a_sentence_and_the_end(
    sent: str | bytes, status: int, words: str
) -> None:
    async with serving() as server, contextlib.aclosing(await server.line()) as line:
        line.send(sent)
        reply = await line.reply()
        assert (reply.status, reply.headers["connection"]) == (status, "close")
        assert words in json.loads(reply.body)["error"]
        assert await line.ended()


async def test_a_client_that_goes_on_sending_still_reads_why_it_was_refused() -> None:
    async with serving() as server, contextlib.aclosing(await server.line()) as line:
        line.send(f"POST /echo HTTP/1.1\r\n{HEAD}Content-Length: 9000000\r\n\r\n")
        for _ in range(50):
            line.send(b"x" * 10_000)
        assert (await line.reply()).status == 413
        assert (await server.ask(request())).status == 200


async def test_a_refusal_comes_after_the_answers_before_it() -> None:
    async with serving() as server, contextlib.aclosing(await server.line()) as line:
        line.send(request("/later") + "nonsense\r\n\r\n")
        assert [(await line.reply()).status for _ in range(2)] == [200, 400]


async def test_a_client_that_waits_for_leave_to_send_the_body_gets_it() -> None:
    async with serving() as server, contextlib.aclosing(await server.line()) as line:
        head, _, body = request(more="Expect: 100-continue\r\n").rpartition("\r\n\r\n")
        line.send(head + "\r\n\r\n")
        assert (await line.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        line.send(body)
        assert (await line.reply()).status == 200
        line.send(f"POST /echo HTTP/1.1\r\n{HEAD}Expect: 100-continue\r\nContent-Length: 5000\r\n\r\n")
        assert (await line.reply()).status == 413


@pytest.mark.parametrize(
    ("sent", "stays"),
    [
        (request(), True),
        (request(more="Connection: close\r\n"), False),
        (request("/empty", "", method="GET", more="Connection: close\r\n"), False),
        ("GET /echo HTTP/1.0\r\n\r\n", False),
        ("GET /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", True),
        (f"GET /echo HTTP/1.1\r\n{HEAD}Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n", False),
    ],
)
async def test_a_connection_stays_when_the_client_wants_it(sent: str, stays: bool) -> None:
    async with serving() as server, contextlib.aclosing(await server.line()) as line:
        line.send(sent)
        reply = await line.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "keep-alive" if stays else "close")
        if stays:
            line.send(request())
            assert (await line.reply()).status == 200
        else:
            async with asyncio.timeout(HANG_S):
                assert await line.ended()


async def test_head_is_answered_without_the_body() -> None:
    async with serving() as server, contextlib.aclosing(await server.line()) as line:
        line.send(f"HEAD /version HTTP/1.1\r\n{HEAD}\r\n" + request())
        reply = await line.reply(with_body=False)
        assert (reply.status, reply.headers["content-length"]) == (200, "1")
        assert (await line.reply()).status == 200


async def test_a_whole_address_is_taken_for_its_path() -> None:
    async with serving() as server:
        for address in ("http://127.0.0.1:1/in/node-1?a=b%20c", "HTTP://host/in/node-1?a=b%20c"):
            reply = await server.ask(request(address, "", method="GET"))
            assert reply.body == b"GET /in/node-1 {'a': 'b c'} node-1 b''"
        assert (await server.ask(request("http://host", "", method="GET"))).status == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/in/", 404), ("DELETE", "/echo", 405), ("POST", "/metrics", 405)],
)
async def test_unknown_paths_and_methods_are_told_apart(method: str, path: str, status: int) -> None:
    async with serving() as server:
        reply = await server.ask(request(path, "", method=method))
        assert reply.status == status
        assert ("allow" in reply.headers) == (status == 405)


async def test_a_client_that_has_sent_all_still_gets_its_answer() -> None:
    async with serving() as server, contextlib.aclosing(await server.line()) as line:
        line.send(request("/later"))
        line.writer.write_eof()
        assert (await line.reply()).status == 200
        assert await line.ended()


async def test_what_was_begun_goes_on_when_the_client_has_left() -> None:
    begun, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(_: HttpRequest) -> HttpResponse:
        begun.set()
        await go_on.wait()
        done.set()
        return HttpResponse()

    async with serving() as server:
        server.clients.app = slow
        line = await server.line()
        line.send(request())
        await begun.wait()
        await line.aclose()
        go_on.set()
        await asyncio.wait_for(done.wait(), HANG_S)


@pytest.mark.parametrize(
    ("sent", "limits"),
    [("POST /echo HT", Limits(request_s=60, idle_s=1e9)), (request(), Limits(request_s=1e9, idle_s=60))],
    ids=["half a request", "idle"],
)
async def test_who_takes_too_long_is_cut_off(sent: str, limits: Limits) -> None:
    async with serving(limits) as server, contextlib.aclosing(await server.line()) as line:
        line.send(sent)
        if sent.endswith("hello"):
            await line.reply()
        now = asyncio.get_running_loop().time()
        server.clients.sweep(now + 59)
        assert len(server.clients.connections) == 1
        ended = asyncio.create_task(line.ended())
        while not ended.done():  # half a request counts once it has come
            server.clients.sweep(asyncio.get_running_loop().time() + 61)
            await asyncio.sleep(0)


async def test_large_requests_of_many_together_are_no_larger_than_one_may_be() -> None:
    half = 3 << 20
    limits = Limits(body_bytes=5 << 20, all_bytes=5 << 20)
    async with serving(limits) as server, contextlib.AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(contextlib.aclosing(await server.line())) for _ in range(2)
        ]
        head = f"{POST_ECHO}Content-Length: {half}\r\n\r\n"
        first.send(head + "x" * (half - 1))
        await eventually(lambda: server.clients.held_bytes() == half - 1, "nearly all of it is there")
        second.send(head + "x" * half)
        reply = await second.reply()
        assert (reply.status, b"try again" in reply.body) == (503, True)
        first.send("x")
        assert (await first.reply()).status == 200
        assert server.clients.held_bytes() == 0
        assert (await server.ask(head + "x" * half)).status == 200


async def test_of_too_many_clients_the_one_that_is_silent_longest_goes() -> None:
    async with serving(Limits(clients=3)) as server, contextlib.AsyncExitStack() as stack:

        async def line() -> Client:
            return await stack.enter_async_context(contextlib.aclosing(await server.line()))

        first, second, third = [await line() for _ in range(3)]
        for each in (first, third):
            each.send(request())
            assert (await each.reply()).status == 200
        fourth = await line()
        assert await second.ended()
        for each in (first, third, fourth):
            each.send(request())
            assert (await each.reply()).status == 200


async def test_who_does_not_read_is_not_answered_without_end() -> None:
    asked, begun = 0, asyncio.Event()

    def large(_: HttpRequest) -> HttpResponse:
        nonlocal asked
        asked += 1
        begun.set()
        return HttpResponse(bytes(1_000_000))

    async with serving(Limits(answer_s=0.05)) as server, contextlib.aclosing(await server.line()) as line:
        server.clients.app = large
        line.send(request(body="") * 100)
        await begun.wait()
        await asyncio.sleep(0.2)
        assert asked < 20
        server.clients.sweep(asyncio.get_running_loop().time() + 1.0)
        while server.clients.connections:
            await server.clients.changed.wait()


async def test_the_end_answers_what_has_come_and_leaves_idle_clients() -> None:
    async with serving() as server:
        idle, busy = await server.line(), await server.line()
        idle.send(request())
        await idle.reply()
        busy.send(request("/later") + request()[:20])
        await busy.reply()
        ending = asyncio.create_task(server.clients.drain(5))
        assert await idle.ended()
        busy.send(request()[20:])
        reply = await busy.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        await ending
        await idle.aclose()
        await busy.aclose()


async def test_who_is_sent_away_gets_the_answer_that_is_under_way() -> None:
    """A replica that does not lead any more: its clients come back by the Service, to the one that does."""
    leave = asyncio.Event()

    async def slow(request: HttpRequest) -> HttpResponse:
        await leave.wait()
        return echo(request)

    async with (
        serving() as server,
        contextlib.aclosing(await server.line()) as idle,
        contextlib.aclosing(await server.line()) as busy,
        contextlib.aclosing(await server.line()) as sending,
    ):
        idle.send(request())
        await idle.reply()
        server.clients.app = slow
        busy.send(request())
        sending.send(request()[:20])
        await eventually(lambda: len(server.clients.answering) == 1, "an answer is being made")
        server.clients.end_idle()
        assert await idle.ended()
        leave.set()
        assert (await busy.reply()).status == 200
        sending.send(request()[20:])
        assert (await sending.reply()).status == 200


def test_all_the_same_on_uvloop() -> None:
    """Production runs on it where it is installed: its transports differ in type and timing."""

    async def all_of_it() -> None:
        for test in (
            test_a_request_is_the_same_wherever_its_bytes_are_cut,
            test_requests_sent_ahead_are_answered_one_at_a_time_and_in_order,
            test_a_client_that_goes_on_sending_still_reads_why_it_was_refused,
            test_a_refusal_comes_after_the_answers_before_it,
            test_a_client_that_has_sent_all_still_gets_its_answer,
            test_what_was_begun_goes_on_when_the_client_has_left,
            test_who_does_not_read_is_not_answered_without_end,
            test_the_end_answers_what_has_come_and_leaves_idle_clients,
        ):
            await test()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(all_of_it())
