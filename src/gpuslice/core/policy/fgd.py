"""Fragmentation gradient descent, "Beware of Fragmentation" (USENIX ATC '23): the policy to beat.

The fragmentation of a node is the free GPU that a typical pod cannot use, averaged over the typical pods:
all of it if the pod does not fit (pods without GPU never use any), otherwise what is left on cards too full
for it. A pod goes where this grows least; scores are whole numbers of 0…100.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gpuslice.core.policy.fit import card_fits
from gpuslice.core.policy.fleet import Flags, Fleet, Floats, Ints, Rows, Shape
from gpuslice.core.policy.learned_workload import LearnedWorkload
from gpuslice.core.policy.ranking import Policy, RankCache, keys_of

POPULARITY = 0.95  # of all pods: what the typical pods stand for
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Typical:
    """The typical pods that request GPU, one column each; equal (units, cards) share a piece.

    `chance`: fraction of all typical pods. `allowed`: [model code, column]. `of_piece`: [column, piece], 1 if
    the column requests this piece. `units` and `cards`: of each piece.
    """

    chance: Floats
    cpu_milli: Floats
    allowed: Flags
    of_piece: Floats
    units: Ints
    cards: Ints


def typical_pods(counts: Mapping[Shape, float], fleet: Fleet) -> Typical:
    """The most frequent shapes, ignoring memory, that together cover 95 % of the pods."""
    merged: dict[Shape, float] = {}
    for shape, count in counts.items():
        plain = Shape(shape.units, shape.cards, shape.cpu_milli, 0, shape.models)
        merged[plain] = merged.get(plain, 0.0) + count
    ordered = sorted(merged.items(), key=lambda item: -item[1])
    running = np.cumsum([0.0, *(count for _, count in ordered)])
    kept = ordered[: int(np.searchsorted(running, POPULARITY * running[-1] - ROUNDING))]
    total = sum(count for _, count in kept)
    asking = [(shape, count / total) for shape, count in kept if shape.cards]
    pieces = sorted({(shape.units, shape.cards) for shape, _ in asking})
    of_piece = np.zeros((len(asking), len(pieces)))
    allowed = np.ones((len(fleet.models), len(asking)), dtype=np.bool_)
    for column, (shape, _) in enumerate(asking):
        of_piece[column, pieces.index((shape.units, shape.cards))] = 1.0
        models = fleet.allowed(shape.models)
        if models is not None:
            allowed[:, column] = models
    return Typical(
        chance=np.array([chance for _, chance in asking]),
        cpu_milli=np.array([float(shape.cpu_milli) for shape, _ in asking]),
        allowed=allowed,
        of_piece=of_piece,
        units=np.array([units for units, _ in pieces], dtype=np.int64),
        cards=np.array([cards for _, cards in pieces], dtype=np.int64),
    )


class Fgd(Policy):
    """Least growth of fragmentation; within a node, the card where it grows least, the first among equals."""

    name: ClassVar[str] = "fgd"

    def __init__(self, fleet: Fleet, counts: Mapping[Shape, float] | None = None) -> None:
        """`counts`: the number of pods of each shape, if known; otherwise it is learned."""
        super().__init__(fleet)
        self._known = counts
        self._mix = LearnedWorkload()
        self._cache = RankCache(fleet, _Gradient(fleet, typical_pods({}, fleet)))
        self._cards_version = -1

    def cache(self) -> RankCache:
        learns = self._known is None and self._mix.due
        if learns or self._cards_version != self.fleet.cards_version:
            self._cards_version = self.fleet.cards_version
            counts = self._mix.renew(self.fleet) if self._known is None else self._known
            self._cache = RankCache(self.fleet, _Gradient(self.fleet, typical_pods(counts, self.fleet)))
        return self._cache

    def arrived(self, shape: Shape) -> None:
        self._mix.arrived(shape)


class _Gradient:
    """Ranks by the growth of fragmentation for a given set of typical pods."""

    def __init__(self, fleet: Fleet, typical: Typical) -> None:
        self.fleet = fleet
        self._typical = typical
        cards = int(fleet.cards.sum())
        self._card_units = float(fleet.size.sum()) / cards if cards else 1.0  # of one card, on average

    def rank(self, shape: Shape, rows: Rows) -> tuple[Ints, Ints]:
        left = self.fleet.left[rows].astype(np.int64)
        before = self._fragmentation(left, self._chances(rows, 0))
        after_chances = self._chances(rows, shape.cpu_milli)
        fits = card_fits(self.fleet, shape, rows)
        if shape.cards != 1:
            after = self._fragmentation(_without(left, shape, fits), after_chances)
            return keys_of(-self._score(before - after), rows), np.full(len(rows), -1)
        # skip cards with as much left as an earlier fitting card in the same row: they would score the same
        same = (left[:, :, None] == left[:, None, :]) & fits[:, None, :]
        same &= np.tri(left.shape[1], k=-1, dtype=np.bool_)
        flags: Flags = same.any(axis=2)
        line, slot = np.nonzero(fits & ~flags)
        # fragmentation after `units` are taken from card `slot` of `line`, for each such pair
        units = shape.units
        total, below, count = self._pieces(left)
        old = left[line, slot][:, None]
        new = old - units
        old_small, new_small = old < self._typical.units, new < self._typical.units
        below = below[line] - old * old_small + new * new_small
        count = count[line] + old_small - new_small.astype(np.int64)
        after = _expected(total[line] - units, below, count >= self._typical.cards, after_chances[line])
        score = np.full(left.shape, -1)
        score[line, slot] = self._score(before[line] - after)
        best = score.argmax(axis=1)
        return keys_of(-score[np.arange(len(rows)), best], rows), best

    def _score(self, gain: Floats) -> Ints:
        score = 100.0 / (1.0 + np.exp(-gain / self._card_units))
        return np.floor(score + ROUNDING).astype(np.int64)

    def _chances(self, rows: Rows, cpu_milli: int) -> Floats:
        """[row, piece]: fraction of the typical pods that request this piece and that model and CPU admit."""
        typical, fleet = self._typical, self.fleet
        fits = typical.cpu_milli <= (fleet.cpu_left[rows] - cpu_milli)[:, None]
        fits &= typical.allowed[fleet.model[rows]]
        chances: Floats = (fits * typical.chance) @ typical.of_piece
        return chances

    def _fragmentation(self, left: Ints, chances: Floats) -> Floats:
        """Free units of each row that typical pods cannot use."""
        total, below, count = self._pieces(left)
        return _expected(total, below, count >= self._typical.cards, chances)

    def _pieces(self, left: Ints) -> tuple[Ints, Ints, Ints]:
        """Free units [row]; those on cards too full for a piece, and the number of cards that are not [row,
        piece].
        """
        small = left[:, :, None] < self._typical.units
        below = (left[:, :, None] * small).sum(axis=1)
        return left.sum(axis=1), below, left.shape[1] - small.sum(axis=1)


def _expected(total: Ints, below: Ints, enough: Flags, chances: Floats) -> Floats:
    usable = np.where(enough, total[:, None] - below, 0)
    expected: Floats = total - (usable * chances).sum(axis=1)
    return expected


def _without(left: Ints, shape: Shape, fits: Flags) -> Ints:
    """What is left after the pod took its cards: the fullest ones that fit, first."""
    if not shape.cards:
        return left
    order = np.argsort(np.where(fits, left, np.iinfo(np.int64).max), axis=1, kind="stable")
    chosen = order[:, : shape.cards]
    after = left.copy()
    np.put_along_axis(after, chosen, np.take_along_axis(left, chosen, axis=1) - shape.units, axis=1)
    return after
