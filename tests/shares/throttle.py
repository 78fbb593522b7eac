"""What throttle.c does around the arithmetic: batches of launches timed by events, waits in slices."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpuslice.adapters.region import layout
from tests.shares.arithmetic import Arithmetic, Past, Sample
from tests.shares.card import MS, SECOND, US, Card, Event, Process, Work

BATCHES: Final = 64
BATCH_LAUNCHES: Final = 16
BATCH: Final = MS
DENSE: Final = 20 * US
STALLED: Final = 2 * SECOND
FIRST_GUESS: Final = MS
FIRST_UNDER_WAY: Final = 1

Steps = Iterator[int | None]
"""What a program's thread does next: sleep for so long, or, None, wait until its process is idle."""

Reading = Callable[[Mapping[int, int], set[int]], tuple[int, int, int]]
"""What a container makes of a sample: its own percent, the others', and how many processes there are."""


def as_it_is(percents: Mapping[int, int], mine: set[int]) -> tuple[int, int, int]:
    own = sum(percent for number, percent in percents.items() if number in mine)
    return own, sum(percents.values()) - own, len(percents)


def nobody_known(percents: Mapping[int, int], mine: set[int]) -> tuple[int, int, int]:
    """NVML speaks of processes by numbers that the container does not know."""
    return 0, sum(percents.values()), len(percents)


@dataclass(eq=False)
class Container:
    """What its processes share: the entry in the region."""

    share: int
    arithmetic: Arithmetic
    card: Card
    reading: Reading
    entry: layout.Card = field(default_factory=layout.Card)
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.at = ctypes.pointer(self.entry)

    def in_flight(self) -> int:
        return sum(each.in_flight for each in self.processes)

    def _numbers(self) -> set[int]:
        return {self.card.processes.index(each) for each in self.processes}

    def headroom(self) -> int:
        return int(
            self.arithmetic.headroom(self.at, self.share, int(self.card.now), self.in_flight())
            if self.share < 100
            else 1
        )

    def learn(self, past: Past) -> None:
        now = int(self.card.now)
        how = self.arithmetic.ask(self.at, now, now // US)
        newest = self.card.newest_sample()
        if not how or not newest or newest.until // US == self.entry.sampled_us:
            return
        sample = Sample(newest.until // US, *self.reading(newest.percents, self._numbers()))
        self.arithmetic.learn(
            self.at, self.share, now, self.in_flight(), past, ctypes.byref(sample), newest.until, how
        )


@dataclass(eq=False)
class Batch:
    start: Event
    end: Event
    launches: list[tuple[int, int]] = field(default_factory=list)
    estimate: int = 0
    last: float = 0.0
    open: bool = True
    fresh: bool = False
    late: bool = False


class Throttle:
    """One process's launches, as throttle.c lets them go."""

    def __init__(self, process: Process, box: Container, card: Card, latency: Callable[[], float]) -> None:
        self._process = process
        self._box = box
        self._card = card
        self._latency = latency
        self._ring: deque[Batch] = deque()
        self._averages: dict[int, float] = {}
        self._covered = -1.0
        self._past = Past()

    def launch(self, own_ns: float, key: int = 0) -> Steps:
        if self._box.share < 100:
            yield from self._wait(key)
            batch = self._note(key)
            yield US
            self._process.queue.append(Work(own_ns))
            if len(batch.launches) == 1 or _is_full(batch):
                self._record(batch)
        else:
            self._process.queue.append(Work(own_ns))
        yield 4 * US

    def _may_launch(self, key: int, headroom: int) -> bool:
        return headroom > 0 and len(self._ring) < BATCHES and self._averages.get(key) != FIRST_UNDER_WAY

    def _wait(self, key: int) -> Steps:
        charged, since = self._box.entry.charged_ns, self._card.now
        self._look()
        if self._box.arithmetic.is_divided(self._box.at):
            self._box.learn(self._past)
        while not self._may_launch(key, headroom := self._box.headroom()):
            if self._ring:
                self._close(self._ring[-1])
            if self._card.now - since > STALLED and self._box.in_flight():
                break
            yield int(self._box.arithmetic.wait(self._box.share, headroom) + self._latency())
            self._look()
            self._box.learn(self._past)
            if charged != self._box.entry.charged_ns:
                charged, since = self._box.entry.charged_ns, self._card.now

    def _note(self, key: int) -> Batch:
        known = self._averages.setdefault(key, FIRST_UNDER_WAY)
        estimate = FIRST_GUESS if known == FIRST_UNDER_WAY else int(known)
        batch = self._ring[-1] if self._ring else None
        dense = batch and batch.open and not _is_full(batch)
        if not (batch and dense and self._card.now - batch.last < DENSE):
            if batch:
                self._close(batch)
            batch = Batch(Event(), Event())
            self._mark(batch.start)
            self._ring.append(batch)
        batch.launches.append((key, estimate))
        batch.fresh, batch.last = False, self._card.now
        batch.estimate += estimate
        self._process.in_flight += estimate
        return batch

    def _mark(self, event: Event) -> None:
        event.at = -1.0
        self._process.queue.append(Work(0, event))
        self._card.advance(self._card.now)

    def _record(self, batch: Batch) -> None:
        batch.end = Event()
        self._mark(batch.end)
        batch.fresh = True

    def _close(self, batch: Batch) -> None:
        if batch.open and not batch.fresh:
            self._record(batch)
            batch.late = True
        batch.open = False

    def _look(self) -> None:
        while self._ring:
            self._close(self._ring[0])
            if self._ring[0].end.at < 0:
                break
            self._settle(self._ring.popleft())
        self._box.arithmetic.note(self._past, self._box.at, int(self._card.now))

    def _settle(self, batch: Batch) -> None:
        took = max(batch.end.at - max(batch.start.at, self._covered), 0)
        if batch.late and took > 4 * batch.estimate:
            took = 4 * batch.estimate
        else:
            self._covered = max(self._covered, batch.end.at)
        own = self._box.arithmetic.charge(self._box.at, int(self._card.now), int(took))
        self._process.in_flight -= batch.estimate
        for key, estimate in batch.launches:
            known, now = self._averages[key], estimate * own / batch.estimate
            average = now if known == FIRST_UNDER_WAY else known * 0.9 + now * 0.1
            self._averages[key] = max(average, FIRST_UNDER_WAY + 1)


def _is_full(batch: Batch) -> bool:
    return len(batch.launches) >= BATCH_LAUNCHES or batch.estimate >= BATCH
