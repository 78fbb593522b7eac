"""Several containers on one card for a while, and what each was given."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.shares.arithmetic import Arithmetic, Share
from tests.shares.card import EPOCH, MS, SECOND, STEP, US, Card, Process
from tests.shares.programs import Program
from tests.shares.throttle import Container, Reading, Steps, Throttle, as_it_is


@dataclass(frozen=True)
class Party:
    """One container of a run: its share and what each of its processes does."""

    share: int
    programs: tuple[Program, ...]
    reading: Reading = as_it_is
    cap: int | None = None
    """The most it may use, percent; None: its share."""
    interactive: bool = False


def party(share: int, *programs: Program) -> Party:
    return Party(share, programs)


def fair(share: int, *programs: Program, interactive: bool = False) -> Party:
    """What nobody uses is lent to it."""
    return Party(share, programs, cap=100, interactive=interactive)


@dataclass
class Seen:
    """What the container was given: the percent of the card in every 50 ms, and what it was charged for."""

    share: int
    series: list[float]
    processes: list[Process]
    charged_ns: int

    def windows(self, from_s: float, length_s: float = 1.0, to_s: float = 1e9) -> list[float]:
        """Percent of the card in each window of this length that begins at `from_s` or later, every 50 ms."""
        width = round(length_s * SECOND / STEP)
        first, last = (
            round(from_s * SECOND / STEP),
            min(len(self.series), round(to_s * SECOND / STEP)) - width,
        )
        points = [0.0, *self.series]
        return [(points[at + width] - points[at]) / (width * STEP) * 100 for at in range(first, last + 1)]

    def mean(self, from_s: float, to_s: float = 1e9) -> float:
        last = min(len(self.series), round(to_s * SECOND / STEP))
        first = round(from_s * SECOND / STEP)
        points = [0.0, *self.series]
        return (points[last] - points[first]) / ((last - first) * STEP) * 100


def wakes_late(chance: random.Random) -> Callable[[], float]:
    """How late a sleep ends: mostly some sixty microseconds, now and then milliseconds."""
    return lambda: 60 * US * chance.expovariate(1.0) + (chance.random() < 0.01) * 3 * MS * chance.random()


def preempts(chance: random.Random, part: float) -> Callable[[], float]:
    """Of so many launches one loses its core for up to 10 ms when it has been told of and is not made yet."""
    return lambda: 10 * MS * chance.random() if part and chance.random() < part else 0.0


def steps(chance: random.Random) -> Callable[[], float]:
    """From one step of the library to the next: some 50 ns; after one in 5,000 the core is another's."""
    return lambda: 1 + 50 * chance.expovariate(1.0) + (chance.random() < 2e-4) * 3 * MS * chance.random()


def play(
    arithmetic: Arithmetic,
    parties: Sequence[Party],
    seconds: float,
    *,
    slice_ns: int = 0,
    switch_ns: int = 0,
    sample_age_ns: int = 0,
    seed: int = 0,
    meet: bool = False,
    preempted: float = 0.0,
    interleaved: bool = False,
) -> list[Seen]:
    """All containers at once on one card for so long. `meet`: they tell each other what they want.

    `preempted`: the part of launches before which the thread loses its core: a busy host. `interleaved`:
    threads and processes get in between each other's steps within the library, too, and now and then one
    loses its core there.
    """
    chance = random.Random(seed)
    card = Card(arithmetic, slice_ns, sample_age_ns, switch_ns)
    boxes: list[Container] = []
    threads = []
    for each in parties:
        share = Share(each.share, each.cap or each.share, each.interactive)
        boxes.append(Container(share, arithmetic, card, each.reading))
    for box in boxes:
        box.meet(boxes if meet else [])
    for each, box in zip(parties, boxes, strict=True):
        for program in each.programs:
            process = Process(card)
            between = steps(chance) if interleaved else None
            throttle = Throttle(process, box, wakes_late(chance), preempts(chance, preempted), between)
            threads.append((process, program(throttle, process, card, chance)))
    _run(card, threads, EPOCH + int(seconds * SECOND))
    return [
        Seen(
            box.share.weight,
            [sum(at) for at in zip(*(p.series() for p in box.processes), strict=True)],
            box.processes,
            box.entry.charged_ns,
        )
        for box in boxes
    ]


def _run(card: Card, threads: list[tuple[Process, Steps]], end: int) -> None:
    waiting = [(float(EPOCH + number), number) for number in range(len(threads))]
    behind: list[Steps] = [
        iter(()) for _ in threads
    ]  # what the library does after a wait, before the program goes on
    heapq.heapify(waiting)
    while True:
        due = waiting[0][0] if waiting else end
        ended = card.advance(min(due, end))
        if card.now >= end and ended is None:
            return
        number = heapq.heappop(waiting)[1] if ended is None else ended
        process, steps = threads[number]
        if ended is not None:
            behind[number] = process.awaited()
        step = next(behind[number], -1)
        step = next(steps, -1) if step == -1 else step
        if step is None:
            process.watch()
        elif step >= 0:
            heapq.heappush(waiting, (card.now + step, number))
