"""A container's launches in virtual time: the library's own throttle.c, one copy of it for each process.

What it calls is in native/tests/virtual_process.c and virtual_driver.c.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from gpuslice.adapters.region import layout
from tests.shares.arithmetic import Arithmetic, Share
from tests.shares.card import US, Card, Process

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
    """What its processes share: the region, and the claim that neighbours read."""

    share: Share
    arithmetic: Arithmetic
    card: Card
    reading: Reading = as_it_is
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = self.arithmetic.throttle
        self.at: int = model.container_new(self.share.weight, self.share.cap, self.share.interactive)
        self.entry = layout.RegionCard.from_address(model.container_entry(self.at))
        weakref.finalize(self, model.container_free, self.at)

    def meet(self, others: list[Container]) -> None:
        """They tell each other what they want."""
        for each in others:
            self.arithmetic.throttle.container_meet(self.at, each.at)

    def under_way_ns(self) -> int:
        return int(self.arithmetic.throttle.container_under_way_ns(self.at))


class Stop(IntEnum):
    """Why a call into the library comes back."""

    RETURNS = 0
    SLEEPS = 1
    SAMPLES = 2
    LAUNCHES = 3
    STEPS = 4


class Throttle:
    """One process's launches.

    `latency`: how late a sleep ends. `preempted`: how long the thread loses its core before the driver has a
    launch. `between`: the time from one step within the library to the next, when others may get in between;
    None: they cannot.
    """

    def __init__(
        self,
        process: Process,
        box: Container,
        latency: Callable[[], float],
        preempted: Callable[[], float] = lambda: 0.0,
        between: Callable[[], float] | None = None,
    ) -> None:
        self._process, self._box, self._card = process, box, box.card
        self._latency, self._preempted, self._between = latency, preempted, between
        self._model = box.arithmetic.throttle
        self._at: int = self._model.new(box.at, box.card.at, process.number, between is not None)
        box.processes.append(process)
        self.launches = self.cleared = self.untimed = 0
        process.awaited = self.awaited

    def launch(self, own_ns: float, key: int = 0, stream: int = 0) -> Steps:
        self.launches += 1
        yield from self._run(b"enter_launch", (key + 1) << 32 | (key + 1), stream, own_ns)
        yield 4 * US

    def awaited(self) -> Steps:
        """The program comes back from waiting for the card."""
        return self._run(b"enter_awaited")

    def look_now(self) -> None:
        for _ in self._run(b"enter_hold"):
            pass

    def _run(self, name: bytes, key: int = 0, stream: int = 0, own_ns: float = 0) -> Steps:
        model, sleep_ns = self._model, ctypes.c_uint64()
        call = model.call(self._at, name, key, stream, own_ns)
        try:
            while why := model.resume(call, sleep_ns):
                if why == Stop.SLEEPS:
                    yield int(sleep_ns.value + self._latency())
                elif why == Stop.SAMPLES:
                    newest, mine = self._card.newest_sample(), {each.number for each in self._box.processes}
                    model.answer(call, *self._box.reading(newest.percents, mine))
                elif why == Stop.LAUNCHES:
                    self.untimed += not model.timed(call)
                    self.cleared += model.cleared(call)
                    yield int(US + self._preempted())
                elif self._between:
                    yield int(self._between())
        finally:
            model.free(call)

    def claim(
        self, own_ns: int, *, waits: bool = False, virtual_ns: int = 0, weight: int | None = None
    ) -> None:
        """Tell the neighbours of work for so long, or of a wish to work, whether it is true or not."""
        self._model.claim(self._at, own_ns, waits, virtual_ns, weight or self._box.share.weight)

    def die(self) -> None:
        """The process is gone; the others of its container find out when they look for it."""
        self._process.die()
        self._model.die(self._at)
