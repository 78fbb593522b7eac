"""The counters: which fields are exported, in dcgm-exporter's CSV grammar, and the file that lists them.

A line is ``FIELD, TYPE, HELP``; ``#`` as the first byte starts a comment. The name in the file is the name
that is emitted. Unlike upstream, one bad line never stops the others: it is reported and left out.

A ConfigMap volume changes by renaming a link two folders up, which watchers of the file miss. So the file is
polled: its resolved path, its time and its size. If it cannot be read, the previous one stays in force.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path

from gpuslice.adapters.gpu.telemetry import PEERS
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import ConfigError, KubeError
from gpuslice.adapters.kube.resources import CONFIG_MAPS
from gpuslice.apps.exporter.card_history import HEALTH_FIELDS
from gpuslice.apps.exporter.collectors import CollectorHealth
from gpuslice.apps.exporter.fields import EXTRA_FIELDS, OWN_FIELDS, Field

_log = logging.getLogger(__name__)


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
    """What a file asks for and, in one sentence each, what in it cannot be used."""

    counters: tuple[Counter, ...]
    problems: tuple[str, ...] = ()


HEALTH_STATUS = "DCGM_EXP_GPU_HEALTH_STATUS"
P2P_STATUS = "DCGM_EXP_P2P_STATUS"
DERIVED = frozenset(
    {
        *(f"DCGM_EXP_{name}" for name in ("XID_ERRORS_COUNT", "XID_ERRORS_TOTAL")),
        *(f"DCGM_EXP_{name}" for name in ("CLOCK_EVENTS_COUNT", "CLOCK_EVENTS_TOTAL")),
        HEALTH_STATUS,
        P2P_STATUS,
    }
)


def parse(text: str, catalogue: Mapping[str, Field]) -> CounterFile:
    """Read a counter file; see the module for its grammar. Never raises."""
    counters: dict[str, Counter] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            (record,) = csv.reader([line], skipinitialspace=True, strict=True)
        except (csv.Error, ValueError) as error:
            problems.append(f"line {number}: not CSV: {error}")
            continue
        if len(record) != 3:
            columns = 'must be "FIELD, TYPE, HELP" (quote a help text that holds a comma)'
            problems.append(f"line {number}: has {len(record)} columns, {columns}")
            continue
        name, kind, about = (part.strip() for part in record)
        field = catalogue.get(name)
        if field is None and name not in DERIVED:
            problems.append(f'line {number}: "{name}" is no DCGM field')
        elif kind not in list(CounterKind):
            problems.append(f'line {number}: type of {name} is "{kind}", must be gauge, counter or label')
        elif name in counters:
            problems.append(f"line {number}: {name} is there already; the first one stays")
        else:
            counters[name] = Counter(name, CounterKind(kind), about, field)
    return CounterFile(tuple(counters.values()), tuple(problems))


class Counters:
    """The counters in force: built-in ones until `path` is read; a text from elsewhere precedes both."""

    def __init__(self, path: str, catalogue: Mapping[str, Field]) -> None:
        self._path = Path(path) if path else None
        self._catalogue = catalogue
        self._stamp: tuple[str, int, int] | None = None
        self._text: str | None = None
        self._logged: set[str] = set()
        self.ok = True
        self.version = 0
        self.file = CounterFile(())
        self.wanted_fields: Mapping[int, str] = {}  # id → NVML field value, "" where it has none
        self._take(resources.files(__package__).joinpath("default-counters.csv").read_text(), "built-in")
        self.poll()

    def asks(self, name: str) -> bool:
        """Whether the counters in force have one of this name."""
        return any(counter.name == name for counter in self.file.counters)

    def poll(self) -> None:
        """Read the file again if it is another one than last time."""
        if self._path is None:
            return
        try:
            stat = self._path.stat()
            stamp = (str(self._path.resolve()), stat.st_mtime_ns, stat.st_size)
            if stamp != self._stamp:
                self._take(self._path.read_text(errors="replace"), str(self._path))
                self._stamp = stamp
        except OSError as error:
            if self.ok:
                extra = {"file": str(self._path), "error": str(error), "instead": "those before stay"}
                _log.warning("counter file not read", extra=extra)
            self.ok = False
            self._stamp = None

    async def poll_config_map(self, client: KubeClient | None, where: str, health: CollectorHealth) -> None:
        """Read the ConfigMap `where`, NAMESPACE:NAME; what is in force stays when that fails."""
        namespace, _, name = where.partition(":")
        try:
            if client is None:
                raise ConfigError("no API server is known")
            text = ((await client.get(CONFIG_MAPS, name, namespace)).data or {}).get("metrics")
            if text is None:
                raise ConfigError('it has no key "metrics"')
        except (KubeError, ConfigError) as error:
            health.bad("config_map", f"{namespace}/{name}: {error}")
            return
        health.good("config_map", 0.0)
        self.use(text, f"ConfigMap {namespace}/{name}")

    def use(self, text: str, source: str) -> None:
        """Counters from elsewhere; from then on the file no longer counts."""
        if text != self._text:
            self._path, self._text = None, text
            self._take(text, source)

    def _take(self, text: str, source: str) -> None:
        found = parse(text, self._catalogue)
        for problem in found.problems:
            if problem not in self._logged:
                _log.warning("counter left out", extra={"source": source, "problem": problem})
        self._logged = set(found.problems)
        self.ok = bool(found.counters) or not found.problems
        if not self.ok:
            return
        self.file = found
        self.version += 1
        wanted = {**EXTRA_FIELDS, **dict.fromkeys(OWN_FIELDS, "")}
        if self.asks(P2P_STATUS):
            wanted[PEERS] = ""
        if self.asks(HEALTH_STATUS):
            by_id = {each.id: each.nvml_field for each in self._catalogue.values()}
            wanted |= {number: by_id[number] for number in HEALTH_FIELDS}
        wanted |= {each.field.id: each.field.nvml_field for each in found.counters if each.field}
        self.wanted_fields = wanted
        _log.info("counters in force", extra={"source": source, "counters": len(found.counters)})
