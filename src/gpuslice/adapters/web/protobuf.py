"""Families in Prometheus' protobuf format, the only one of today that carries native histograms.

``io.prometheus.client.MetricFamily`` (prometheus/client_model, metrics.proto), each after its length. Written
by hand: five kinds of message, from rows that stay encoded from scrape to scrape; prometheus-client writes no
protobuf, and a runtime would be loaded into every process for it. google.protobuf reads it back in the tests.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from gpuslice.adapters.web.scrape import labels_of

if TYPE_CHECKING:
    from gpuslice.adapters.web.exposition import Family, HistogramSample

SCHEMA = 3
"""Each power of two is divided into 2**3 buckets: one ends 9 % above the one before."""
ZERO_BUCKET, LAST_BUCKET = -20 << SCHEMA, 24 << SCHEMA
"""Up to a microsecond is nothing, more than half a year the last bucket: no more are kept."""

_TYPES = {"counter": 0, "gauge": 1, "untyped": 3, "histogram": 4}
_FIELDS = {"counter": 3, "gauge": 2, "untyped": 5}  # of a Metric
_VARINT, _DOUBLE, _BYTES = 0, 1, 2  # wire types


def metrics(kind: str, samples: Iterable[tuple[str, float]]) -> bytes:
    """The ``metric`` fields of a family, of label texts and values."""
    # A Gauge, Counter or Untyped is a double after the byte of its field: nine bytes.
    held = bytes((_FIELDS[kind] << 3 | _BYTES, 9, 1 << 3 | _DOUBLE))
    return b"".join(
        [
            _message(4, _pairs_of(label_text) + held + struct.pack("<d", value))
            for label_text, value in samples
        ]
    )


def metrics_of_text(kind: str, text: bytes) -> bytes:
    """The same of lines that are written already: by us, so that the first brace and the last blank tell."""
    found = []
    for line in text.decode().split("\n")[:-1]:
        named, _, value = line.rpartition(" ")
        found.append((named[named.index("{") :] if "{" in named else "", float(value)))
    return metrics(kind, found)


def histograms(samples: Iterable[HistogramSample]) -> bytes:
    """The ``metric`` fields of a family of histograms: classic and native buckets of each."""
    return b"".join(
        _message(4, _label_pairs(each.labels) + _message(7, _histogram(each))) for each in samples
    )


def head(family: Family, length: int) -> bytes:
    """What stands before the `length` bytes of a family's metrics."""
    about = _text(1, family.name) + _text(2, family.help) + _integer(3, _TYPES[family.kind])
    return _varint(len(about) + length) + about


def _histogram(sample: HistogramSample) -> bytes:
    counted = list(accumulate(sample.counts))
    parts = [_integer(1, counted[-1]), _number(2, sample.total)]
    for bound, count in zip((*sample.bounds, float("inf")), counted, strict=True):
        parts.append(_message(3, _integer(1, count) + _number(2, bound)))
    sparse = sample.sparse
    parts += [_integer(5, _zigzag(SCHEMA)), _number(6, 2.0 ** (ZERO_BUCKET >> SCHEMA))]
    parts.append(_integer(7, sparse.get(ZERO_BUCKET, 0)))
    spans: list[list[int]] = []  # how far after the one before, how many
    deltas, end, before = [], 0, 0
    for index in sorted(index for index in sparse if index > ZERO_BUCKET):
        if spans and index == end:
            spans[-1][1] += 1
        else:
            spans.append([index - end, 1])
        end = index + 1
        deltas.append(_varint(_zigzag(sparse[index] - before)))
        before = sparse[index]
    parts += [_message(12, _integer(1, _zigzag(gap)) + _integer(2, many)) for gap, many in spans]
    return b"".join([*parts, _message(13, b"".join(deltas)) if deltas else b""])


@lru_cache(maxsize=10_000)
def _pairs_of(label_text: str) -> bytes:
    """Remembered: a row's labels are those of each of its samples."""
    return _label_pairs(labels_of(label_text))


def _label_pairs(values: Mapping[str, str]) -> bytes:
    return b"".join(_message(1, _text(1, name) + _text(2, value)) for name, value in values.items())


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(body)) + body


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _number(field: int, value: float) -> bytes:
    return _varint(field << 3 | _DOUBLE) + struct.pack("<d", value)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
