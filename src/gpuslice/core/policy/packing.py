"""The policies that look only at the nodes: `binpack`, `spread`, `bestfit`.

`binpack` and `bestfit` are GPU packing and best fit of "Beware of Fragmentation" (USENIX ATC '23), with
scores truncated to whole numbers of 0…100 as in kube-scheduler.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from gpuslice.core.policy.fit import card_fits
from gpuslice.core.policy.fleet import AnyInts, Flags, Fleet, Ints, Rows, Shape
from gpuslice.core.policy.ranking import Policy, RankCache, keys_of

FULL_SCORE = 100
LARGEST = np.iinfo(np.int32).max


class NodePolicy(Policy):
    """A policy that ranks only by what the fleet holds."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._cache = RankCache(fleet, self, joins=self.joins)

    @abstractmethod
    def rank(self, shape: Shape, rows: Rows) -> tuple[Ints, Ints]:
        """See `Ranker`."""

    def cache(self) -> RankCache:
        return self._cache


class Binpack(NodePolicy):
    """Used cards before free cards of used nodes before free nodes; then whichever leaves least free."""

    name: ClassVar[str] = "binpack"

    def rank(self, shape: Shape, rows: Rows) -> tuple[Ints, Ints]:
        if not shape.cards:
            return keys_of(np.zeros(len(rows), dtype=np.int64), rows), np.full(len(rows), -1)
        left = self.fleet.left[rows].astype(np.int64)  # times a hundred, it would overflow 32 bits
        size = self.fleet.size[rows]
        fits = card_fits(self.fleet, shape, rows)
        order = np.argsort(np.where(fits, left, LARGEST), axis=1, kind="stable")[:, : shape.cards]
        # free units of each card that would be used
        percent = np.take_along_axis(left * 100 // np.maximum(size, 1), order, axis=1)
        to_open, free = (percent == 100).sum(axis=1), ((left == size) & (size > 0)).sum(axis=1)
        used = np.maximum(FULL_SCORE - percent.sum(axis=1) // 10, FULL_SCORE // 2)
        opened = np.maximum(FULL_SCORE // 2 - to_open, FULL_SCORE // 3)
        empty = np.maximum(FULL_SCORE // 3 - free, free)
        is_empty = free == self.fleet.cards[rows]
        score: Ints = np.where(is_empty, empty, np.where(to_open > 0, opened, used))
        return keys_of(-score, rows), order[:, 0].astype(np.int64)


class Spread(NodePolicy):
    """The node with the largest fraction of its GPU free, and there the card with most left."""

    name: ClassVar[str] = "spread"

    def rank(self, shape: Shape, rows: Rows) -> tuple[Ints, Ints]:
        left = self.fleet.left[rows]
        total = np.maximum(self.fleet.size[rows].sum(axis=1), 1)
        score = FULL_SCORE * left.sum(axis=1, dtype=np.int64) // total
        slot = np.argmax(np.where(card_fits(self.fleet, shape, rows), left, -1), axis=1)
        return keys_of(-score, rows), slot

    def several(self, shape: Shape, row: int) -> tuple[int, ...]:
        fits = np.flatnonzero(card_fits(self.fleet, shape, np.array([row]))[0])
        order = np.argsort(-self.fleet.left[row, fits], kind="stable")
        return self.best_joined(shape, row, fits[order])


class BestFit(NodePolicy):
    """The node with least CPU and GPU left after the pod, both as fractions of the largest node."""

    name: ClassVar[str] = "bestfit"

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._largest_version = -1
        self._largest_cpu, self._largest_card_units = 1.0, 1.0

    def rank(self, shape: Shape, rows: Rows) -> tuple[Ints, Ints]:
        left = self.fleet.left[rows]
        card_units = (left.sum(axis=1) - shape.total_units) / self._largest_card_units
        cpu = (self.fleet.cpu_left[rows] - shape.cpu_milli) / self._largest_cpu
        score = (1.0 - 0.5 * np.where(np.isfinite(cpu), cpu, 0.0) - 0.5 * card_units) * FULL_SCORE
        return keys_of(-score.astype(np.int64), rows), fullest_card(left, card_fits(self.fleet, shape, rows))

    def cache(self) -> RankCache:
        if self._largest_version != self.fleet.cards_version:
            self._largest_version = self.fleet.cards_version
            cpu = self.fleet.cpu_milli[np.isfinite(self.fleet.cpu_milli)]
            self._largest_cpu = max(1.0, float(cpu.max(initial=1.0)))
            self._largest_card_units = max(1.0, float(self.fleet.size.sum(axis=1).max(initial=1)))
            self._cache = RankCache(self.fleet, self)
        return self._cache


def fullest_card(left: AnyInts, fits: Flags) -> Ints:
    """The card with least left among those that fit; the lowest index among equals."""
    fullest: Ints = np.where(fits, left, LARGEST).argmin(axis=1)
    return fullest
