"""The exposition against the reference parser."""

from __future__ import annotations

import gzip
import math
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from gpuslice.adapters.web.exposition import (
    Family,
    Format,
    HistogramSample,
    MetricKind,
    Piece,
    gzipped,
    joined,
    labels,
    number,
    pieces,
    render,
)
from gpuslice.adapters.web.negotiation import accepts_gzip, chosen_format
from gpuslice.adapters.web.scrape import Sample, parse

texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r\x85\u2028\u2029"))


VALUES = st.dictionaries(st.sampled_from(["pod", "namespace", "uuid"]), texts)


def opened(page: bytes) -> list[Metric]:
    return list(read_openmetrics(page.decode()))  # type: ignore[no-untyped-call]


@given(values=VALUES, value=st.floats())
def test_what_is_written_is_read_back(values: dict[str, str], value: float) -> None:
    family = Family("a_metric", MetricKind.GAUGE, "What it is.")
    family.add(value, labels(values))
    (read,) = text_string_to_metric_families(render([family]).decode())
    (sample,) = read.samples
    assert sample.labels == values
    assert sample.value == value or (math.isnan(value) and math.isnan(sample.value))


@given(values=VALUES, value=st.floats(), about=texts)
def test_openmetrics_is_read_back(values: dict[str, str], value: float, about: str) -> None:
    family = Family("a_metric", MetricKind.GAUGE, about)
    family.add(value, labels(values))
    (read,) = opened(render([family], Format.OPENMETRICS))
    (sample,) = read.samples
    assert read.documentation.strip() == about.strip()  # the reader drops blanks at the ends
    assert sample.labels == values
    assert sample.value == value or (math.isnan(value) and math.isnan(sample.value))


@pytest.mark.parametrize(
    ("name", "kind", "family", "told"),
    [
        ("refused_total", MetricKind.COUNTER, "refused", "counter"),
        ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", MetricKind.COUNTER, "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "unknown"),
        ("used_bytes", MetricKind.GAUGE, "used_bytes", "gauge"),
        ("odd", MetricKind.UNTYPED, "odd", "unknown"),
    ],
)
def test_openmetrics_keeps_every_samples_name(name: str, kind: MetricKind, family: str, told: str) -> None:
    """A counter that is not called _total would be stored under another name, were it told as one."""
    page = render([Family(name, kind, "It.", [("", 1)])], Format.OPENMETRICS)
    assert page == f"# HELP {family} It.\n# TYPE {family} {told}\n{name} 1\n# EOF\n".encode()
    (read,) = opened(page)
    assert [sample.name for sample in read.samples] == [name]


@pytest.mark.parametrize("form", [Format.TEXT, Format.OPENMETRICS])
def test_a_histogram_is_read_back(form: Format) -> None:
    family = Family("call_seconds", MetricKind.HISTOGRAM, "Time of a call.")
    family.add_histogram(HistogramSample({"verb": "bind"}, (0.5, 1), [2, 0, 1], 3.25, {}))
    page = render([family], form).decode()
    readers = {Format.OPENMETRICS: read_openmetrics, Format.TEXT: text_string_to_metric_families}
    (read,) = readers[form](page)
    assert read.type == "histogram"
    found = {
        sample.name.rpartition("_")[2] + sample.labels.get("le", ""): sample.value for sample in read.samples
    }
    assert found == {"bucket0.5": 2, "bucket1.0": 2, "bucket+Inf": 3, "sum": 3.25, "count": 3}
    assert {sample.labels["verb"] for sample in read.samples} == {"bind"}


def test_an_empty_page_of_openmetrics_ends_too() -> None:
    assert render([], Format.OPENMETRICS) == b"# EOF\n"


@given(
    values=st.dictionaries(
        st.sampled_from(["pod", "hpc_job"]), st.text(st.characters(blacklist_categories=["Cs"])), min_size=1
    ),
    value=st.floats(),
)
def test_what_is_written_is_what_we_read_ourselves(values: dict[str, str], value: float) -> None:
    """A line ends at its line feed, whatever else ends lines elsewhere."""
    family = Family("a_metric", MetricKind.GAUGE, "What it is.", [(labels(values), value)])
    (sample,) = parse(render([family]).decode()).samples
    assert (sample.name, sample.labels) == ("a_metric", values)
    assert sample.value == value or (math.isnan(value) and math.isnan(sample.value))


@pytest.mark.parametrize("value", ["1.2.3", "1e", "0x1", "١", "++1", ""])
def test_a_line_with_no_number_is_no_sample(value: str) -> None:
    assert parse(f"a_metric {value}\nanother 1\n").samples == (Sample("another", {}, 1.0),)


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


PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (PROMETHEUS_2, Format.OPENMETRICS),
        (PROMETHEUS_3, Format.OPENMETRICS),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", Format.OPENMETRICS),
        ("Application/OpenMetrics-Text", Format.OPENMETRICS),
        ('application/openmetrics-text; version="1.0.0"', Format.OPENMETRICS),
        ("application/openmetrics-text,text/plain", Format.OPENMETRICS),
        ("text/plain;version=0.0.4;q=0.1, application/*", Format.OPENMETRICS),
        ("text/plain;q=0, */*", Format.OPENMETRICS),
        ("", Format.TEXT),
        ("*/*", Format.TEXT),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", Format.TEXT),
        ("text/plain;version=0.0.4;q=0.6,application/openmetrics-text;version=1.0.0;q=0.5", Format.TEXT),
        ("application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", Format.TEXT),
        ("application/openmetrics-text;version=2.0.0,text/plain;version=0.0.4;q=0.5", Format.TEXT),
        ("application/openmetrics-text;q=0, */*", Format.TEXT),
        ("application/openmetrics-text;q=often", Format.TEXT),
        ("application/json", Format.TEXT),
    ],
)
def test_a_client_gets_the_format_that_it_likes_best(accept: str, chosen: Format) -> None:
    assert chosen_format(accept) is chosen


def test_a_line_of_digits_that_is_no_number_is_left_out_at_once() -> None:
    """Looked at in every way to part it in two, it would take hours."""
    assert parse(f"a {'9' * 500_000}x\nb 1\n").samples == (Sample("b", {}, 1.0),)
