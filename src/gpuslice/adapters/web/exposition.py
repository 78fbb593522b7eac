"""Prometheus' text format 0.0.4, written fast: label strings are made once, a scrape joins them with numbers.

Source of the grammar: Prometheus, "Exposition formats". Held against promtool and prometheus-client's parser.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x04\xff"  # deflate, fastest, of no file
_DEFLATE_END = b"\x03\x00"  # a last block, empty
_REFUSED = re.compile(r"q=0(\.0*)?")


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    UNTYPED = "untyped"


class Piece:
    """A piece of a page that may stay as it is from scrape to scrape: written once, compressed once."""

    __slots__ = ("_deflated", "samples", "text")

    def __init__(self, text: bytes, samples: int) -> None:
        self.text = text
        self.samples = samples
        self._deflated: bytes | None = None

    @property
    def deflated(self) -> bytes:
        """A part of a deflate stream that ends at a byte and refers to nothing before it."""
        if self._deflated is None:
            packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
            self._deflated = packer.compress(self.text) + packer.flush(zlib.Z_FULL_FLUSH)
        return self._deflated


@dataclass(slots=True)
class Family:
    """One metric name with its samples: pairs of a label string from `labels` and a number.

    `pieces` are samples that are text already, made of `sample_line`: what did not change need not be written
    again.
    """

    name: str
    kind: MetricKind
    help: str
    samples: list[tuple[str, float]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def add(self, value: float, label_text: str = "") -> None:
        self.samples.append((label_text, value))


def render(families: Iterable[Family]) -> bytes:
    """The body of a scrape. A family without samples is left out: unknown is absent."""
    return joined(pieces(families))


def pieces(families: Iterable[Family]) -> list[Piece]:
    """The body of a scrape, with the families' own pieces in it as they are."""
    found: list[Piece] = []
    lines: list[str] = []
    samples = 0
    for family in families:
        if not family.samples and not any(piece.samples for piece in family.pieces):
            continue
        name = family.name
        lines.append(f"# HELP {name} {_escaped_help(family.help)}\n# TYPE {name} {family.kind}\n")
        lines += [f"{name}{labels} {number(value)}\n" for labels, value in family.samples]
        samples += len(family.samples)
        if family.pieces:
            found.append(Piece("".join(lines).encode(), samples))
            found += [piece for piece in family.pieces if piece.samples]
            lines, samples = [], 0
    if lines:
        found.append(Piece("".join(lines).encode(), samples))
    return found


def joined(page: Iterable[Piece]) -> bytes:
    return b"".join([piece.text for piece in page])


def gzipped(page: Sequence[Piece]) -> bytes:
    """The page as one gzip member (RFC 1952), of which only pieces that are new are compressed now."""
    checksum, size = 0, 0
    for piece in page:
        checksum = zlib.crc32(piece.text, checksum)
        size += len(piece.text)
    end = _DEFLATE_END + struct.pack("<II", checksum, size & 0xFFFFFFFF)
    return b"".join([_GZIP_HEAD, *(piece.deflated for piece in page), end])


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether a client's ``Accept-Encoding`` (RFC 9110) allows it by name."""
    for offer in accept_encoding.lower().split(","):
        coding, _, weight = offer.partition(";")
        if coding.strip() in {"gzip", "x-gzip"}:
            return not _REFUSED.fullmatch(weight.strip())
    return False


def sample_line(name: str, label_text: str, value: float) -> str:
    """One sample as a line of the page."""
    return f"{name}{label_text} {number(value)}\n"


def labels(values: Mapping[str, str]) -> str:
    """``{a="x",b="y"}`` in the order given, "" without labels; remembered, since they repeat each scrape."""
    return _labels(tuple(values.items()))


def labels_once(values: Mapping[str, str]) -> str:
    """As `labels`, for who remembers them."""
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


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
