"""Reads the cards and keeps what was read last. A scrape never waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuslice.adapters.gpu.source import GpuUnavailableError
from gpuslice.adapters.gpu.telemetry import CardSample, NodeSample, Telemetry
from gpuslice.apps.exporter.book import Book
from gpuslice.apps.exporter.isolation import Isolation, IsolationReader
from gpuslice.apps.exporter.owners import Owners
from gpuslice.apps.exporter.picture import CardPicture, Drawer, Knowledge
from gpuslice.core.attribution import ContainerKey, Owner

_log = logging.getLogger(__name__)

LONGEST_STEP_S = 10.0
"""Longer gaps between two samples are not counted as busy time: nobody looked."""


@dataclass(frozen=True, slots=True)
class LostCard:
    """A card that does not answer. `index` and `uuid` are those it had, "" when it never answered."""

    position: int
    reason: str
    index: int
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All cards at one moment; `taken_at_s` is monotonic, 0 before the first sample."""

    cards: tuple[CardPicture, ...] = ()
    lost: tuple[LostCard, ...] = ()
    driver_version: str = ""
    taken_at_s: float = 0.0
    sm_seconds: Mapping[tuple[str, ContainerKey], float] = field(default_factory=dict)
    clock_events: Mapping[str, int] = field(default_factory=dict)  # uuid → bits, DCGM field 112
    peers: Mapping[tuple[int, int], int] = field(default_factory=dict)  # card numbers → NVLink status


@dataclass(slots=True)
class Reading:
    """How one source is doing."""

    success: bool = False
    took_s: float = 0.0
    errors: int = 0
    reason: str = ""


class Health:
    """How all sources are doing; a change is logged once."""

    def __init__(self) -> None:
        self.readings: dict[str, Reading] = {}

    def good(self, collector: str, took_s: float) -> None:
        before = self.readings.setdefault(collector, Reading(success=True))
        if not before.success:
            _log.info("collector works again", extra={"collector": collector})
        before.success, before.took_s, before.reason = True, took_s, ""

    def bad(self, collector: str, reason: str, took_s: float = 0.0) -> None:
        before = self.readings.setdefault(collector, Reading(success=True))
        if before.success or before.reason != reason:
            _log.warning("collector failed", extra={"collector": collector, "reason": reason})
        before.success, before.took_s, before.reason = False, took_s, reason
        before.errors += 1


class Sampler:
    """Takes samples. `wanted`, `book` and `obstacle` are asked anew for each."""

    def __init__(
        self,
        telemetry: Telemetry,
        owners: Owners,
        health: Health,
        *,
        root: Path,
        proc: Path | None = None,
        memory_unit: str = "GiB",
        chosen: frozenset[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.snapshot = Snapshot()
        self.book = Book({})
        self.wanted: Mapping[int, str] = {}
        self.obstacle: Callable[[], str] = lambda: ""
        self.last_owners: dict[int, Owner] = {}  # of the processes of the last sample
        self.expected = 0
        self._telemetry = telemetry
        self._owners = owners
        self._health = health
        self._isolation = IsolationReader(root)
        self._drawer = Drawer()
        self._proc = proc  # None: the processes of containers cannot be seen
        self._memory_unit = memory_unit
        self._chosen = chosen
        self._clock = clock
        self._places: dict[int, tuple[int, str]] = {}  # position → index and uuid as last known

    async def sample(self) -> None:
        """One sample; the last good one stays when the driver cannot be asked."""
        began_s = self._clock()
        try:
            sample = await self._telemetry.sample(self.wanted)
        except GpuUnavailableError as error:
            self._health.bad("driver", str(error), self._clock() - began_s)
            return
        self._health.good("driver", sample.took_s)
        self.snapshot = await self._assemble(sample)

    async def _assemble(self, sample: NodeSample) -> Snapshot:
        cards = tuple(card for card in sample.cards if self._is_chosen(card.index))
        known = await self._known(cards)
        drawn = []
        for card in cards:
            drawn.append(self._drawer.draw(card, known))
            await asyncio.sleep(0)  # a scrape may be waiting
        pictures = tuple(drawn)
        lost = self._lost(sample)
        self.expected = max(self.expected, len(pictures) + len(lost))
        return Snapshot(
            cards=pictures,
            lost=lost,
            driver_version=sample.driver_version,
            taken_at_s=sample.taken_at_s,
            sm_seconds=self._busy(pictures, sample.taken_at_s),
            clock_events={
                card.uuid: int(bits) for card in cards if (bits := card.fields.get(112)) is not None
            },
            peers=sample.peers,
        )

    async def _known(self, cards: tuple[CardSample, ...]) -> Knowledge:
        pids = {process.pid for card in cards for process in card.processes or ()}
        self.last_owners = self._owners.of(pids, self.book.containers)
        untold, obstacle = _untold(cards), self.obstacle()
        busy = None if obstacle else self._busy_containers(cards, untold)
        isolation = await self._read_isolation(busy)
        if self._proc is not None:
            isolation = isolation.of_the_living(untold, self._proc)
        return Knowledge(self.last_owners, self.book, isolation, self._memory_unit, obstacle)

    def _busy_containers(self, cards: Iterable[CardSample], untold: Container[str]) -> set[Owner]:
        """Those with a process, and those of which that is not known."""
        unsure = {key for card in cards if card.uuid in untold for key in self.book.of(card)}
        return {*self.last_owners.values(), *unsure}

    async def _read_isolation(self, busy: Container[Owner] | None) -> Isolation:
        began_s = self._clock()
        isolation = await self._isolation.read(busy)
        took_s = self._clock() - began_s
        if isolation.problems:
            self._health.bad("isolation", isolation.problems[0], took_s)
        else:
            self._health.good("isolation", took_s)
        return isolation

    def _lost(self, sample: NodeSample) -> tuple[LostCard, ...]:
        self._places |= {card.position: (card.index, card.uuid) for card in sample.cards}
        found = (
            LostCard(position, reason, *self._places.get(position, (position, "")))
            for position, reason in sample.lost
        )
        return tuple(card for card in found if self._is_chosen(card.index))

    def _busy(self, cards: tuple[CardPicture, ...], now_s: float) -> Mapping[tuple[str, ContainerKey], float]:
        """Card time by container. One that is gone is forgotten: its series ends."""
        step_s = now_s - self.snapshot.taken_at_s if self.snapshot.taken_at_s else 0.0
        step_s = step_s if 0 <= step_s <= LONGEST_STEP_S else 0.0
        before = self.snapshot.sm_seconds
        return {
            (card.sample.uuid, key): before.get((card.sample.uuid, key), 0.0) + each.sm_ratio * step_s
            for card in cards
            for key, each in card.containers.items()
            if each.sm_ratio is not None
        }

    def _is_chosen(self, index: int) -> bool:
        return self._chosen is None or index in self._chosen


def _untold(cards: Iterable[CardSample]) -> set[str]:
    """Cards of which the driver names no processes, or not their memory: there the region is asked."""
    return {
        card.uuid
        for card in cards
        if not card.processes or any(process.memory_bytes is None for process in card.processes)
    }
