"""What throttle.c does with the driver, the clock and the neighbours' files, told again in virtual time.

What it decides, and when work counts as done, is the library's own code: card_queue.c, share.c, fairness.c.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpuslice.adapters.region import layout
from tests.shares.arithmetic import (
    CREATE,
    ELAPSED,
    QUERY,
    RECORD,
    Arithmetic,
    Claim,
    Contention,
    Events,
    Neighbour,
    Neighbourhood,
    Past,
    Queue,
    Sample,
    Share,
    Stream,
    UnderWay,
)
from tests.shares.card import US, Card, Event, Process, Work

LOOK_EVERY: Final = 50 * US
PENDING, PASSED = 0, 1
ASK_AFTER_GAP: Final = 2

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
    """What its processes share: the entry in the region, and the claim that neighbours read."""

    share: Share
    arithmetic: Arithmetic
    card: Card
    reading: Reading
    meets: list[Container]
    """The containers that tell each other what they want, this one among them; empty: it tells nobody."""
    entry: layout.RegionCard = field(default_factory=layout.RegionCard)
    claim: Claim = field(default_factory=Claim)
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.at = ctypes.pointer(self.entry)

    def under_way(self) -> UnderWay:
        return UnderWay(
            sum(each.in_flight for each in self.processes), sum(each.unknown for each in self.processes)
        )

    def numbers(self) -> set[int]:
        return {self.card.processes.index(each) for each in self.processes}


class Throttle:
    """One process's launches, as throttle.c lets them go."""

    def __init__(self, process: Process, box: Container, card: Card, latency: Callable[[], float]) -> None:
        self._process, self._box, self._card, self._latency = process, box, card, latency
        self._queue, self._past, self._beside = Queue(), Past(), Neighbourhood()
        self._events: list[Event] = []
        self._calls = Events(
            CREATE(self._create), RECORD(self._record), QUERY(self._query), ELAPSED(self._elapsed)
        )
        self._looked = 0
        self._told_until = 0
        if box.meets:
            self._tell(waits=False)

    # -- the driver's events, numbered from 1

    def _create(self) -> int:
        self._events.append(Event())
        return len(self._events)

    def _record(self, event: int, stream: object) -> bool:
        marked = self._events[event - 1] = Event()
        number = stream.contents.handle or 0  # type: ignore[attr-defined]
        self._process.stream(number).append(Work(0, marked))
        self._card.advance(self._card.now)
        return True

    def _query(self, event: int) -> int:
        return PASSED if self._events[event - 1].at >= 0 else PENDING

    def _elapsed(self, start: int, end: int, ns: object) -> bool:
        ns[0] = int(max(self._events[end - 1].at - self._events[start - 1].at, 0))  # type: ignore[index]
        return True

    # -- launching

    def launch(self, own_ns: float, key: int = 0, stream: int = 0) -> Steps:
        if self._box.share.weight < 100:
            where, whole_key = Stream(1, stream, False), (key + 1) << 32 | (key + 1)
            yield from self._wait(where, whole_key)
            batch = self._box.arithmetic.begin(
                self._queue, self._calls, where, whole_key, int(self._card.now)
            )
            if not batch:
                estimate = self._box.arithmetic.estimate(self._queue, whole_key)
                self._box.arithmetic.spend(self._box.at, self._box.share, estimate)
            self._show()
            if self._beside.count and self._told_until < self._card.now + self._queue.in_flight_ns:
                self._tell(waits=False)
            yield US
            self._process.stream(stream).append(Work(own_ns))
            if batch:
                self._box.arithmetic.end(batch, self._calls, True)
        else:
            self._process.stream(stream).append(Work(own_ns))
        yield 4 * US

    def _wait(self, stream: Stream, key: int) -> Steps:
        box, began = self._box, self._card.now
        self._look(waits=False)
        if box.arithmetic.is_divided(box.at):
            self._learn()
        while wait := self._must_wait(stream, key, int(self._card.now - began)):
            self._look(waits=True)
            yield int(wait + self._latency())
            self._look(waits=True)
            self._learn()

    def look_now(self) -> None:
        self._look(waits=True)

    def _must_wait(self, stream: Stream, key: int, waited: int) -> int:
        work, box = self._box.under_way(), self._box
        met = Contention(int(self._card.now), waited, work.ns, work.unknown, ctypes.pointer(self._beside))
        return int(box.arithmetic.wait(self._queue, box.at, box.share, met, stream, key))

    def _show(self) -> None:
        self._process.in_flight, self._process.unknown = self._queue.in_flight_ns, self._queue.unknown

    def _look(self, *, waits: bool) -> None:
        now, box, c = int(self._card.now), self._box, self._box.arithmetic
        if not waits and now - self._looked < LOOK_EVERY:
            return
        others = [c.told(each.claim, now) for each in box.meets if each is not box and each.claim.magic]
        c.update(self._beside, box.at, now, (Neighbour * max(len(others), 1))(*others), len(others))
        part, finished = c.own_part(box.at, now, self._beside), self._queue.finished_ns
        busy = c.look(self._queue, self._calls, now, waits, part)
        if busy:
            c.charge(box.at, box.share, busy, part)
            self._beside.own_busy_ns += busy
        if self._queue.finished_ns != finished:
            box.entry.finished_at_ns = now
        self._looked = now
        self._show()
        if self._queue.count or busy:
            c.stay(box.at, now if self._queue.count else self._queue.covered_ns)
        c.note(self._past, box.at, now)
        if waits:
            c.stay(box.at, now)
        elif not box.under_way().ns:
            c.wake(box.at, now, self._beside)
        if box.meets:
            self._tell(waits=waits)

    def _tell(self, *, waits: bool) -> None:
        box, now = self._box, int(self._card.now)
        box.claim = box.arithmetic.claim(
            box.at, box.share, self._beside, now, box.under_way(), self._queue.covered_ns, waits
        )
        self._told_until = box.claim.wants_until_ns

    def _learn(self) -> None:
        now, box = int(self._card.now), self._box
        how = box.arithmetic.ask(box.at, now, now // US)
        newest = self._card.newest_sample()
        if not how or not newest or newest.until // US == box.entry.sampled_us:
            return
        sample = Sample(newest.until // US, *box.reading(newest.percents, box.numbers()))
        if how == ASK_AFTER_GAP and self._beside.count:
            sample.own_percent = 0
        in_flight = box.under_way().ns
        box.arithmetic.learn(box.at, box.share, now, in_flight, self._past, sample, newest.until, how)
