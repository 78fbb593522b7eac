"""Pages of metrics, written fast: label strings are made once, and a scrape joins them with numbers.

Prometheus' text format 0.0.4 ("Exposition formats") and OpenMetrics 1.0.0 write a sample in the same bytes,
so what is kept from page to page serves both. They differ in the head of a family and in the last line. The
protobuf format is made from the same families. Verified with promtool, Prometheus, prometheus-client's
parsers and google.protobuf.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import lru_cache

from gpuslice.adapters.web import protobuf

_GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x04\xff"  # deflate, fastest, of no file
_DEFLATE_END = b"\x03\x00"  # a last block, empty
_TOTAL = "_total"


class Format(Enum):
    """A format of the page."""

    TEXT = "text/plain", "0.0.4"
    OPENMETRICS = "application/openmetrics-text", "1.0.0"
    PROTOBUF = "application/vnd.google.protobuf", ""

    @property
    def media_type(self) -> str:
        return self.value[0]

    @property
    def version(self) -> str:
        return self.value[1]

    @property
    def content_type(self) -> str:
        if self is Format.PROTOBUF:
            return f"{self.media_type}; proto=io.prometheus.client.MetricFamily; encoding=delimited"
        return f"{self.media_type}; version={self.version}; charset=utf-8"


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    UNTYPED = "untyped"


class Piece:
    """A piece of a page that may be reused in later scrapes: written once, compressed once."""

    __slots__ = ("_deflated", "_encoded", "samples", "text")

    def __init__(self, text: bytes, samples: int) -> None:
        self.text = text
        self.samples = samples
        self._deflated: bytes | None = None
        self._encoded: Piece | None = None

    def encoded(self, kind: MetricKind) -> Piece:
        """The same samples in protobuf, of a family of this kind."""
        if self._encoded is None:
            self._encoded = Piece(protobuf.metrics_of_text(kind, self.text), self.samples)
        return self._encoded

    @property
    def deflated(self) -> bytes:
        """A part of a deflate stream that ends at a byte and refers to nothing before it."""
        if self._deflated is None:
            packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
            self._deflated = packer.compress(self.text) + packer.flush(zlib.Z_FULL_FLUSH)
        return self._deflated


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """One histogram: `counts` of its classic buckets, and of nonempty native ones (`sparse`)."""

    labels: Mapping[str, str]
    bounds: Sequence[float]
    counts: Sequence[int]
    total: float
    sparse: Mapping[int, int]


@dataclass(slots=True)
class Family:
    """One metric name with its samples: pairs of a label string from `labels` and a number.

    `pieces` are samples that are already text, made by `sample_line`: what did not change need not be written
    again.
    """

    name: str
    kind: MetricKind
    help: str
    samples: list[tuple[str, float]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    histograms: list[HistogramSample] = field(default_factory=list)  # what `samples` says of them, and more

    def add(self, value: float, label_text: str = "") -> None:
        self.samples.append((label_text, value))

    def add_histogram(self, one: HistogramSample) -> None:
        """`counts`: values up to each bound and above the previous one; the last, the rest."""
        self.histograms.append(one)
        in_all = 0
        for bound, count in zip((*one.bounds, math.inf), one.counts, strict=True):
            in_all += count
            le = "+Inf" if bound == math.inf else repr(float(bound))
            self.add(in_all, "_bucket" + labels({**one.labels, "le": le}))
        self.add(one.total, "_sum" + labels(one.labels))
        self.add(in_all, "_count" + labels(one.labels))


def render(families: Iterable[Family], format: Format = Format.TEXT) -> bytes:
    """The body of a scrape. A family without samples is left out: unknown is absent."""
    return joined([*pieces(families, format), *end_of(format)])


def page_of(families: Callable[[], Iterable[Family]]) -> Callable[[Format], list[Piece]]:
    """The page of a process that creates all of its families for each scrape."""
    return lambda format: pieces(families(), format)


def end_of(format: Format) -> list[Piece]:
    """The end of a page, by which a truncated one is recognized."""
    return [Piece(b"# EOF\n", 0)] if format is Format.OPENMETRICS else []


def pieces(families: Iterable[Family], format: Format = Format.TEXT) -> list[Piece]:
    """The body of a scrape without its end, including the families' own pieces unchanged."""
    if format is Format.PROTOBUF:
        return [piece for family in families for piece in _encoded(family)]
    head_of = _open_head if format is Format.OPENMETRICS else _text_head
    found: list[Piece] = []
    lines: list[str] = []
    samples = 0
    for family in families:
        if not family.samples and not any(piece.samples for piece in family.pieces):
            continue
        name = family.name
        lines.append(head_of(family))
        lines += [f"{name}{labels} {number(value)}\n" for labels, value in family.samples]
        samples += len(family.samples)
        if family.pieces:
            found.append(Piece("".join(lines).encode(), samples))
            found += [piece for piece in family.pieces if piece.samples]
            lines, samples = [], 0
    if lines:
        found.append(Piece("".join(lines).encode(), samples))
    return found


def _encoded(family: Family) -> list[Piece]:
    """A family in protobuf; unchanged pieces are not encoded or compressed again."""
    kept = [piece.encoded(family.kind) for piece in family.pieces if piece.samples]
    if not family.samples and not kept:
        return []
    if family.kind is MetricKind.HISTOGRAM:
        own = protobuf.histograms(family.histograms)
    else:
        own = protobuf.metrics(family.kind, family.samples)
    length = len(own) + sum(len(piece.text) for piece in kept)
    return [Piece(protobuf.head(family, length) + own, len(family.samples)), *kept]


def joined(page: Iterable[Piece]) -> bytes:
    return b"".join([piece.text for piece in page])


def gzipped(page: Sequence[Piece]) -> bytes:
    """The page as one gzip member (RFC 1952), of which only new pieces are compressed now."""
    checksum, size = 0, 0
    for piece in page:
        checksum = zlib.crc32(piece.text, checksum)
        size += len(piece.text)
    end = _DEFLATE_END + struct.pack("<II", checksum, size & 0xFFFFFFFF)
    return b"".join([_GZIP_HEAD, *(piece.deflated for piece in page), end])


def sample_line(name: str, label_text: str, value: float) -> str:
    """One sample as a line of the page."""
    return f"{name}{label_text} {number(value)}\n"


def labels(values: Mapping[str, str]) -> str:
    """``{a="x",b="y"}`` in the order given, "" without labels; remembered, since they repeat each scrape."""
    return _labels(tuple(values.items()))


def labels_once(values: Mapping[str, str]) -> str:
    """As `labels`, for callers that cache them."""
    return _labels.__wrapped__(tuple(values.items()))


def number(value: float) -> str:
    """A value as Prometheus reads it back: integers without a fraction, the rest with all digits."""
    if isinstance(value, int):
        return str(value)
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


@lru_cache(maxsize=100_000)
def _labels(pairs: tuple[tuple[str, str], ...]) -> str:
    if not pairs:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _text_head(family: Family) -> str:
    about = family.help.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {family.name} {about}\n# TYPE {family.name} {family.kind}\n"


def _open_head(family: Family) -> str:
    """A counter is named without ``_total``, in which its samples must end.

    One whose samples do not (DCGM's names) has the type unknown, since neither counter nor gauge would be
    right. There is no ``# UNIT``, which the name contains; and no ``_created``: when the driver began to
    count is unknown, and Prometheus would store it as an additional series for each counter.
    """
    name, kind = family.name, str(family.kind)
    if family.kind is MetricKind.COUNTER and name.endswith(_TOTAL):
        name = name.removesuffix(_TOTAL)
    elif family.kind not in (MetricKind.GAUGE, MetricKind.HISTOGRAM):
        kind = "unknown"
    return f"# HELP {name} {_escaped(family.help)}\n# TYPE {name} {kind}\n"
