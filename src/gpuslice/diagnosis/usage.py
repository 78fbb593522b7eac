"""What cards and containers use now: rows from the pages of exporters, or from samples of Prometheus."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from sys import intern
from typing import Any, NamedTuple, overload

from gpuslice.adapters.web.scrape import Page, Sample

MOST_PROBLEMS = 5  # shown to people
UNSEEN = 0.03
"""What drivers load beside what is counted, of a container's memory."""


@dataclass(frozen=True, slots=True)
class CardUsage:
    """One card; None is unknown."""

    node: str
    gpu: str
    uuid: str
    model: str = ""
    up: bool = True
    utilization_ratio: float | None = None
    used_bytes: float | None = None
    allocated_bytes: float | None = None
    total_bytes: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


@dataclass(frozen=True, slots=True)
class ContainerUsage:
    """One container on one card; None is unknown, and no limit."""

    node: str
    gpu: str
    namespace: str
    pod: str
    container: str
    workload: str = ""
    """Kind and name of what made the pod: Deployment/infer; "" if the exporter does not know it."""
    used_bytes: float | None = None
    limit_bytes: float | None = None
    allocated_bytes: float | None = None
    peak_bytes: float | None = None
    sm_ratio: float | None = None
    refused: float | None = None
    throttled_seconds: float | None = None
    idle_seconds: float | None = None
    borrowed_bytes: float | None = None
    """In use beyond its request; None if it may not borrow."""
    processes: float | None = None

    @property
    def promised_bytes(self) -> float | None:
        """What it may count on: its limit, or what it asked for if nothing limits it."""
        return self.allocated_bytes if self.limit_bytes is None else self.limit_bytes

    @property
    def wasted_bytes(self) -> float | None:
        """Held and not used; what it might borrow is held by nobody."""
        held = self.promised_bytes if self.borrowed_bytes is None else self.allocated_bytes
        return None if self.used_bytes is None or held is None else max(0.0, held - self.used_bytes)

    @property
    def excess_bytes(self) -> float:
        """How much more it uses than that, which its neighbours lack; 0 if that may be what drivers load."""
        if self.used_bytes is None or self.promised_bytes is None:
            return 0.0
        excess = self.used_bytes - self.promised_bytes
        return excess if excess > UNSEEN * self.promised_bytes else 0.0


@dataclass(frozen=True, slots=True)
class ClusterUsage:
    """Everything at one moment, and what could not be read, in one sentence each."""

    cards: Sequence[CardUsage]
    containers: Sequence[ContainerUsage]
    problems: tuple[str, ...] = ()

    def of_namespace(self, namespace: str) -> ClusterUsage:
        """The namespace's containers, and the cards that they are on; everything for ""."""
        if not namespace:
            return self
        containers = [each for each in self.containers if each.namespace == namespace]
        where = {(each.node, each.gpu) for each in containers}
        cards = [card for card in self.cards if (card.node, card.gpu) in where]
        return replace(self, cards=cards, containers=containers)

    @property
    def problem_lines(self) -> tuple[str, ...]:
        return problem_lines(self.problems)


def problem_lines(problems: tuple[str, ...]) -> tuple[str, ...]:
    """For people: a thousand missing exporters are not a thousand lines."""
    more = len(problems) - MOST_PROBLEMS
    if more < 2:
        return problems
    return (*problems[:MOST_PROBLEMS], f"… and {more} more; -o json has all of them")


class UsageByPod(Mapping[str, Sequence[ContainerUsage]]):
    """Containers by ``namespace/name`` of their pod; each is created when it is read."""

    def __init__(self, containers: Sequence[ContainerUsage] = ()) -> None:
        self._containers = containers
        self._at: dict[str, tuple[int, ...]] = {}
        for number, each in enumerate(containers):
            key = intern(f"{each.namespace}/{each.pod}")
            self._at[key] = (*self._at.get(key, ()), number)

    def __getitem__(self, key: str) -> Sequence[ContainerUsage]:
        return tuple(self._containers[at] for at in self._at[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


# -- from pages to rows ----------------------------------------------------------------------------------

_CARD = (
    "utilization_ratio",
    "memory_used_bytes",
    "memory_allocated_bytes",
    "memory_total_bytes",
    "temperature_celsius",
    "power_watts",
)
_CONTAINER = (
    "memory_used_bytes",
    "memory_limit_bytes",
    "memory_allocated_bytes",
    "memory_peak_bytes",
    "sm_utilization_ratio",
    "memory_refused_total",
    "throttled_seconds_total",
    "last_active_timestamp_seconds",
    "memory_borrowed_bytes",
    "processes",
)
"""Metrics without their prefix, in the order of the fields that they fill."""
_ACTIVE = _CONTAINER.index("last_active_timestamp_seconds")
CARD_FIGURES = ("gpuslice_gpu_up", "gpuslice_gpu_memory_used_bytes", "gpuslice_gpu_utilization_ratio")
TIME = "gpuslice_exporter_time_seconds"
CONTAINER_FIGURES = (
    "gpuslice_container_info",
    TIME,
    *(f"gpuslice_container_{name}" for name in _CONTAINER[:-1]),
)
"""Which metrics to query if each costs a query: for cards, how much is used."""


class _Place(NamedTuple):
    """Labels that identify a card, or a container on it."""

    node: str
    gpu: str
    gpu_uuid: str
    namespace: str
    pod: str
    container: str


_PLACE = _Place._fields
MOST = float(1 << 63)
"""For bytes, seconds and counts; sums below it are finite, too."""


class _Figures:
    """Values for many places in one array, a fixed number each: objects would take five times the memory."""

    def __init__(self, of_each: int) -> None:
        self._unknown = array("d", [math.nan]) * of_each
        self._values = array("d")
        self._at: dict[_Place, int] = {}

    def put(self, place: _Place, which: int, value: float) -> None:
        """An impossible value, such as infinity, is unknown."""
        if not abs(value) < MOST:
            return
        at = self._at.get(place)
        if at is None:
            at = self._at[place] = len(self._values)
            self._values.extend(self._unknown)
        self._values[at + which] = value

    def of(self, place: _Place) -> list[float | None]:
        at = self._at.get(place)
        found = self._values[at : at + len(self._unknown)] if at is not None else self._unknown
        return [None if math.isnan(each) else each for each in found]


class _Containers(Sequence[ContainerUsage]):
    """Rows are created when they are read: a large cluster has tens of thousands, and they are kept."""

    def __init__(
        self,
        places: Sequence[_Place],
        figures: _Figures,
        workloads: Mapping[_Place, str],
        clocks: Mapping[str, float],
    ) -> None:
        self._places = places
        self._figures = figures
        self._workloads = workloads
        self._clocks = clocks  # of nodes, whose timestamps are theirs

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, at: int) -> ContainerUsage: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[ContainerUsage]: ...
    def __getitem__(self, at: int | slice) -> ContainerUsage | Sequence[ContainerUsage]:
        if isinstance(at, slice):
            return _Containers(self._places[at], self._figures, self._workloads, self._clocks)
        place = self._places[at]
        names = (place.node, place.gpu, place.namespace, place.pod, place.container)
        figures, now_s = self._figures.of(place), self._clocks.get(place.node)
        active_s = figures[_ACTIVE]
        figures[_ACTIVE] = max(0.0, now_s - active_s) if now_s and active_s is not None else None
        return ContainerUsage(*names, self._workloads.get(place, ""), *figures)


def usage_of(pages: Iterable[Page], problems: Iterable[str] = ()) -> ClusterUsage:
    """All cards and containers of all pages, in order."""
    return usage_of_samples((one for page in pages for one in page.samples), problems)


def usage_of_samples(samples: Iterable[Sample], problems: Iterable[str] = ()) -> ClusterUsage:
    """All cards and containers of samples in any order, one after the other, since there may be many."""
    kinds: dict[str, dict[str, int]] = {
        "gpu": {name: at for at, name in enumerate(_CARD)},
        "container": {name: at for at, name in enumerate(_CONTAINER)},
    }
    figures = {kind: _Figures(len(fields)) for kind, fields in kinds.items()}
    up: dict[_Place, bool] = {}
    containers: list[_Place] = []
    models: dict[str, str] = {}
    workloads: dict[_Place, str] = {}
    clocks: dict[str, float] = {}
    for one in samples:
        if one.name == TIME:
            clocks[one.labels.get("node", "")] = one.value
            continue
        kind, _, name = one.name.removeprefix("gpuslice_").partition("_")
        fields = kinds.get(kind, {})
        if name not in fields and name not in ("info", "up"):
            continue
        place = _Place(*(intern(one.labels.get(label, "")) for label in _PLACE))
        if name in fields:
            figures[kind].put(place, fields[name], one.value)
        elif one.name == "gpuslice_gpu_info":
            models[place.gpu_uuid] = one.labels.get("model", "")
        elif one.name == "gpuslice_gpu_up":
            up[place] = one.value == 1
        elif one.name == "gpuslice_container_info":
            containers.append(place)
            if workload := one.labels.get("workload"):
                workloads[place] = intern(f"{one.labels.get('workload_kind', '')}/{workload}")
    cards = figures["gpu"]
    card_rows = [
        CardUsage(at.node, at.gpu, at.gpu_uuid, models.get(at.gpu_uuid, ""), answers, *cards.of(at))
        for at, answers in up.items()
    ]
    card_rows.sort(key=lambda row: (row.node, gpu_order(row.gpu)))
    containers.sort(key=lambda at: (at.node, gpu_order(at.gpu), at.namespace, at.pod, at.container))
    containers = [at for at, _ in groupby(containers)]  # once, whichever exporters report them
    return ClusterUsage(
        tuple(card_rows), _Containers(containers, figures["container"], workloads, clocks), tuple(problems)
    )


ORDERS: Mapping[str, Callable[[ContainerUsage], float | None]] = {
    "wasted": lambda each: each.wasted_bytes,
    "held": lambda each: each.promised_bytes,
    "used": lambda each: each.used_bytes,
    "peak": lambda each: each.peak_bytes,
    "idle": lambda each: each.idle_seconds,
    "excess": lambda each: each.excess_bytes,
    "sm": lambda each: each.sm_ratio,
    "refused": lambda each: each.refused,
}
"""What containers may be sorted by."""


def by_most(containers: Iterable[ContainerUsage], order: str, *, least: bool = False) -> list[ContainerUsage]:
    """Sorted by one of `ORDERS`, the highest first; what is not known comes last either way."""

    def key(each: ContainerUsage) -> tuple[bool, float]:
        value = ORDERS[order](each)
        return value is None, (value or 0.0) * (1 if least else -1)

    return sorted(containers, key=key)


def total(values: Iterable[float | None]) -> float | None:
    """None if any is unknown: a partial sum would look like the total."""
    found = list(values)
    return None if None in found else sum(filter(None, found), 0.0)


def least(values: Sequence[float | None]) -> float | None:
    """None if any is unknown: that one may be at work."""
    known_ones = [value for value in values if value is not None]
    return min(known_ones) if known_ones and len(known_ones) == len(values) else None


def gpu_order(gpu: str) -> tuple[int, str]:
    """Numbers in numerical order, everything else after them."""
    return (int(gpu), "") if gpu.isdecimal() and len(gpu) < 10 else (1 << 31, gpu)


def documents(found: ClusterUsage) -> dict[str, Any]:
    """For ``-o json``: the rows, unknown figures left out."""
    return {
        "cards": [known(**asdict(row)) for row in found.cards],
        "containers": [known(**asdict(row)) for row in found.containers],
        "problems": list(found.problems),
    }


def known(**values: Any) -> dict[str, Any]:
    """A part of a document: what is not known is left out of it."""
    return {name: value for name, value in values.items() if value is not None}
