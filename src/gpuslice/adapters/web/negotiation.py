"""What a client prefers (RFC 9110, 12.5): the format of a page, and whether it is compressed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuslice.adapters.web.exposition import Format

_REFUSED = re.compile(r"q=0(\.0*)?")
_WEIGHT = re.compile(r"0(\.\d*)?|1(\.0*)?")
_PROTOBUF = {"proto": "io.prometheus.client.metricfamily", "encoding": "delimited"}
_MOST = 32
"""How many parts of a header are read: Prometheus sends five, a hostile client tens of thousands."""
_ANYTHING = 1  # the precision of */*

_Liking = tuple[float, int]  # weight, and the precision of the range that gives it


@dataclass(frozen=True, slots=True)
class _Range:
    """One part of an Accept header: a media type, and how much the client prefers it."""

    kind: str
    version: str
    weight: float

    def precision(self, offer: Format) -> int:
        """How exactly it matches what we offer; 0 if it does not."""
        if self.version not in {"", offer.version}:
            return 0
        family = offer.media_type.partition("/")[0]
        named = {offer.media_type: 3, f"{family}/*": 2, "*/*": _ANYTHING}.get(self.kind, 0)
        return named + (named > 0 and self.version != "")


def chosen_format(accept: str) -> Format:
    """The format preferred by a client's ``Accept``; of two equal ones, the one named more exactly.

    A client that accepts none, or sends nothing, gets plain text, which browsers and scripts read. Protobuf
    is only for clients that name the message and its encoding.
    """
    ranges = []
    binary = 0.0
    for part in accept.lower().split(",", _MOST)[:_MOST]:
        kind, *parameters = (each.strip() for each in part.split(";", _MOST)[:_MOST])
        pairs = (parameter.partition("=") for parameter in parameters)
        given = {name.strip(): value.strip().strip('"') for name, _, value in pairs}
        q = given.get("q", "1")
        weight = float(q) if _WEIGHT.fullmatch(q) else 0.0
        ranges.append(_Range(kind, given.get("version", ""), weight))
        if kind == Format.PROTOBUF.media_type and given.items() >= _PROTOBUF.items():
            binary = max(binary, weight)
    text, opened = _liking(Format.TEXT, ranges), _liking(Format.OPENMETRICS, ranges)
    if binary > 0 and binary >= max(text[0], opened[0]):
        return Format.PROTOBUF
    weight, precision = opened
    wanted = weight > 0 and precision > _ANYTHING
    return Format.OPENMETRICS if (weight > text[0] or (wanted and opened >= text)) else Format.TEXT


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether a client's ``Accept-Encoding`` allows it by name."""
    for offer in accept_encoding.lower().split(",", _MOST)[:_MOST]:
        coding, _, weight = offer.partition(";")
        if coding.strip() in {"gzip", "x-gzip"}:
            return not _REFUSED.fullmatch(weight.strip())
    return False


def _liking(offer: Format, ranges: list[_Range]) -> _Liking:
    """The preference by the range that matches the offer most exactly."""
    precision, weight = max(((each.precision(offer), each.weight) for each in ranges), default=(0, 0.0))
    return (weight, precision) if precision else (0.0, 0)
