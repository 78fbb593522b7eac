"""Our HTTP/2 on real sockets: questions side by side, and clients that are wrong, greedy, slow or gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
import uvloop
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from hyperframe.frame import ContinuationFrame, HeadersFrame, RstStreamFrame, SettingsFrame
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.adapters.limits import LIMITS
from gpuslice.adapters.web.clients import Clients
from gpuslice.adapters.web.http2 import Http2Connection
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, json_answer, text_answer
from tests.integration.agent_bench import eventually
from tests.integration.http2_rig import FIELDS, LIMIT_BYTES, PREFACE, Frames, Memory, Reply, echo, served


async def test_questions_are_answered_side_by_side_on_one_connection(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.line() as line:
        binds = [line.ask("/later", b"%d" % number) for number in range(40)]
        asked = await line.answer("/echo?a=1", b"x" * 90_000)
        assert asked.headers[":status"] == "200"
        assert asked.body == b"POST /echo {'a': '1'} localhost 90000"
        assert [line.replies[bind].ended for bind in binds] == [False] * 40
        server.may_answer.set()
        for bind in binds:
            assert (await line.reply(bind)).body == b"later"
        assert sorted(server.begun, key=int) == [str(number) for number in range(40)]
        assert len(server.clients.connections) == 1


async def test_a_client_of_the_older_http_is_served_on_the_same_port(tmp_path: Path) -> None:
    async with served(tmp_path) as server, aiohttp.ClientSession() as session:
        url = f"https://localhost:{server.port}/echo"
        async with session.post(url, data=b"hello", ssl=server.trust) as answer:
            assert (answer.version, await answer.text()) == (
                aiohttp.HttpVersion11,
                f"POST /echo {{}} localhost:{server.port} 5",
            )


async def test_head_is_answered_without_the_body(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.line() as line:
        reply = await line.answer("/large", method="HEAD")
        assert (reply.headers["content-length"], reply.body) == ("300000", b"")


async def test_an_answer_waits_for_the_clients_window_and_comes_whole(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.line(window_bytes=1000) as line:
        reply = await line.answer("/large", method="GET")
        assert len(reply.body) == 300_000


async def test_a_client_of_many_large_bodies_is_given_leave_again_and_again(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.line() as line:
        for _ in range(60):  # 5.4 MB, of which 4 may come without
            while line.h2.outbound_flow_control_window < LIMIT_BYTES:
                await line.until(lambda: line.h2.outbound_flow_control_window >= LIMIT_BYTES)
            assert (await line.answer(body=b"x" * 90_000)).body.endswith(b" 90000")


async def test_a_body_that_is_padded_or_in_one_large_frame_is_the_same(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.line() as line:
        padded = line.ask("/echo", end=False)
        line.h2.send_data(padded, b"hello", end_stream=True, pad_length=100)
        line.flush()
        assert (await line.reply(padded)).body.endswith(b" 5")
        large = line.ask("/echo", end=False)
        line.h2.send_data(large, b"x" * 70_000, end_stream=True)  # more than one read brings
        line.flush()
        assert (await line.reply(large)).body.endswith(b" 70000")


async def test_who_sends_too_much_reads_why_and_others_of_its_requests_go_on(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.line() as line:
        other = line.ask("/later")
        reply = await line.reply(line.ask("/echo", b"x" * (LIMIT_BYTES + 1), end=False))
        await line.until(lambda: reply.reset is not None)
        assert (reply.headers[":status"], reply.reset) == ("413", ErrorCodes.NO_ERROR)
        assert b"more than 100000 bytes" in reply.body
        server.may_answer.set()
        assert (await line.reply(other)).body == b"later"


async def test_who_goes_on_sending_what_was_refused_loses_no_other_request(tmp_path: Path) -> None:
    """Its client has much of it on the way, and what comes of a stream that has ended is told to nobody."""
    async with served(tmp_path) as server, server.line() as line:
        other = line.ask("/later")
        refused = line.ask("/echo", end=False)
        for _ in range(30):
            line.send(refused, b"x" * 10_000)
            await asyncio.sleep(0.001)
        assert (await line.reply(refused)).headers[":status"] == "413"
        server.may_answer.set()
        assert (await line.reply(other)).body == b"later"


async def test_who_may_not_ask_sends_no_body(tmp_path: Path) -> None:
    def admit(request: HttpRequest) -> int | HttpResponse:
        return json_answer({"error": "not you"}, 403)

    async with served(tmp_path, admit=admit) as server, server.line() as line:
        reply = await line.reply(line.ask("/echo", b"x" * 50_000, end=False))
        assert (reply.headers[":status"], reply.body) == ("403", b'{"error":"not you"}')
        await eventually(lambda: server.connection.held_bytes == 0, "nothing of it is kept")


async def test_bodies_of_one_connection_take_no_more_than_all_may(tmp_path: Path) -> None:
    """Each stream may hold 100 kB, all together 120."""
    async with served(tmp_path, most_bytes=120_000) as server, server.line() as line:
        first = line.ask("/echo", b"x" * 90_000, end=False)
        await line.answer()  # what was sent before has been read
        second = await line.reply(line.ask("/echo", b"x" * 90_000, end=False))
        assert second.headers[":status"] == "503"
        line.send(first, b"y", end=True)
        assert (await line.reply(first)).headers[":status"] == "200"


async def test_what_was_begun_goes_on_when_its_request_is_taken_back(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.line() as line:
        stream = line.ask("/later", b"bind")
        await line.answer()  # the first has been begun by then
        line.h2.reset_stream(stream, ErrorCodes.CANCEL)
        line.flush()
        server.may_answer.set()
        assert (await line.answer()).headers[":status"] == "200"
        assert server.done == 1
        assert line.replies[stream].headers == {}


async def test_requests_taken_back_at_once_never_occupy_more_than_they_may(tmp_path: Path) -> None:
    """Rapid reset: streams that are open are few, what they have started would be any number."""
    async with served(tmp_path) as server, server.line() as line:
        for _ in range(LIMITS.streams):
            stream = line.ask("/later", b"bind")
            await line.answer("/echo", method="HEAD")  # its own answer forgives the reset
            line.h2.reset_stream(stream, ErrorCodes.CANCEL)
        reply = await line.reply(line.ask("/later"))
        assert reply.reset == ErrorCodes.REFUSED_STREAM
        assert len(server.begun) == LIMITS.streams


async def test_who_only_takes_back_is_sent_away(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.line() as line:
        for _ in range(LIMITS.resets + 1):
            line.h2.reset_stream(line.ask("/later", b"bind"), ErrorCodes.CANCEL)
        line.flush()
        await line.until(lambda: line.goes is not None)
        assert line.goes is not None
        assert line.goes.error_code == ErrorCodes.ENHANCE_YOUR_CALM
        assert len(server.begun) <= LIMITS.streams


async def test_a_slow_body_is_cut_off_and_others_go_on(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.line() as line:
        slow = line.ask("/echo", b"x", end=False)
        other = line.ask("/later")
        await line.answer()
        server.connection.hurry(asyncio.get_running_loop().time() + 31.0)
        assert (await line.reply(slow)).reset == ErrorCodes.CANCEL
        server.may_answer.set()
        assert (await line.reply(other)).body == b"later"


async def test_an_answer_that_nobody_takes_is_counted_and_dropped(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.line(window_bytes=0) as line:
        stream = line.ask("/large", method="GET")
        await line.until(lambda: line.replies[stream].headers)
        assert server.connection.held_bytes >= 300_000
        server.connection.hurry(asyncio.get_running_loop().time() + 61.0)
        assert (await line.reply(stream)).reset == ErrorCodes.CANCEL
        assert server.connection.held_bytes == 0


async def test_who_is_sent_away_gets_the_answers_under_way_and_no_new_ones(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.line() as line, server.line() as idle:
        under_way = line.ask("/later")
        await line.answer()
        await idle.answer()
        server.clients.end_idle()
        await idle.until(lambda: idle.ended)
        # hyper-h2's client sends nothing after GOAWAY, so the frame is made by hand
        head = line.h2.encoder.encode([*FIELDS])
        line.writer.write(HeadersFrame(99, head, flags=["END_HEADERS", "END_STREAM"]).serialize())
        line.replies[99] = Reply()
        frames = Frames(line.reader)
        assert [await frames.next("GoAwayFrame"), (await frames.next("RstStreamFrame")).stream_id][1] == 99
        server.may_answer.set()
        assert (await frames.next("DataFrame")).stream_id == under_way
        assert await line.reader.read() == b""


async def test_an_answer_may_send_its_client_away(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.line() as line:
        stream = line.ask("/last")
        await line.until(lambda: line.ended)
        assert line.goes is not None
        assert (line.replies[stream].body, line.goes.error_code) == (b"go", ErrorCodes.NO_ERROR)


def head_without_end() -> bytes:
    """CONTINUATION for ever: names and values that are never closed."""
    first = HeadersFrame(1, b"\x00", flags=[]).serialize()
    return first + b"".join(ContinuationFrame(1, b"\x40" * 16_000).serialize() for _ in range(40))


def head_that_grows() -> bytes:
    """One large value, put into the table and then named ten times more: 4 kB that are 39."""
    h2 = H2Connection(H2Configuration())
    large = h2.encoder.encode([("x", "a" * 3500)])
    block = h2.encoder.encode(FIELDS) + large + b"\xbe" * 10
    return HeadersFrame(1, block, flags=["END_HEADERS"]).serialize()


HOSTILE = {
    "a head without end": head_without_end(),
    "a head that grows when it is unpacked": head_that_grows(),
    "a frame larger than allowed": b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + b"x" * 300_000,
    "data for a stream that nobody opened": b"\x00\x00\x01\x00\x00\x00\x00\x00\x07x",
    "a head that is no HPACK": HeadersFrame(1, b"\xff" * 20, flags=["END_HEADERS"]).serialize(),
    "a window that overflows": b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x7f\xff\xff\xff",
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
async def test_what_is_no_http2_is_told_so_and_ends(tmp_path: Path, sent: bytes) -> None:
    async with served(tmp_path) as server:
        reader, writer = await server.socket()
        writer.write(PREFACE + SettingsFrame(0).serialize() + sent)
        goes = await Frames(reader).next("GoAwayFrame")
        assert goes.error_code != ErrorCodes.NO_ERROR  # type: ignore[attr-defined]
        writer.transport.abort()
        async with server.line() as line:
            assert (await line.answer()).headers[":status"] == "200"


async def test_who_does_not_read_is_not_read_either() -> None:
    """Else each ping without end would leave an answer in memory."""
    transport, connection = Memory(), Http2Connection(Clients(echo))
    connection.connection_made(transport)
    connection.pause_writing()
    assert transport.paused
    connection.resume_writing()
    assert not transport.paused
    connection.pause_writing()
    connection.hurry(asyncio.get_running_loop().time() + 61.0)
    assert transport.closed


STREAM_BYTES = 6000  # what each takes, with a head and before any body
stream_ids = st.integers(0, 9)
frames = st.one_of(
    st.builds(
        lambda kind, flags, stream, body: (
            len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body
        ),
        st.integers(0, 11),
        st.integers(0, 255),
        stream_ids,
        st.binary(max_size=40),
    ),
    st.builds(
        lambda stream, end: HeadersFrame(
            stream * 2 + 1,
            H2Connection(H2Configuration()).encoder.encode(FIELDS),
            flags=["END_HEADERS", *end],
        ).serialize(),
        stream_ids,
        st.sampled_from([[], ["END_STREAM"]]),
    ),
    st.builds(lambda stream: RstStreamFrame(stream * 2 + 1, 8).serialize(), stream_ids),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(frames, max_size=12), st.integers(1, 50))
def test_no_frames_make_it_fail_or_hold_what_it_may_not(sent: list[bytes], cut: int) -> None:
    async def play() -> None:
        clients = Clients(lambda _: text_answer("x"))
        connection = Http2Connection(clients)
        connection.connection_made(Memory())
        wire = PREFACE + SettingsFrame(0).serialize() + b"".join(sent)
        for start in range(0, len(wire), cut * 7):
            part = wire[start : start + cut * 7]
            clients.buffer[: len(part)] = part
            connection.buffer_updated(len(part))
            assert connection.held_bytes <= len(wire) + 10 * STREAM_BYTES
        connection.end_when_idle()
        connection.connection_lost(None)
        assert not clients.connections

    asyncio.run(play())


def test_all_the_same_on_uvloop(tmp_path: Path) -> None:
    async def all_of_it() -> None:
        for test in (
            test_questions_are_answered_side_by_side_on_one_connection,
            test_a_client_of_the_older_http_is_served_on_the_same_port,
            test_an_answer_waits_for_the_clients_window_and_comes_whole,
            test_who_is_sent_away_gets_the_answers_under_way_and_no_new_ones,
        ):
            await test(tmp_path)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(all_of_it())
