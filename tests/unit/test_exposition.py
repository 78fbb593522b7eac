"""The exposition against the reference parser."""

from __future__ import annotations

import gzip
import math
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpuslice.adapters.web.exposition import (
    Family,
    MetricKind,
    Piece,
    accepts_gzip,
    gzipped,
    joined,
    labels,
    number,
    pieces,
    render,
)

texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r\x85\u2028\u2029"))


@given(values=st.dictionaries(st.sampled_from(["pod", "namespace", "uuid"]), texts), value=st.floats())
def test_what_is_written_is_read_back(values: dict[str, str], value: float) -> None:
    family = Family("a_metric", MetricKind.GAUGE, "What it is.")
    family.add(value, labels(values))
    (read,) = text_string_to_metric_families(render([family]).decode())
    (sample,) = read.samples
    assert sample.labels == values
    assert sample.value == value or (math.isnan(value) and math.isnan(sample.value))


@given(texts)
def test_help_stays_on_its_line(text: str) -> None:
    family = Family("a_metric", MetricKind.COUNTER, text, [("", 1)])
    assert render([family]).count(b"\n") == 3


def test_a_family_without_samples_is_absent() -> None:
    assert render([Family("nothing", MetricKind.GAUGE, "None.")]) == b""


def test_bytes_of_a_card_are_written_without_an_exponent() -> None:
    assert number(15811477504.0) == "15811477504"
    assert number(float("-inf")) == "-Inf"


@given(st.lists(st.binary(max_size=2000), max_size=6))
def test_pieces_compressed_one_by_one_are_one_gzip_member(texts: list[bytes]) -> None:
    page = [Piece(text, 1) for text in texts]
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
    assert unpacker.decompress(gzipped(page)) == joined(page)
    assert unpacker.eof
    assert unpacker.unused_data == b""


def test_a_piece_is_compressed_once() -> None:
    kept, first, second = Piece(b"kept " * 1000, 1), Piece(b"first", 1), Piece(b"second", 1)
    assert gzip.decompress(gzipped([kept, first])).endswith(b"kept first")
    before = kept.deflated
    assert gzip.decompress(gzipped([kept, second])).endswith(b"kept second")
    assert kept.deflated is before


def test_a_familys_own_pieces_stand_below_its_head_as_they_are() -> None:
    piece = Piece(b"a 1\n", 1)
    first = Family("a", MetricKind.GAUGE, "A.", pieces=[Piece(b"", 0), piece])
    absent = Family("b", MetricKind.GAUGE, "B.", pieces=[Piece(b"", 0)])
    last = Family("c", MetricKind.GAUGE, "C.", samples=[("", 2)])
    page = pieces([first, absent, last])
    assert piece in page
    assert sum(each.samples for each in page) == 2
    assert joined(page) == b"# HELP a A.\n# TYPE a gauge\na 1\n# HELP c C.\n# TYPE c gauge\nc 2\n"


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("gzip", True),
        ("deflate, gzip;q=0.5", True),
        ("GZIP;q=1.0", True),
        ("x-gzip", True),
        ("", False),
        ("identity", False),
        ("gzip;q=0", False),
        ("br, gzip; q=0.000", False),
        ("*", False),
    ],
)
def test_a_client_gets_gzip_that_names_it(header: str, accepted: bool) -> None:
    assert accepts_gzip(header) is accepted
