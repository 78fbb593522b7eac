"""Heads of HTTP/2 beside hpack's own reading of them, and what is no request."""

from __future__ import annotations

import tracemalloc

import pytest
from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.adapters.web.frames import Code, ConnectionFault, StreamFault
from gpuslice.adapters.web.heads import TABLE_BYTES, Field, Unpacker, check_trailer, packed, request_of

MOST_BYTES = 32 << 10
NAMES = st.sampled_from([":method", ":path", "content-length", "x", "a-long-name-" * 20]) | st.text(
    max_size=5
)
VALUES = st.sampled_from(["GET", "/", "200", "", "v" * 1500]) | st.text(max_size=20)
BLOCKS = st.binary(max_size=30) | st.binary(max_size=6).map(lambda end: b"\x40\x01a\x01b" + end)
HEADS = st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=12)


def unpacked(unpacker: Unpacker, block: bytes) -> list[tuple[bytes, bytes]]:
    return [
        (field.name.encode("latin-1"), field.value.encode("latin-1"))
        for field in unpacker.unpack(block).fields
    ]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(HEADS, st.integers(0, TABLE_BYTES), st.booleans()), max_size=6))
def test_what_another_has_packed_comes_back(
    heads: list[tuple[list[tuple[str, str, bool]], int, bool]],
) -> None:
    """One after the other, with tables of any size that is allowed."""
    encoder, unpacker = Encoder(), Unpacker(MOST_BYTES)
    for fields, table_bytes, huffman in heads:
        encoder.header_table_size = table_bytes
        block = encoder.encode([(name, value, secret) for name, value, secret in fields], huffman)
        assert unpacked(unpacker, block) == [(name.encode(), value.encode()) for name, value, _ in fields]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.binary(max_size=30) | st.binary(max_size=6).map(lambda end: b"\x40\x01a\x01b" + end), max_size=4
    )
)
def test_any_bytes_are_read_as_hpack_reads_them(blocks: list[bytes]) -> None:
    decoder, unpacker = Decoder(max_header_list_size=MOST_BYTES), Unpacker(MOST_BYTES)
    for block in blocks:
        try:
            expected = [(bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True)]
        except HPACKError:
            with pytest.raises(ConnectionFault):
                unpacker.unpack(block)
            return
        assert unpacked(unpacker, block) == expected


def test_a_head_that_grows_when_it_is_unpacked_ends_the_connection() -> None:
    unpacker = Unpacker(MOST_BYTES)
    block = Encoder().encode([("x", "a" * 3500)])
    with pytest.raises(ConnectionFault) as refused:
        unpacker.unpack(block + b"\xbe" * 10)
    assert refused.value.code == Code.ENHANCE_YOUR_CALM


def test_the_same_bytes_mean_what_the_table_says_now() -> None:
    """A head that came before is not looked at again, unless the table has changed."""
    unpacker, first, second = Unpacker(MOST_BYTES), b"\x40\x01a\x01b", b"\x40\x01c\x01d"
    newest = b"\xbe"
    unpacker.unpack(first)
    assert unpacked(unpacker, newest) == unpacked(unpacker, newest) == [(b"a", b"b")]
    unpacker.unpack(second)
    assert unpacked(unpacker, newest) == [(b"c", b"d")]
    unpacker.unpack(b"\x20")  # a table of no bytes
    with pytest.raises(ConnectionFault):
        unpacker.unpack(newest)


@pytest.mark.parametrize("value_bytes", [10, 900, 30_000])
def test_heads_that_may_come_again_take_little_memory(value_bytes: int) -> None:
    encoder, unpacker = Encoder(), Unpacker(MOST_BYTES)
    blocks = [
        encoder.encode([(b"x", b"%d" % number + b"a" * value_bytes, True)], huffman=False)
        for number in range(300)
    ]
    tracemalloc.start()
    try:
        for block in blocks:
            unpacker.unpack(block)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 50_000


LINE = [(":method", "GET"), (":scheme", "https"), (":path", "/"), (":authority", "h")]


def fields_of(*pairs: tuple[str, str]) -> list[Field]:
    return Unpacker(MOST_BYTES).unpack(Encoder().encode(pairs)).fields


def test_a_request_is_its_first_line_and_the_rest() -> None:
    fields = fields_of(*LINE, ("accept", "a"), ("accept", "b"), ("te", "trailers"))
    assert request_of(fields) == ("GET", "/", {"accept": "a, b", "te": "trailers", "host": "h"})


@pytest.mark.parametrize(
    "pairs",
    [
        LINE[1:],
        LINE[:1] + LINE[2:],
        LINE[:2] + LINE[3:],
        [*LINE[:2], (":path", ""), LINE[3]],
        [*LINE, (":path", "/b")],
        [*LINE, (":status", "200")],
        [*LINE[:3], ("a", "b"), LINE[3]],
        [*LINE, ("Upper", "x")],
        [*LINE, ("", "x")],
        [*LINE, ("a:b", "x")],
        [*LINE, ("a b", "x")],
        [*LINE, ("a", "b\r\nc: d")],
        [*LINE, ("a", "b\0")],
        [*LINE, ("a", " b")],
        [*LINE, ("connection", "close")],
        [*LINE, ("transfer-encoding", "chunked")],
        [*LINE, ("te", "gzip")],
        [*LINE[:2], (":path", "/\r\nx"), LINE[3]],
        [*LINE, ("host", "another")],
        [*LINE[:3], ("host", "a"), ("host", "a")],
    ],
)
def test_what_is_no_request_is_refused(pairs: list[tuple[str, str]]) -> None:
    """RFC 9113, 8.2 and 8.3.1: a proxy in front of us would else read it otherwise than we do."""
    with pytest.raises(StreamFault):
        request_of(fields_of(*pairs))


@pytest.mark.parametrize("pair", [(":path", "/"), ("Upper", "x"), ("connection", "close")])
def test_a_trailer_is_no_second_head(pair: tuple[str, str]) -> None:
    check_trailer(fields_of(("x", "y")))
    with pytest.raises(StreamFault):
        check_trailer(fields_of(("x", "y"), pair))


@given(
    st.integers(100, 599), st.lists(st.tuples(st.sampled_from([b"a", b"b" * 300]), st.binary(max_size=400)))
)
def test_what_we_pack_is_read_by_another(status: int, fields: list[tuple[bytes, bytes]]) -> None:
    decoded = Decoder().decode(packed(status, fields), raw=True)
    assert [tuple(each) for each in decoded] == [(b":status", b"%d" % status), *fields]
