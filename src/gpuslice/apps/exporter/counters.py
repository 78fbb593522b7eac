"""The counter file: which fields are exported, in dcgm-exporter's CSV grammar.

A line is ``FIELD, TYPE, HELP``; ``#`` as the first byte makes a comment. The name that is written is the name
that is emitted. Unlike upstream, one bad line never stops the others: it is reported and left out.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpuslice.apps.exporter.fields import Field


class CounterKind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    LABEL = "label"  # no series of its own: a label on every other series of the card


@dataclass(frozen=True, slots=True)
class Counter:
    """One line: `name` as written, the field behind it (None for ``DCGM_EXP_*``), its type and help."""

    name: str
    kind: CounterKind
    help: str
    field: Field | None = None


@dataclass(frozen=True, slots=True)
class CounterFile:
    """What a file asks for and, one sentence each, what of it cannot be used."""

    counters: tuple[Counter, ...]
    problems: tuple[str, ...] = ()


DERIVED = frozenset(
    {
        "DCGM_EXP_XID_ERRORS_COUNT",
        "DCGM_EXP_CLOCK_EVENTS_COUNT",
        "DCGM_EXP_GPU_HEALTH_STATUS",
        "DCGM_EXP_P2P_STATUS",
    }
)


def parse(text: str, catalogue: Mapping[str, Field]) -> CounterFile:
    """Read a counter file; see the module for its grammar. Never raises."""
    counters: dict[str, Counter] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        parsed = _parse_line(line, catalogue)
        if isinstance(parsed, str):
            problems.append(f"line {number}: {parsed}")
        elif parsed.name in counters:
            problems.append(f"line {number}: {parsed.name} is there already; the first one stays")
        else:
            counters[parsed.name] = parsed
    return CounterFile(tuple(counters.values()), tuple(problems))


def _parse_line(line: str, catalogue: Mapping[str, Field]) -> Counter | str:
    """A counter, or the sentence that says why the line is none."""
    try:
        (record,) = csv.reader([line], skipinitialspace=True, strict=True)
    except (csv.Error, ValueError) as error:
        return f"not CSV: {error}"
    if len(record) != 3:
        return (
            f'has {len(record)} columns, must be "FIELD, TYPE, HELP" (quote a help text that holds a comma)'
        )
    name, kind, about = (part.strip() for part in record)
    field = catalogue.get(name)
    if field is None and name not in DERIVED:
        return f'"{name}" is no DCGM field'
    if kind not in list(CounterKind):
        return f'type of {name} is "{kind}", must be gauge, counter or label'
    return Counter(name, CounterKind(kind), about, field)
