"""A card in virtual time: processes with work take turns, evenly at every moment or in slices.

A sample every sixth of a second says in whole percents who worked how long. The card is in
native/tests/card_model.c: there a second of it costs a twentieth of what it does in Python.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.shares.arithmetic import MOST_PROCESSES, Arithmetic

US: Final = 1_000
MS: Final = 1_000_000
SECOND: Final = 1_000_000_000
STEP: Final = 50 * MS
EPOCH: Final = 1_000 * SECOND


@dataclass(frozen=True)
class Taken:
    """One sample: until when, and the percent of each process that was at work."""

    until: int
    percents: Mapping[int, int]


class Card:
    """`slice_ns`: how long a turn is; 0: evenly at every moment. `sample_age_ns`: how late samples come.

    `switch_ns`: from one process to another, in which nobody computes and no sample counts anybody.
    """

    def __init__(
        self, arithmetic: Arithmetic, slice_ns: int = 0, sample_age_ns: int = 0, switch_ns: int = 0
    ) -> None:
        self.model = arithmetic.card
        self.at: int = self.model.new(slice_ns, switch_ns, sample_age_ns)
        self._now = ctypes.c_double.from_address(self.at)
        weakref.finalize(self, self.model.free, self.at)

    @property
    def now(self) -> float:
        return self._now.value

    def advance(self, to: float) -> int | None:
        """Up to that time, or until a process that is watched has nothing left; answers which."""
        ended: int = self.model.advance(self.at, to)
        return None if ended < 0 else ended

    def newest_sample(self) -> Taken:
        """The newest that can be had: they may come late."""
        percents = (ctypes.c_int32 * MOST_PROCESSES)()
        until = self.model.sample(self.at, percents)
        return Taken(until, {number: each for number, each in enumerate(percents) if each >= 0})


@dataclass(eq=False)
class Process:
    """One process on the card, and what its programs note."""

    card: Card
    delays: list[float] = field(default_factory=list)
    done_on: dict[int, int] = field(default_factory=dict)
    """How long programs waited; how many kernels a stream had."""
    awaited: Callable[[], Iterator[int | None]] = lambda: iter(())
    """What the library does when a program comes back from waiting for the card."""

    def __post_init__(self) -> None:
        self.number: int = self.card.model.add_process(self.card.at)

    def launch(self, own_ns: float, stream: int) -> None:
        self.card.model.launch(self.card.at, self.number, own_ns, stream)

    def has_work(self) -> bool:
        return bool(self.card.model.has_work(self.card.at, self.number))

    def has_work_on(self, stream: int) -> bool:
        return bool(self.card.model.has_work_on(self.card.at, self.number, stream))

    def watch(self) -> None:
        """Have `Card.advance` end when nothing is left."""
        self.card.model.watch(self.card.at, self.number)

    def die(self) -> None:
        self.card.model.kill(self.card.at, self.number)

    @property
    def done(self) -> float:
        return float(self.card.model.done(self.card.at, self.number))

    def series(self) -> list[float]:
        """`done` every 50 ms."""
        steps = ctypes.c_size_t()
        points = self.card.model.series(self.card.at, self.number, ctypes.byref(steps))
        return list(points[: steps.value])
