"""The protobuf page read back by google.protobuf, against the text page of the same families."""

from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.adapters.web.exposition import Family, Format, MetricKind, Piece, joined, pieces, sample_line
from gpuslice.adapters.web.exposition import labels as label_text
from gpuslice.adapters.web.histogram import Histogram, native_bucket
from gpuslice.adapters.web.negotiation import accepts_gzip, chosen_format
from gpuslice.adapters.web.protobuf import LAST_BUCKET, ZERO_BUCKET
from gpuslice.adapters.web.scrape import parse

PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
MESSAGES = {  # prometheus/client_model, io/prometheus/client/metrics.proto: name, number, type, many
    "LabelPair": [("name", 1, "string", 0), ("value", 2, "string", 0)],
    "Value": [("value", 1, "double", 0)],  # Gauge, Counter and Untyped
    "Bucket": [("cumulative_count", 1, "uint64", 0), ("upper_bound", 2, "double", 0)],
    "BucketSpan": [("offset", 1, "sint32", 0), ("length", 2, "uint32", 0)],
    "Histogram": [
        ("sample_count", 1, "uint64", 0),
        ("sample_sum", 2, "double", 0),
        ("bucket", 3, "Bucket", 1),
        ("schema", 5, "sint32", 0),
        ("zero_threshold", 6, "double", 0),
        ("zero_count", 7, "uint64", 0),
        ("positive_span", 12, "BucketSpan", 1),
        ("positive_delta", 13, "sint64", 1),
    ],
    "Metric": [
        ("label", 1, "LabelPair", 1),
        ("gauge", 2, "Value", 0),
        ("counter", 3, "Value", 0),
        ("untyped", 5, "Value", 0),
        ("histogram", 7, "Histogram", 0),
    ],
    "MetricFamily": [
        ("name", 1, "string", 0),
        ("help", 2, "string", 0),
        ("type", 3, "int32", 0),
        ("metric", 4, "Metric", 1),
    ],
}
Field = descriptor_pb2.FieldDescriptorProto
TYPES = {
    "string": Field.TYPE_STRING,
    "double": Field.TYPE_DOUBLE,
    "int32": Field.TYPE_INT32,
    "uint32": Field.TYPE_UINT32,
    "uint64": Field.TYPE_UINT64,
    "sint32": Field.TYPE_SINT32,
    "sint64": Field.TYPE_SINT64,
}
KINDS = {MetricKind.COUNTER: 0, MetricKind.GAUGE: 1, MetricKind.UNTYPED: 3, MetricKind.HISTOGRAM: 4}


def _family_message() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="judge.proto", package="judge", syntax="proto2")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, many in fields:
            added = message.field.add(name=field, number=number, label=3 if many else 1)
            added.type = TYPES.get(kind, Field.TYPE_MESSAGE)
            if kind in MESSAGES:
                added.type_name = f".judge.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("judge.MetricFamily"))


MetricFamily = _family_message()


def decoded(page: bytes) -> list[Any]:
    found, at = [], 0
    while at < len(page):
        length = shift = 0
        while True:
            length |= (page[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if page[at - 1] < 0x80:
                break
        assert at + length <= len(page)
        family = MetricFamily.FromString(page[at : at + length])
        found.append(family)
        at += length
    return found


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


texts = st.text(st.characters(blacklist_categories=["Cs"]))
label_sets = st.dictionaries(st.sampled_from(["pod", "namespace", "uuid"]), texts)


@given(
    kind=st.sampled_from([MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.UNTYPED]),
    about=texts,
    samples=st.lists(st.tuples(label_sets, st.floats() | st.integers(0, 2**62)), min_size=1, max_size=4),
    kept=st.lists(st.tuples(label_sets, st.floats() | st.integers(0, 2**62)), max_size=4),
)
def test_protobuf_says_what_the_text_says(
    kind: MetricKind, about: str, samples: list[Any], kept: list[Any]
) -> None:
    family = Family("a_total", kind, about, [(label_text(of), value) for of, value in samples])
    lines = "".join(sample_line("a_total", label_text(of), value) for of, value in kept)
    family.pieces = [Piece(lines.encode(), len(kept))]
    (read,) = decoded(joined(pieces([family], Format.PROTOBUF)))
    assert (read.name, read.help, read.type) == ("a_total", about, KINDS[kind])
    written = parse(joined(pieces([family])).decode()).samples
    assert len(written) == len(read.metric) == len(samples) + len(kept)
    for metric, sample in zip(read.metric, written, strict=True):
        assert {pair.name: pair.value for pair in metric.label} == sample.labels
        assert same(getattr(metric, str(kind)).value, sample.value)


@given(st.lists(st.floats(0, 1e9) | st.sampled_from([2.0**power for power in range(-25, 30)]), max_size=30))
def test_native_buckets_count_what_classic_ones_count(observed: list[float]) -> None:
    histogram = Histogram("call_seconds", "Time of a call.", ("verb",))
    for seconds in observed:
        histogram.observe(seconds, "bind")
    families = decoded(joined(pieces([histogram.family()], Format.PROTOBUF)))
    if not observed:
        assert families == []
        return
    found = families[0].metric[0].histogram
    text = parse(joined(pieces([histogram.family()])).decode())
    classic = {float(each.labels["le"]): each.value for each in text.find("call_seconds_bucket")}
    assert {each.upper_bound: each.cumulative_count for each in found.bucket} == classic
    assert found.sample_count == len(observed)
    assert found.sample_sum == text.find("call_seconds_sum")[0].value

    native, index, count, deltas = {}, 0, 0, iter(found.positive_delta)
    for span in found.positive_span:
        index += span.offset
        for _ in range(span.length):
            count += next(deltas)
            native[index] = count
            index += 1
    assert list(deltas) == []
    factor = 2 ** (2**-found.schema)
    for index, count in native.items():
        upper = factor**index
        last = index == LAST_BUCKET
        inside = [
            each
            for each in observed
            if upper / factor * (1 + 1e-12) < each and (last or each <= upper * (1 + 1e-12))
        ]
        near = [each for each in observed if math.isclose(each, upper / factor, rel_tol=1e-12)]
        assert len(inside) <= count <= len(inside) + len(near)
    assert found.zero_count == sum(each <= found.zero_threshold for each in observed)
    assert found.zero_count + sum(native.values()) == found.sample_count


@pytest.mark.parametrize(
    ("seconds", "index"),
    [
        (1.0, 0),
        (math.nextafter(1.0, 2.0), 1),
        (2.0, 8),
        (0.5, -8),
        (0.0, ZERO_BUCKET),
        (-3.0, ZERO_BUCKET),
        (5e-324, ZERO_BUCKET),
        (math.nan, ZERO_BUCKET),
        (1e300, LAST_BUCKET),
        (math.inf, LAST_BUCKET),
    ],
)
def test_a_power_of_two_ends_its_bucket_and_the_buckets_end_somewhere(seconds: float, index: int) -> None:
    assert native_bucket(seconds) == index


def test_a_native_histogram_of_nothing_is_known_as_one() -> None:
    (family,) = decoded(joined(pieces([Histogram("lag_seconds", "Lag.").family()], Format.PROTOBUF)))
    found = family.metric[0].histogram
    assert found.sample_count == 0
    assert found.zero_threshold > 0  # how Prometheus tells it from a classic one


def test_a_page_is_encoded_anew_where_it_changed() -> None:
    kept = Piece(b'used_bytes{pod="a"} 1\n', 1)
    pages = [pieces([Family("used_bytes", MetricKind.GAUGE, "It.", pieces=[kept])], Format.PROTOBUF)] * 2
    assert pages[0][1] is pages[1][1]


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (PROTOBUF, Format.PROTOBUF),
        (f"{PROTOBUF},application/openmetrics-text;version=1.0.0;q=0.8,*/*;q=0.1", Format.PROTOBUF),
        (f"{PROTOBUF};escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.2", Format.PROTOBUF),
        (f"{PROTOBUF};q=0.1,text/plain;version=0.0.4;q=0.2", Format.TEXT),
        (f"{PROTOBUF};q=0,*/*", Format.TEXT),
        (f"{PROTOBUF};q=nan", Format.TEXT),
        ("application/vnd.google.protobuf", Format.TEXT),
        ("application/vnd.google.protobuf;proto=x.Y;encoding=delimited", Format.TEXT),
        (PROTOBUF.replace("delimited", "compact-text"), Format.TEXT),
        ("application/*", Format.OPENMETRICS),
        (f"{PROTOBUF};" * 2000 + ",;=;;," * 2000, Format.PROTOBUF),
    ],
)
def test_protobuf_gets_who_names_it(accept: str, chosen: Format) -> None:
    assert chosen_format(accept) is chosen


def test_of_an_endless_header_only_the_start_is_read() -> None:
    """60,000 bytes of commas and semicolons took the loop 0.1 s, from anybody who may ask for a page."""
    assert chosen_format(",;" * 30_000 + PROTOBUF) is Format.TEXT
    assert chosen_format("text/plain;q=0.1" + ";=" * 30_000 + f",{PROTOBUF}") is Format.PROTOBUF
    assert not accepts_gzip("," * 60_000 + "gzip")
