"""A card: processes with work take turns, evenly at every moment or in time slices.

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
    """Its queue, and what it has done."""

    queue: deque[Work] = field(default_factory=deque)
    done: float = 0.0
    in_sample: float = 0.0
    in_flight: int = 0
    alive: bool = True
    watched: bool = False
    series: list[float] = field(default_factory=list)


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
            ended = next((each for each in self.processes if each.watched and not each.queue), None)
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
        each_ns = min((ends - self.now) / len(running), *(each.queue[0].left for each in running))
        for process in running:
            process.queue[0].left -= each_ns
            process.done += each_ns
            process.in_sample += each_ns
        self.now = self.now + each_ns * len(running)
        if ends - self.now < 0.5:
            self.now = ends

    def _on_turn(self) -> list[Process]:
        busy = [each for each in self.processes if each.queue]
        if not self._slice or not busy:
            return busy
        current = self.processes[self._turn]
        if self.now >= self._turn_ends or not current.queue:
            order = self.processes[self._turn + 1 :] + self.processes[: self._turn + 1]
            current = next(each for each in order if each.queue)
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
    while process.queue and process.queue[0].left <= 0.5:
        work = process.queue.popleft()
        if work.event:
            work.event.at = now
