"""What RFC 9113 allows a client of HTTP/2 and hardly anybody sends, and what attackers send instead."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import cast

import pytest
from hpack import Decoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from gpuslice.adapters.limits import LIMITS
from gpuslice.adapters.web.frames import Code
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, json_answer, text_answer
from tests.integration.http2_rig import FIELDS, MOST_BYTES, Attacker

LARGEST_FRAME_BYTES = 256 << 10


def answered(attacker: Attacker) -> list[Frame]:
    """All frames that the client has got, in their order."""
    got, frames = memoryview(attacker.transport.written), []
    while got:
        frame, length = Frame.parse_frame_header(got[:9])
        frame.parse_body(got[9 : 9 + length])
        frames.append(frame)
        got = got[9 + length :]
    return frames


def heads(attacker: Attacker) -> list[HeadersFrame]:
    return [each for each in answered(attacker) if isinstance(each, HeadersFrame)]


def status_of(head: HeadersFrame, decoder: Decoder) -> str:
    fields = cast(list[tuple[str, str]], decoder.decode(head.data))
    return dict(fields)[":status"]


def farewell(attacker: Attacker) -> int | None:
    goes = [each for each in answered(attacker) if isinstance(each, GoAwayFrame)]
    return goes[-1].error_code if goes else None


async def test_requests_sent_ahead_are_no_more_than_may_be_open() -> None:
    """A client knows that a request has ended once it reads so: none can have begun more in one breath.

    Thousands of them, each of a dozen bytes, would keep the loop from everybody else.
    """
    asked = Counter[str]()

    def app(request: HttpRequest) -> HttpResponse:
        asked[request.path] += 1
        return text_answer("x" * 5000)

    attacker = Attacker(app, window_bytes=1 << 30)
    attacker.send(WindowUpdateFrame(0, window_increment=1 << 30))
    attacker.send(*(attacker.head(stream, FIELDS, ends=True) for stream in range(1, 2 * LIMITS.streams, 2)))
    assert asked == {"/echo": LIMITS.streams}
    first = 2 * LIMITS.streams + 1
    attacker.send(*(attacker.head(first + 2 * each, FIELDS, ends=True) for each in range(5000)))
    assert asked == {"/echo": 2 * LIMITS.streams}
    assert farewell(attacker) == Code.ENHANCE_YOUR_CALM


async def test_answers_of_one_breath_are_bounded_like_all_others() -> None:
    """Also where the client's leave to send lets all of them out at once."""
    attacker = Attacker(lambda _: HttpResponse(b"x" * 300_000), window_bytes=1 << 30)
    unread = 0
    attacker.transport.get_write_buffer_size = lambda: unread  # type: ignore[method-assign]

    def write(data: bytes | bytearray | memoryview) -> None:
        nonlocal unread
        unread += len(data)

    attacker.transport.write = write  # type: ignore[method-assign]
    attacker.send(WindowUpdateFrame(0, window_increment=1 << 30))
    attacker.send(*(attacker.head(stream, FIELDS, ends=True) for stream in range(1, 200, 2)))
    assert attacker.transport.closed
    assert unread < 2_000_000


@pytest.mark.parametrize("end", ["data", "trailer"])
async def test_a_refused_request_is_answered_once_whatever_follows(end: str) -> None:
    """Its answer waits for leave to be sent, while its client goes on sending."""
    asked: list[str] = []

    def app(request: HttpRequest) -> HttpResponse:
        asked.append(request.path)
        return text_answer("never")

    attacker = Attacker(app, window_bytes=0)
    attacker.clients.admit = lambda _: json_answer({"error": "not you"}, 403)
    attacker.send(attacker.head(1, FIELDS))
    attacker.send(*(DataFrame(1, b"x") for _ in range(20)))
    if end == "data":
        attacker.send(DataFrame(1, b"", flags=["END_STREAM"]))
    else:
        attacker.send(attacker.head(1, [("x-sum", "1")], ends=True))
    assert len(heads(attacker)) == 1
    attacker.send(WindowUpdateFrame(1, window_increment=1000))
    assert asked == []
    body = [each.data for each in answered(attacker) if isinstance(each, DataFrame)]
    assert body == [b'{"error":"not you"}']
    assert attacker.connection.held_bytes == 0


async def test_an_answer_counts_whole_until_its_last_byte_is_taken() -> None:
    """What is left of it keeps all of it in memory."""
    attacker = Attacker(lambda _: HttpResponse(b"x" * 60_000), window_bytes=59_999)
    attacker.send(attacker.head(1, FIELDS, ends=True))
    assert attacker.connection.held_bytes >= 60_000
    attacker.send(WindowUpdateFrame(1, window_increment=1))
    assert attacker.connection.held_bytes == 0


@pytest.mark.parametrize("padding", [0, 1, 255])
@pytest.mark.parametrize("cut", [1 << 18, 7, 16_384])
async def test_a_padded_frame_may_be_as_large_as_any(padding: int, cut: int) -> None:
    bodies: list[bytes] = []

    def app(request: HttpRequest) -> HttpResponse:
        bodies.append(request.body)
        return text_answer("x")

    size = 1000 if cut == 7 else LARGEST_FRAME_BYTES - 1 - padding
    attacker = Attacker(app, body_bytes=1 << 20, all_bytes=64 << 20)
    body = bytes(range(250)) * (size // 250)
    padded = DataFrame(1, body, pad_length=padding, flags=["PADDED", "END_STREAM"]).serialize()
    sent = attacker.head(1, FIELDS).serialize() + padded + attacker.head(3, FIELDS, ends=True).serialize()
    for start in range(0, len(sent), cut):
        attacker.send(sent[start : start + cut])
    assert bodies == [body, b""]


@pytest.mark.parametrize("padding", [0, 255])
async def test_frames_of_nothing_but_padding_do_not_keep_the_loop(padding: int) -> None:
    attacker = Attacker(lambda _: text_answer("x"))
    attacker.send(attacker.head(1, FIELDS))
    nothing = DataFrame(1, b"", pad_length=padding, flags=["PADDED"])
    for _ in range(0, LIMITS.idle_frames + 100, 100):
        attacker.send(*[nothing] * 100)
    assert farewell(attacker) == Code.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("wrong", [b"\x01\x05x", b"\x00\x00"])
async def test_padding_longer_than_its_frame_ends_the_connection(wrong: bytes) -> None:
    attacker = Attacker(lambda _: text_answer("x"))
    attacker.send(attacker.head(1, FIELDS))
    length = wrong[0].to_bytes(3)
    attacker.send(length + b"\x00\x08\x00\x00\x00\x01" + wrong[1:])
    assert farewell(attacker) == Code.PROTOCOL_ERROR


async def test_who_says_goodbye_still_gets_what_was_asked_before() -> None:
    """RFC 9113, 6.8: it speaks of requests from us, of which there are none."""
    attacker = Attacker(lambda _: HttpResponse(b"x" * 1000), window_bytes=0)
    attacker.send(attacker.head(1, FIELDS, ends=True), GoAwayFrame(0))
    assert not attacker.transport.closed
    attacker.send(WindowUpdateFrame(1, window_increment=1000))
    body = [each.data for each in answered(attacker) if isinstance(each, DataFrame)]
    assert body == [b"x" * 1000]
    assert attacker.transport.closed


async def test_a_client_without_a_table_of_fields_can_read_every_head() -> None:
    """Who allows a smaller table than the usual one wants to hear of it in front of the next head
    (RFC 7541, 4.2): else nghttp2 and hpack read no further."""
    attacker = Attacker(lambda _: text_answer("x"))
    attacker.send(SettingsFrame(0, {SettingsFrame.HEADER_TABLE_SIZE: 0}))
    decoder = Decoder()
    decoder.max_allowed_table_size = 0
    for stream in (1, 3):
        attacker.send(attacker.head(stream, FIELDS, ends=True))
        assert status_of(heads(attacker)[-1], decoder) == "200"


async def test_who_waits_for_a_word_before_the_body_gets_it() -> None:
    attacker = Attacker(lambda request: text_answer(request.body.decode()))
    attacker.send(attacker.head(1, [*FIELDS, ("expect", "100-continue")]))
    decoder = Decoder()
    (first,) = heads(attacker)
    assert status_of(first, decoder) == "100"
    assert "END_STREAM" not in first.flags
    attacker.send(DataFrame(1, b"hello", flags=["END_STREAM"]))
    assert status_of(heads(attacker)[-1], decoder) == "200"


async def test_sizes_of_the_table_count_as_fields() -> None:
    """A head may begin with any number of them, each a byte."""
    attacker = Attacker(lambda _: text_answer("x"))
    attacker.send(HeadersFrame(1, b"\x20\x3f\xe1\x1f" + attacker.head(1, FIELDS).data, flags=["END_HEADERS"]))
    assert not attacker.transport.closed
    attacker.send(HeadersFrame(3, b"\x20" * 5000, flags=["END_HEADERS"]))
    assert farewell(attacker) == Code.ENHANCE_YOUR_CALM


async def test_what_others_hold_does_not_make_each_frame_dearer() -> None:
    """To add up all that all clients hold takes milliseconds: not for each ping that is answered."""

    def pings_take_s() -> float:
        attacker.connect()
        attacker.send(attacker.head(1, FIELDS, ends=True))  # of which the answer waits for leave
        began_s = time.process_time()
        for _ in range(500):
            attacker.send(PingFrame(0, b"12345678"))
        return time.process_time() - began_s

    attacker = Attacker(lambda _: text_answer("x"), window_bytes=0, all_bytes=1 << 30)
    alone_s = pings_take_s()
    for _ in range(60):
        attacker.connect()
        attacker.send(
            *(attacker.head(stream, FIELDS, ends=True) for stream in range(1, 2 * LIMITS.streams, 2))
        )
    assert pings_take_s() < 10 * alone_s


async def test_settings_heard_carry_nothing() -> None:
    attacker = Attacker(lambda _: text_answer("x"))
    attacker.send(b"\x00\x00\x06\x04\x01\x00\x00\x00\x00" + b"\x00\x03\x00\x00\x00\x01")
    assert farewell(attacker) == Code.FRAME_SIZE_ERROR


async def test_strangers_do_not_displace_a_client_that_is_known() -> None:
    """kube-scheduler is silent for long, and asks with what it may not ask twice."""
    attacker = Attacker(lambda _: text_answer("x"), clients=4)
    scheduler = attacker.transport
    attacker.connection.known = True
    for _ in range(10):
        attacker.connect()
        for transport, connection in attacker.made:
            if transport.closed and connection in attacker.clients.connections:
                connection.connection_lost(None)
    assert not scheduler.closed
    assert len(attacker.clients.connections) == 4


@pytest.mark.parametrize("more", ["data", "trailer"])
async def test_what_follows_the_end_of_a_request_ends_it(more: str) -> None:
    """RFC 9113, 5.1, half-closed: its answer waits for leave to be sent."""
    attacker = Attacker(lambda _: text_answer("never read"), window_bytes=0)
    attacker.send(attacker.head(1, FIELDS, ends=True))
    attacker.send(DataFrame(1, b"x") if more == "data" else attacker.head(1, FIELDS, ends=True))
    resets = [each for each in answered(attacker) if isinstance(each, RstStreamFrame)]
    assert [(each.stream_id, each.error_code) for each in resets] == [(1, Code.STREAM_CLOSED)]
    assert attacker.connection.held_bytes == 0
    assert not attacker.transport.closed


@pytest.mark.parametrize(
    ("kind", "stream", "length"),
    [(2, 1, 4), (2, 1, 6), (3, 1, 3), (6, 0, 7), (7, 0, 7), (8, 0, 5), (8, 1, 3)],
)
async def test_a_frame_of_the_wrong_length_ends_the_connection(kind: int, stream: int, length: int) -> None:
    """RFC 9113, 6.3 to 6.9."""
    attacker = Attacker(lambda _: text_answer("x"))
    attacker.send(attacker.head(1, FIELDS))
    attacker.send(length.to_bytes(3) + bytes((kind, 0)) + stream.to_bytes(4) + b"1" * length)
    assert farewell(attacker) == Code.FRAME_SIZE_ERROR


async def test_many_slow_requests_of_one_breath_let_others_have_their_turn() -> None:
    """As 128 of /metrics would be, which every client may ask for."""
    asked = 0

    def app(_: HttpRequest) -> HttpResponse:
        nonlocal asked
        asked += 1
        time.sleep(LIMITS.strangers_turn_s / 2)
        return text_answer("x")

    attacker = Attacker(app, window_bytes=1 << 30)
    sent = b"".join(
        attacker.head(stream, FIELDS, ends=True).serialize() for stream in range(1, 2 * LIMITS.streams, 2)
    )
    attacker.clients.buffer[: len(sent)] = sent
    attacker.connection.buffer_updated(len(sent))
    turns = 0
    while asked < LIMITS.streams:
        assert asked <= 3 * (turns + 1)
        assert attacker.transport.paused
        assert attacker.connection.held_bytes > 0
        await asyncio.sleep(0)
        turns += 1
    await asyncio.sleep(0)  # the last one may have used up its turn
    assert not attacker.transport.paused
    assert len(heads(attacker)) == LIMITS.streams


async def test_what_waits_for_its_turn_counts_once() -> None:
    """All may hold 1,000,000 bytes, and this client sends 900,000, of them 200,000 behind a slow request."""

    def app(request: HttpRequest) -> HttpResponse:
        if not request.body:
            time.sleep(2 * LIMITS.strangers_turn_s)
        return text_answer(f"{len(request.body)}")

    attacker = Attacker(app, body_bytes=MOST_BYTES, window_bytes=1 << 30)
    attacker.send(attacker.head(1, FIELDS))
    for _ in range(7):
        attacker.send(DataFrame(1, b"x" * 100_000))
    attacker.send(
        attacker.head(3, FIELDS, ends=True),
        *(DataFrame(1, b"x" * 100_000, flags=flags) for flags in ([], ["END_STREAM"])),
    )
    decoder = Decoder()
    assert [status_of(head, decoder) for head in heads(attacker)] == ["200", "200"]
    assert not attacker.transport.closed


async def test_heads_of_very_many_fields_do_not_keep_the_loop() -> None:
    """Each field is five bytes on the wire, and takes microseconds."""
    attacker = Attacker(lambda _: text_answer("x"), window_bytes=1 << 30)
    fields = b"\x40\x01a\x01b" * 800
    for stream in range(1, 9, 2):
        attacker.send(
            HeadersFrame(stream, attacker.head(1, FIELDS).data + fields, flags=["END_HEADERS", "END_STREAM"])
        )
    assert farewell(attacker) == Code.ENHANCE_YOUR_CALM
