"""Our HTTP client against a server that says exactly these bytes, cut anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.credentials import Fixed, Secret
from gpuslice.adapters.kube.errors import ConfigError, UnavailableError
from gpuslice.adapters.kube.http import ApiRequest
from gpuslice.adapters.kube.transport import HttpTransport

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=1\r\nhe\r\n3\r\nllo\r\n0\r\nTrailer: x\r\n\r\n"
)
CLOSE = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello"
UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\n\r\nhello"
CONTINUE = b"HTTP/1.1 100 Continue\r\nA: b\r\n\r\n" + OK
NO_BODY = b"HTTP/1.1 204 No Content\r\n\r\n"


@dataclass
class Script:
    """Answers each request with the next of `answers`, in `pieces`; b"" closes the connection instead."""

    answers: list[bytes]
    cuts: Sequence[int] = ()
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line[:14] == b"Content-Length"), 0
                )
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                await self._say(writer, answer)
                if answer in (b"", CLOSE, UNTIL_CLOSE):
                    break
        writer.close()

    async def _say(self, writer: asyncio.StreamWriter, answer: bytes) -> None:
        ends = [*[cut for cut in self.cuts if cut < len(answer)], len(answer)]
        for start, end in zip([0, *ends], ends, strict=False):
            writer.write(answer[start:end])
            await writer.drain()
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def speaking(*answers: bytes, cuts: Sequence[int] = ()) -> AsyncIterator[tuple[HttpTransport, Script]]:
    script = Script(list(answers), cuts)
    async with (
        await asyncio.start_server(script.serve, "127.0.0.1", 0) as server,
        HttpTransport(Connection(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")) as transport,
    ):
        yield transport, script


async def test_an_answer_is_the_same_wherever_its_bytes_are_cut() -> None:
    dice = random.Random(1)
    whole = [OK, CHUNKED, CONTINUE, NO_BODY, CLOSE, UNTIL_CLOSE]
    for _ in range(30):
        cuts = sorted(dice.sample(range(1, 110), 3))
        async with speaking(*whole, cuts=cuts) as (transport, script):
            found = [await transport.request(ApiRequest("GET", f"/{number}")) for number in range(len(whole))]
        assert [(answer.status, answer.body) for answer in found] == [
            (200, b"hello"), (200, b"hello"), (200, b"hello"), (204, b""), (200, b"hello"), (200, b"hello"),
        ]  # fmt: skip
        assert script.connections == 2  # one until the server closes it, and another


async def test_a_server_that_lost_its_power_is_noticed_within_half_a_minute() -> None:
    """Even on a watch, on which neither side may have anything to say for longer."""
    async with speaking(OK) as (transport, _):
        await transport.request(ApiRequest("GET", "/"))
        (connection,) = transport._open
        assert connection._transport is not None
        option = connection._transport.get_extra_info("socket").getsockopt
        assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle_s, every_s, probes = (
            option(socket.IPPROTO_TCP, each)
            for each in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert idle_s + every_s * probes <= 30


async def test_a_request_says_who_and_what() -> None:
    async with speaking(OK, OK) as (transport, script):
        await transport.request(ApiRequest("PATCH", "/a", query={"b": "c d"}, headers={"X": "y"}, body=b"{}"))
        await transport.request(ApiRequest("POST", "/a"))
    head = script.requests[0].split(b"\r\n")
    assert head[0] == b"PATCH /a?b=c+d HTTP/1.1"
    assert {b"X: y", b"Content-Length: 2", b"User-Agent: gpuslice"} < set(head)
    assert script.requests[0].endswith(b"\r\n\r\n{}")
    assert b"Content-Length: 0\r\n" in script.requests[1]


async def test_a_line_that_the_server_closed_while_idle_is_replaced_for_a_read() -> None:
    async with speaking(OK, b"", OK) as (transport, script):
        for _ in range(2):
            assert (await transport.request(ApiRequest("GET", "/"))).body == b"hello"
    assert (len(script.requests), script.connections) == (3, 2)


async def test_a_write_is_never_sent_twice() -> None:
    async with speaking(OK, b"", OK) as (transport, script):
        await transport.request(ApiRequest("GET", "/"))
        with pytest.raises(UnavailableError) as caught:
            await transport.request(ApiRequest("PATCH", "/", body=b"{}"))
        assert caught.value.outcome_unknown
        assert len(script.requests) == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 101 Switch\r\n\r\n",
    ],
    ids=["nothing", "half", "no HTTP", "another protocol"],
)
async def test_what_is_no_answer_may_have_worked(answer: bytes) -> None:
    script = Script([answer])

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await script._say(writer, answer)
        writer.close()

    async with await asyncio.start_server(once, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with HttpTransport(Connection(url)) as transport:
            with pytest.raises(UnavailableError) as caught:
                await transport.request(ApiRequest("GET", "/"))
    assert caught.value.outcome_unknown


async def test_what_comes_unasked_answers_nothing() -> None:
    async with speaking(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", OK) as (transport, script):
        for _ in range(2):
            assert (await transport.request(ApiRequest("GET", "/"))).body == b"hello"
    assert script.connections == 2


async def test_many_requests_at_once_share_the_lines_they_may() -> None:
    script = Script([OK] * 50)
    async with await asyncio.start_server(script.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with HttpTransport(Connection(url), connections=3) as transport:
            await asyncio.gather(*(transport.request(ApiRequest("GET", "/")) for _ in range(50)))
    assert script.connections <= 3


async def test_a_given_up_request_does_not_spoil_the_next() -> None:
    async with speaking(OK[:-2], OK) as (transport, script):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await transport.request(ApiRequest("GET", "/slow"))
        assert (await transport.request(ApiRequest("GET", "/next"))).body == b"hello"
    assert script.connections == 2


async def test_a_token_with_a_line_end_is_refused_before_it_is_sent() -> None:
    async with speaking(OK) as (transport, script):
        bad = Connection(transport._config.server, credentials=Fixed(Secret(token="a\r\nX-Admin: yes")))
        async with HttpTransport(bad) as other:
            with pytest.raises(ConfigError, match="the token has a line break"):
                await other.request(ApiRequest("GET", "/"))
    assert script.requests == []


@pytest.mark.parametrize(
    "test",
    [
        test_an_answer_is_the_same_wherever_its_bytes_are_cut,
        test_a_server_that_lost_its_power_is_noticed_within_half_a_minute,
        test_a_line_that_the_server_closed_while_idle_is_replaced_for_a_read,
        test_a_write_is_never_sent_twice,
        test_a_given_up_request_does_not_spoil_the_next,
        test_many_requests_at_once_share_the_lines_they_may,
    ],
)
def test_all_the_same_on_uvloop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
