"""A container's launches in virtual time, as throttle.c lets them go (native/tests/throttle_model.c)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

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
    """What its processes share: the entry in the region, and the claim that neighbours read."""

    share: Share
    arithmetic: Arithmetic
    card: Card
    reading: Reading = as_it_is
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = self.arithmetic.throttle
        self.at: int = model.container_new(self.share.weight, self.share.cap, self.share.interactive)
        self.entry = layout.RegionCard.from_address(self.at)
        weakref.finalize(self, model.container_free, self.at)

    def meet(self, others: list[Container]) -> None:
        """They tell each other what they want."""
        for each in others:
            self.arithmetic.throttle.container_meet(self.at, each.at)

    def under_way_ns(self) -> int:
        return int(self.arithmetic.throttle.container_under_way_ns(self.at))


class Throttle:
    """One process's launches."""

    def __init__(
        self,
        process: Process,
        box: Container,
        latency: Callable[[], float],
        preempted: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._process, self._box, self._card = process, box, box.card
        self._latency, self._preempted = latency, preempted
        self._model = box.arithmetic.throttle
        self._at: int = self._model.new(box.at, box.card.at, process.number)
        box.processes.append(process)
        self.launches = self.cleared = self.untimed = 0
        process.awaited = lambda: self._model.awaited(self._at)

    def launch(self, own_ns: float, key: int = 0, stream: int = 0) -> Steps:
        if self._box.share.weight < 100:
            model, at, whole_key = self._model, self._at, (key + 1) << 32 | (key + 1)
            self.launches += 1
            untimed = model.goes_untimed(at, whole_key)
            if not untimed and model.is_cleared(at, whole_key):
                self.cleared += 1
            elif not untimed and not (untimed := model.arrives_alone(at, whole_key)):
                yield from self._wait(stream, whole_key)
            self.untimed += untimed
            batch = None if untimed else model.begin(at, stream, whole_key)
            yield int(US + self._preempted())
            self._process.launch(own_ns, stream)
            model.end(at, batch, stream, whole_key)
        else:
            self._process.launch(own_ns, stream)
        yield 4 * US

    def _wait(self, stream: int, whole_key: int) -> Steps:
        model, at, began = self._model, self._at, self._card.now
        if how := model.arrive(at):
            self._learn(how)
        while wait := model.wait_ns(at, stream, whole_key, int(self._card.now - began)):
            yield int(wait + self._latency())
            if how := model.wake(at):
                self._learn(how)

    def look_now(self) -> None:
        self._model.look(self._at, True)

    def claim(
        self, own_ns: int, *, waits: bool = False, virtual_ns: int = 0, weight: int | None = None
    ) -> None:
        """Tell the neighbours of work for so long, or of a wish to work, whether it is true or not."""
        self._model.claim(self._at, own_ns, waits, virtual_ns, weight or self._box.share.weight)

    def forget(self) -> None:
        """The process has died, and the others of its container have found out."""
        self._model.forget(self._at)

    def _learn(self, how: int) -> None:
        newest, mine = self._card.newest_sample(), {each.number for each in self._box.processes}
        self._model.learn(self._at, how, newest.until, *self._box.reading(newest.percents, mine))
