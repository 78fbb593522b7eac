"""dcgm-exporter's own settings file (``--config-file``, its releases from 4.8.3 on), version 1 of its form.

It names the counters, by a file or one by one, and how often they are read. Flags and variables come before
it.
"""

from __future__ import annotations

import csv
import io
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

_log = logging.getLogger(__name__)
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:h|ms|us|µs|ns|m|s))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|us|µs|ns|m|s)")


class _Counter(msgspec.Struct, frozen=True):
    name: str
    prometheusType: str = "gauge"
    help: str = ""


class _Metrics(msgspec.Struct, frozen=True):
    file: str = ""
    fields: list[_Counter] = []


class _Group(msgspec.Struct, frozen=True):
    name: str = ""
    interval: str = ""
    fields: list[str] = []


class _Collection(msgspec.Struct, frozen=True):
    interval: str = ""
    watchGroups: list[_Group] = []


class _File(msgspec.Struct, frozen=True):
    version: int
    metrics: _Metrics = _Metrics()
    collection: _Collection = _Collection()


@dataclass(frozen=True, slots=True)
class UpstreamFile:
    """What the file sets: as variables of dcgm-exporter, and counters as a file of them; "" without any."""

    environment: Mapping[str, str] = field(default_factory=dict)
    counters: str = ""
    problems: tuple[str, ...] = ()


def read(path: str) -> UpstreamFile:
    """The file now. What of it cannot be understood is a problem, one sentence each; never raises."""
    try:
        told = msgspec.yaml.decode(Path(path).read_bytes())
        if not isinstance(told, dict) or told.get("version") != 1:
            version = told.get("version") if isinstance(told, dict) else None
            return UpstreamFile(problems=(f"version is {version}, only 1 is understood",))
        file = msgspec.convert(told, _File)
        environment = dict(_environment(file))
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        return UpstreamFile(problems=(str(error),))
    return UpstreamFile(environment, _csv(file.metrics.fields), tuple(_unknown(told)))


def counters_for(path: str, collectors: str) -> str:
    """The counters that the file at `path` names one by one, unless there is a file of `collectors`."""
    return read(path).counters if path and not collectors else ""


def tell(path: str, found: UpstreamFile) -> None:
    for problem in found.problems:
        _log.warning("setting of a file left out", extra={"file": path, "problem": problem})


def _environment(file: _File) -> Iterator[tuple[str, str]]:
    if file.metrics.file:
        yield "DCGM_EXPORTER_COLLECTORS", file.metrics.file
    intervals = [file.collection.interval, *(group.interval for group in file.collection.watchGroups)]
    seconds = [_seconds(text) for text in intervals if text]
    if seconds:  # here all fields are read at once: at the pace of the fastest
        yield "DCGM_EXPORTER_INTERVAL", str(max(100, round(min(seconds) * 1000)))


def _seconds(text: str) -> float:
    """A duration as Go writes it. Raises ValueError."""
    if not _DURATION.fullmatch(text):
        raise ValueError(f'interval is "{text}", must be e.g. 30s or 500ms')
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))


def _csv(counters: list[_Counter]) -> str:
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerows((each.name, each.prometheusType, " ".join(each.help.split())) for each in counters)
    return text.getvalue()


def _unknown(told: Mapping[str, Any]) -> Iterator[str]:
    for place, known in (("", _File), ("metrics", _Metrics), ("collection", _Collection)):
        inside = told.get(place, {}) if place else told
        for name in inside or ():
            if name not in known.__struct_fields__:
                yield f"{place + '.' if place else ''}{name} is not understood"
