"""One cluster that things go wrong in: bouts of faults, and after each the time until all is right again."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.checker import Wrong
from tests.chaos.faults import FAULTS
from tests.chaos.fleets import FLEETS
from tests.chaos.world import ChaosWorld

BOUT = 150
"""Faults before the world is left in peace, so that it can be seen to recover."""
PATIENCE_S = 300.0
"""Virtual seconds of peace after which something is stuck."""
LEDGER_PATIENCE_S = 35.0
"""The same for what a replica knows: a watch that failed often pauses for up to 30 s, and then lists."""


MOST_FAILED = 5
"""Pods in a minute that a controller loses to a kubelet that refuses them all."""


class Runaway(AssertionError):
    """Pods are sent again and again where kubelet refuses them."""


class Stuck(AssertionError):
    """Left in peace, the world does not come right."""


@dataclass
class Told:
    """What was done and seen; times are virtual seconds. Sums of several stories are `+`."""

    faults: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    checks: int = 0
    bouts: int = 0
    pods: int = 0
    binds: int = 0
    rejected: int = 0
    longest_wrong_s: dict[str, float] = field(default_factory=dict)  # while faults went on
    longest_recovery_s: dict[str, float] = field(default_factory=dict)  # after they had ended

    def add(self, other: Told) -> None:
        self.faults += other.faults
        for name in ("virtual_s", "checks", "bouts", "pods", "binds", "rejected"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in (
            (self.longest_wrong_s, other.longest_wrong_s),
            (self.longest_recovery_s, other.longest_recovery_s),
        ):
            for what, seconds in theirs.items():
                mine[what] = max(mine.get(what, 0.0), seconds)


class Story:
    """The same seed is the same story. `diary` is the last that happened, for who wants to know why."""

    def __init__(self, folder: Path, seed: int, faults: int, fleet: str = "") -> None:
        self.dice = random.Random(seed)
        random.seed(seed)  # of the pauses before what failed is tried again
        self.fleet = fleet or list(FLEETS)[seed % len(FLEETS)]
        self.world = ChaosWorld(folder, seed, FLEETS[self.fleet])
        self.told = Told()
        self.diary: list[str] = []
        self._wanted = faults
        self._since_s: dict[Wrong, float] = {}
        self._seen: set[str] = set()
        self._bound: set[str] = set()

    def play(self) -> Told:
        """Raises `Breach` or `Stuck`, or what a process died of."""
        names, weights = list(FAULTS), [weight for weight, _ in FAULTS.values()]
        try:
            while (done := self.told.faults.total()) < self._wanted:
                for _ in range(min(BOUT, self._wanted - done)):
                    self._one_fault(names, weights)
                self._recover()
                if self.dice.random() < 0.25:
                    failed = self.world.replaced_where_refused(60.0)
                    if failed > MOST_FAILED:
                        raise Runaway(f"{failed} pods in a minute were sent where kubelet refuses all")
                    self._recover()
        finally:
            self.told.virtual_s += self.world.loop.time()
            self.told.pods, self.told.binds = len(self._seen), len(self._bound)
            self.told.rejected = len(self.world.rejections)
            self.world.close()
            gc.unfreeze()  # what each extender froze that began here
        return self.told

    def _one_fault(self, names: list[str], weights: list[float]) -> None:
        if self.dice.random() < 0.6:  # else at once after the one before
            self.world.step()
            self._check(self.told.longest_wrong_s)
        while True:
            (name,) = self.dice.choices(names, weights)
            if FAULTS[name][1](self.world):
                break
            self.world.step()
        self.told.faults[name] += 1
        self.diary = [*self.diary[-40:], f"{self.world.loop.time():.2f} {name}"]
        self._check(self.told.longest_wrong_s)

    def _check(self, longest: dict[str, float], ledgers: Set[Wrong] = frozenset()) -> set[Wrong]:
        wrong, now_s = self.world.wrong() | ledgers, self.world.loop.time()
        self.told.checks += 1
        self._since_s = {each: self._since_s.get(each, now_s) for each in wrong}
        for each, since_s in self._since_s.items():
            longest[each.what] = max(longest.get(each.what, 0.0), now_s - since_s)
        for pod in self.world.pods():
            self._seen.add(pod["metadata"]["uid"])
            if "nodeName" in pod["spec"]:
                self._bound.add(pod["metadata"]["uid"])
        return wrong

    def _recover(self) -> None:
        """Nothing goes wrong from now on: how long until nothing is wrong any more, for two looks."""
        self.told.bouts += 1
        self.world.everybody_lives()
        began_s = self.world.loop.time()
        self._since_s = {}
        while True:
            self.world.work_calmly()
            ledgers = self.world.wrong_ledgers()
            wrong = self._check(self.told.longest_recovery_s, ledgers)
            if not wrong:
                return
            patience_s = LEDGER_PATIENCE_S if ledgers else PATIENCE_S
            if self.world.loop.time() - began_s > patience_s:
                raise Stuck(f"after {patience_s:g} s of peace: {sorted(map(str, wrong))}")


def play(folder: Path, seed: int, faults: int, fleet: str = "") -> Told:
    """One story; what goes wrong in it tells how to play it again. The seed chooses an unnamed fleet."""
    story = Story(folder, seed, faults, fleet)
    began = time.monotonic()
    try:
        return story.play()
    except BaseException as error:
        error.add_note(
            f"seed {seed} ({story.fleet}), fault {story.told.faults.total()} of {faults}, "
            f"after {time.monotonic() - began:.0f} s:\n  " + "\n  ".join(story.diary)
        )
        raise
