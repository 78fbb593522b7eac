"""Requests and frames made by hand against our server: what is legal, and meant to hurt.

In memory, so that what one breath of a client does can be told from the next.
"""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from dataclasses import dataclass

import pytest
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.adapters.limits import LIMITS, Limits
from gpuslice.adapters.web.clients import App, Clients
from gpuslice.adapters.web.connection import Connection
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, text_answer
from tests.integration.http2_rig import FIELDS, LIMIT_BYTES, MOST_BYTES, Attacker, Fields, Memory

STEP_BYTES = 100_000  # so much may come of each connection before it is looked at, and a request


def never(_: HttpRequest) -> asyncio.Future[HttpResponse]:
    return asyncio.get_running_loop().create_future()


LARGE = [*FIELDS, *[("x", "a" * 3900)] * 7]
"""27 kB that are a dozen bytes on the wire from the second time on."""


@pytest.mark.parametrize("ends", [False, True])
async def test_heads_count_as_much_as_bodies(ends: bool) -> None:
    """128 streams of 256 clients would else be a GiB, of clients without a certificate too."""
    attacker = Attacker(never)
    for _ in range(4):
        for stream in range(1, 2 * LIMITS.streams, 2):
            attacker.send(attacker.head(stream, LARGE, ends=ends))
        assert attacker.held_bytes() <= MOST_BYTES + len(attacker.connections) * STEP_BYTES
        attacker.connect()
    for task in attacker.clients.answering:
        task.cancel()


async def test_small_bodies_of_many_streams_count_together() -> None:
    """None reaches the step at which a single one would be counted."""
    attacker = Attacker(never)
    for stream in range(1, 2 * LIMITS.streams, 2):
        attacker.send(attacker.head(stream, FIELDS))
        for _ in range(6):
            attacker.send(DataFrame(stream, b"x" * 10_000))
        assert attacker.held_bytes() <= MOST_BYTES + STEP_BYTES


async def test_answers_behind_a_closed_window_count_as_they_are_made() -> None:
    """Nothing of them is ever in the socket's buffer."""
    attacker = Attacker(lambda _: HttpResponse(b"x" * 300_000), window_bytes=0)
    for stream in range(1, 2 * LIMITS.streams, 2):
        if not attacker.transport.closed:
            attacker.send(attacker.head(stream, FIELDS, ends=True))
        assert attacker.held_bytes() <= MOST_BYTES + 400_000
    assert attacker.transport.closed


async def test_a_length_that_is_said_twice_is_refused_in_words() -> None:
    """hyper-h2 lets it pass where both are the same."""
    fields = [*FIELDS, ("content-length", "3"), ("content-length", "3")]
    asked: list[HttpRequest] = []

    def app(request: HttpRequest) -> HttpResponse:
        asked.append(request)
        return text_answer("x")

    attacker = Attacker(app)
    attacker.send(attacker.head(1, fields))
    attacker.send(attacker.head(3, FIELDS, ends=True))
    assert [request.method for request in asked] == ["POST"]


async def test_a_length_of_thousands_of_digits_is_a_sentence() -> None:
    """Python takes no number that long, and says so by an exception."""
    attacker = Attacker(lambda _: text_answer("x"))
    attacker.send(attacker.head(1, [*FIELDS, ("content-length", "9" * 5000)]))
    assert b"more than 100000 bytes" in attacker.transport.written


async def test_more_fields_than_anybody_needs_are_refused() -> None:
    """An empty one takes a hundred times its bytes."""
    asked: list[HttpRequest] = []

    def app(request: HttpRequest) -> HttpResponse:
        asked.append(request)
        return text_answer("x")

    attacker = Attacker(app)
    attacker.send(attacker.head(1, [*FIELDS, *((f"x{each}", "") for each in range(500))], ends=True))
    attacker.send(attacker.head(3, FIELDS, ends=True))
    assert len(asked) == 1


@pytest.mark.parametrize(
    "breath",
    [
        [WindowUpdateFrame(1, 100), RstStreamFrame(1, 8)],
        [WindowUpdateFrame(0, 100), GoAwayFrame(0)],
        [SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 10}), RstStreamFrame(1, 8)],
        [WindowUpdateFrame(1, 100), RstStreamFrame(1, 8), GoAwayFrame(0)],
        [RstStreamFrame(1, 8), GoAwayFrame(0)],
    ],
)
async def test_leave_to_send_that_is_taken_back_in_the_same_breath(breath: list[Frame]) -> None:
    """As an honest client does whose caller gives up: the other requests of its connection go on."""
    attacker = Attacker(lambda _: HttpResponse(b"x" * 300_000), window_bytes=0)
    attacker.send(attacker.head(1, FIELDS, ends=True))
    attacker.send(*breath)
    taken_back = any(isinstance(frame, RstStreamFrame) for frame in breath)
    assert (attacker.connection.held_bytes == 0) is taken_back
    assert attacker.transport.closed is (taken_back and isinstance(breath[-1], GoAwayFrame))


@pytest.mark.parametrize("requests", [1, 100])
async def test_requests_and_goodbye_in_one_breath(requests: int) -> None:
    attacker = Attacker(lambda _: text_answer("x"))
    heads = [attacker.head(2 * each + 1, FIELDS, ends=True) for each in range(requests)]
    begun: list[Frame] = [attacker.head(2 * requests + 1, FIELDS), DataFrame(2 * requests + 1, b"x")]
    attacker.send(*heads, *begun, GoAwayFrame(0))
    assert not attacker.transport.closed
    attacker.send(DataFrame(2 * requests + 1, b"x", flags=["END_STREAM"]))
    assert attacker.transport.closed


IDLE: dict[str, Frame | bytes] = {
    "ping": PingFrame(0, b"12345678"),
    "settings": SettingsFrame(0, {}),
    "window": WindowUpdateFrame(0, 1),
    "priority": PriorityFrame(1, 0, 1),
    "empty": DataFrame(1, b""),
    "crumb": DataFrame(1, b"x"),
    "ended": DataFrame(3, b""),
    "unknown": b"\0\0\0\x77\0\0\0\0\1",
}


@pytest.mark.parametrize("frame", IDLE.values(), ids=IDLE)
async def test_frames_that_ask_nothing_do_not_keep_the_loop(frame: Frame | bytes) -> None:
    """256 KiB of them, one read, held the loop for a second; who is calm may send some."""
    attacker = Attacker(lambda _: text_answer("x"))
    attacker.send(attacker.head(1, FIELDS), attacker.head(3, FIELDS, ends=True))
    for _ in range(10):
        attacker.send(*[frame] * 90)
    assert not attacker.transport.closed
    attacker.send(*[frame] * 15_000)
    assert attacker.transport.closed
    assert attacker.transport.written.count(b"12345678") < 3_000


async def test_an_answer_accounts_for_the_leave_that_it_needs() -> None:
    """A client that reads a large page gives leave for each few KiB of it, for its stream and for all."""
    attacker = Attacker(lambda _: HttpResponse(b"x" * 300_000))
    for stream in range(1, 101, 2):
        attacker.send(attacker.head(stream, FIELDS, ends=True))
        attacker.send(*[WindowUpdateFrame(stream, 4 << 10), WindowUpdateFrame(0, 4 << 10)] * 74)
    assert not attacker.transport.closed


# -- HTTP/1.1 -----------------------------------------------------------------------------------------------


class Older:
    """The same by HTTP/1.1."""

    def __init__(self, app: App) -> None:
        self.clients = Clients(app, Limits(body_bytes=LIMIT_BYTES, all_bytes=MOST_BYTES))
        self.transport, self.connection = Memory(), Connection(self.clients)
        self.connection.connection_made(self.transport)

    def send(self, text: str) -> None:
        sent = text.encode()
        self.clients.buffer[: len(sent)] = sent
        self.connection.buffer_updated(len(sent))


@pytest.mark.parametrize(
    "more", ["".join(f"x{each}:\r\n" for each in range(500)), f"x: {'a' * 40_000}\r\n"], ids=["many", "long"]
)
@pytest.mark.parametrize("end", ["", "\r\n"], ids=["begun", "whole"])
async def test_a_head_is_bounded_also_where_it_comes_at_once(more: str, end: str) -> None:
    asked: list[HttpRequest] = []

    def app(request: HttpRequest) -> HttpResponse:
        asked.append(request)
        return text_answer("x")

    line = Older(app)
    line.send(f"GET / HTTP/1.1\r\nhost: x\r\n{more}{end}")
    assert line.transport.written.startswith(b"HTTP/1.1 431 ")
    assert asked == []
    assert line.connection.held_bytes == 0


POST = "POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = "transfer-encoding: chunked\r\n"
FRAMED_TWICE = {
    "chunks of HTTP/1.0": f"POST / HTTP/1.0\r\nconnection: keep-alive\r\n{CHUNKED}\r\n0\r\n\r\n",
    "a length beside chunks": f"{POST}content-length: 5\r\n{CHUNKED}\r\n0\r\n\r\n",
    "two lengths": f"{POST}content-length: 0\r\ncontent-length: 5\r\n\r\n",
    "chunks behind a space": f"{POST}transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "chunks that are packed": f"{POST}transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "chunks by line feeds": f"{POST}{CHUNKED}\r\n0;a=\nb\r\n\r\n",
    "a field on two lines": f"{POST}x: a\r\n b\r\n\r\n",
    "lines by line feeds": "GET / HTTP/1.1\nhost: x\n\n",
    "two hosts": f"{POST}host: y\r\n\r\n",
}


@pytest.mark.parametrize("sent", FRAMED_TWICE.values(), ids=FRAMED_TWICE)
async def test_what_another_might_read_otherwise_is_refused_and_nothing_behind_it_heard(sent: str) -> None:
    """Request smuggling: a proxy would pass on, inside of one request, another that it has not looked at."""
    asked: list[str] = []

    def app(request: HttpRequest) -> HttpResponse:
        asked.append(request.target)
        return text_answer("x")

    line = Older(app)
    line.send(f"{sent}GET /behind HTTP/1.1\r\nhost: x\r\n\r\n")
    assert line.transport.written.startswith(b"HTTP/1.1 400 ")
    assert asked == []


async def test_a_target_counts_as_part_of_the_head() -> None:
    line = Older(lambda _: text_answer("x"))
    line.send(f"GET /{'a' * 40_000} HTTP/1.1\r\nhost: x\r\n\r\n")
    assert line.transport.written.startswith(b"HTTP/1.1 431 ")


async def test_who_sends_many_requests_ahead_lets_others_have_their_turn() -> None:
    """256 KiB of them, each a page that takes its time, would keep a probe waiting for too long."""
    answered = 0

    def app(_: HttpRequest) -> HttpResponse:
        nonlocal answered
        answered += 1
        return text_answer("x")

    line = Older(app)
    line.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 50)
    assert answered < 5
    while answered < 50:
        before = answered
        await asyncio.sleep(0)
        assert before < answered < before + 5
    assert line.connection.held_bytes == 0


async def test_heads_that_were_sent_ahead_count() -> None:
    line = Older(never)
    line.send(f"GET / HTTP/1.1\r\nhost: x\r\nx: {'a' * 20_000}\r\n\r\n" * 10)
    assert line.connection.held_bytes > 10 * 20_000
    for task in line.clients.answering:
        task.cancel()


async def test_a_body_in_crumbs_takes_no_more_than_it_brings() -> None:
    line = Older(never)
    crumbs = "2\r\nxx\r\n" * 20_000
    tracemalloc.start()
    try:
        line.send(f"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{crumbs}")
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()
    assert line.connection.held_bytes == 40_000


# -- whatever they send -------------------------------------------------------------------------------------

STREAMS = st.integers(0, 4).map(lambda each: 2 * each + 1)
PATHS = ["/at-once", "/later", "/large", "/\x00\r\n", "*", "/%0d%0a%zz", "//", "?", "http://[", "/é"]


@dataclass(frozen=True)
class Head:
    stream: int
    method: str
    path: str
    more: Fields
    ends: bool


def made(attacker: Attacker, head: Head) -> HeadersFrame:
    fields = [(":method", head.method), (":path", head.path), *FIELDS[2:], *head.more]
    return attacker.head(head.stream, fields, ends=head.ends)


HEADS = st.builds(
    Head,
    STREAMS,
    st.sampled_from(["GET", "POST", "HEAD", "BREW", "CONNECT"]),
    st.sampled_from(PATHS),
    st.lists(
        st.tuples(
            st.sampled_from(["content-length", "content-encoding", "authorization", "accept", "te", "x"]),
            st.sampled_from(["0", "1", "many", "-1", "gzip", "trailers", "a, b", "Bearer x", "\x7f", "é"]),
        ),
        max_size=3,
    ),
    st.booleans(),
)
WINDOW, TABLE = SettingsFrame.INITIAL_WINDOW_SIZE, SettingsFrame.HEADER_TABLE_SIZE
SIZES, ENDS = st.sampled_from([0, 1, 16_000]), st.sampled_from([[], ["END_STREAM"]])
FRAMES = st.one_of(
    st.builds(lambda stream, size, ends: DataFrame(stream, b"x" * size, flags=ends), STREAMS, SIZES, ENDS),
    st.builds(lambda stream: RstStreamFrame(stream, 8), STREAMS),
    st.builds(WindowUpdateFrame, st.integers(0, 4), st.sampled_from([1, 1000, 2**31 - 1])),
    st.builds(lambda size: SettingsFrame(0, {WINDOW: size}), st.integers(0, 100_000)),
    st.builds(lambda size: SettingsFrame(0, {TABLE: size}), st.sampled_from([0, 2**32 - 1])),
    st.builds(lambda stream, on: PriorityFrame(stream, depends_on=on), STREAMS, STREAMS),
    st.just(GoAwayFrame(0)),
)
BREATHS = st.lists(st.lists(st.one_of(HEADS, FRAMES), min_size=1, max_size=5), max_size=8)


@settings(max_examples=300, deadline=None)
@given(BREATHS, st.sampled_from([0, 100, 65_535]))
def test_no_order_of_frames_makes_it_fail(breaths: list[list[Head | Frame]], window_bytes: int) -> None:
    """A failure would be an exception out of `buffer_updated`, which ends the connection with a traceback."""

    async def play() -> None:
        coming: list[asyncio.Future[HttpResponse]] = []

        def app(request: HttpRequest) -> HttpResponse | asyncio.Future[HttpResponse]:
            assert request.path is not None
            if request.path == "/later":
                coming.append(asyncio.get_running_loop().create_future())
                return coming[-1]
            return HttpResponse(b"x" * (100_000 if request.path == "/large" else 1))

        attacker = Attacker(app, window_bytes=window_bytes)
        for number, breath in zip(itertools.count(), breaths, strict=False):
            if attacker.transport.closed:
                attacker.connect()
            attacker.send(*(made(attacker, each) if isinstance(each, Head) else each for each in breath))
            if number % 2 and coming:
                coming.pop().set_result(text_answer("later"))
            for _ in range(3):
                await asyncio.sleep(0)
            attacker.connection.hurry(asyncio.get_running_loop().time() + 31 * number)
        for each in coming:
            each.set_result(text_answer("late"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for connection in attacker.connections:
            connection.end_when_idle()
            connection.connection_lost(None)
        assert not attacker.clients.connections

    loop_errors: list[dict[str, object]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: loop_errors.append(context))
        await play()

    asyncio.run(watched())
    assert loop_errors == []
