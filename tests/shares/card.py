"""A card: processes with work take turns, evenly at every moment or in slices; streams run side by side.

A sample every sixth of a second says in whole percents who worked how long.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

US: Final = 1_000
MS: Final = 1_000_000
SECOND: Final = 1_000_000_000
SAMPLE: Final = SECOND // 6
STEP: Final = 50 * MS
EPOCH: Final = 1_000 * SECOND


@dataclass
class Event:
    at: float = -1.0


@dataclass
class Work:
    left: float
    event: Event | None = None


@dataclass(eq=False)
class Process:
    """The work of its streams, which the card does at the same time, and what it has done."""

    streams: dict[int, deque[Work]] = field(default_factory=dict)
    done: float = 0.0
    in_sample: float = 0.0
    in_flight: int = 0
    unknown: int = 0
    alive: bool = True
    watched: bool = False
    series: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    done_on: dict[int, int] = field(default_factory=dict)
    """What programs note: how long they waited, how many kernels a stream had."""

    def stream(self, number: int) -> deque[Work]:
        return self.streams.setdefault(number, deque())

    def heads(self) -> list[Work]:
        """What runs while the process has its turn: it is at work once, however many kernels run."""
        return [queue[0] for queue in self.streams.values() if queue]

    def has_work(self) -> bool:
        return any(self.streams.values())


@dataclass
class Taken:
    """One sample: until when, and each process's percent."""

    until: int
    percents: dict[int, int]


class Card:
    """Processes with work take turns: evenly at every moment, or for `slice_ns` each."""

    def __init__(self, slice_ns: int = 0, sample_age_ns: int = 0) -> None:
        self._sample_age = sample_age_ns
        self.now = float(EPOCH)
        self.processes: list[Process] = []
        self.samples: deque[Taken] = deque(maxlen=16)
        self._slice = slice_ns
        self._turn = 0
        self._turn_ends = 0.0
        self._sample_ends = EPOCH + SAMPLE
        self._step_ends = EPOCH + STEP

    def newest_sample(self) -> Taken | None:
        """The newest that can be had: they may come late."""
        past = (each for each in reversed(self.samples) if each.until <= self.now - self._sample_age)
        return next(past, None)

    def advance(self, to: float) -> Process | None:
        """Up to that time, or to the moment at which a process that is watched has nothing left."""
        while True:
            for process in self._on_turn():
                pass_events(process, self.now)
            ended = next((each for each in self.processes if each.watched and not each.has_work()), None)
            if ended or self.now >= to:
                return ended
            self._run(min(to, self._sample_ends, self._step_ends))
            self._take_notes()

    def _run(self, until: float) -> None:
        running = self._on_turn()
        if not running:
            self.now = until
            return
        ends = min(until, self._turn_ends) if self._slice else until
        each_ns = min(
            (ends - self.now) / len(running), *(work.left for each in running for work in each.heads())
        )
        for process in running:
            for work in process.heads():
                work.left -= each_ns
            process.done += each_ns
            process.in_sample += each_ns
        self.now = self.now + each_ns * len(running)
        if ends - self.now < 0.5:
            self.now = ends

    def _on_turn(self) -> list[Process]:
        busy = [each for each in self.processes if each.has_work()]
        if not self._slice or not busy:
            return busy
        current = self.processes[self._turn]
        if self.now >= self._turn_ends or not current.has_work():
            order = self.processes[self._turn + 1 :] + self.processes[: self._turn + 1]
            current = next(each for each in order if each.has_work())
            self._turn = self.processes.index(current)
            self._turn_ends = self.now + self._slice
        return [current]

    def _take_notes(self) -> None:
        if self.now >= self._sample_ends:
            percents = {
                number: round(100 * each.in_sample / SAMPLE)
                for number, each in enumerate(self.processes)
                if each.in_sample
            }
            self.samples.append(Taken(self._sample_ends, percents))
            for each in self.processes:
                each.in_sample = 0
            self._sample_ends += SAMPLE
        if self.now >= self._step_ends:
            for each in self.processes:
                each.series.append(each.done)
            self._step_ends += STEP


def pass_events(process: Process, now: float) -> None:
    for queue in process.streams.values():
        while queue and queue[0].left <= 0.5:
            work = queue.popleft()
            if work.event:
                work.event.at = now
