"""Prometheus' text format 0.0.4, written fast: label strings are made once, a scrape joins them with numbers.

Source of the grammar: Prometheus, "Exposition formats". Held against promtool and prometheus-client's parser.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    UNTYPED = "untyped"


@dataclass(slots=True)
class Family:
    """One metric name with its samples: pairs of a label string from `labels` and a number.

    `lines` are samples that are text already, made by `sample_line`: what did not change need not be written
    again.
    """

    name: str
    kind: MetricKind
    help: str
    samples: list[tuple[str, float]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def add(self, value: float, label_text: str = "") -> None:
        self.samples.append((label_text, value))


def render(families: Iterable[Family]) -> bytes:
    """The body of a scrape. A family without samples is left out: unknown is absent."""
    lines: list[str] = []
    for family in families:
        if not family.samples and not family.lines:
            continue
        name = family.name
        lines.append(f"# HELP {name} {_escaped_help(family.help)}\n# TYPE {name} {family.kind}\n")
        lines += [f"{name}{labels} {number(value)}\n" for labels, value in family.samples]
        lines += family.lines
    return "".join(lines).encode()


def sample_line(name: str, label_text: str, value: float) -> str:
    """One sample as a line of the page."""
    return f"{name}{label_text} {number(value)}\n"


def labels(values: Mapping[str, str]) -> str:
    """``{a="x",b="y"}`` in the order given, "" without labels; remembered, since they repeat each scrape."""
    return _labels(tuple(values.items()))


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
