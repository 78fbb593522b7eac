"""What a slot kept for a pod of several cards is worth: more if slots are short or pods come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpuslice.core.policy.fleet import Flags, Fleet, Floats, Shape
from gpuslice.core.policy.layout import Layout

AMPLE, SHORT = 0.5, 0.75  # fraction of the existing slots that will be requested before the cluster is full
DEVIATIONS = 2.0  # slots are also short if no more are left than the expected pods and this many deviations
LEAST_SLOT_PRICE = 0.02  # of all slots together if they are ample; 1, all of their cards, if they are short
UNSEEN_SLOT_PRICE = 0.008  # used instead until pods of several cards are seen
MOST_SLOT_PRICE = 8.0  # × the slots' demand
TURNOVER_HALF_LIFE_ARRIVALS = 2_000


class Turnover:
    """How many pods left recently for each that was placed."""

    def __init__(self) -> None:
        self._arrivals = 0
        self._placed = 0.0
        self._departed = 0.0

    def arrived(self) -> None:
        self._arrivals += 1
        if self._arrivals % TURNOVER_HALF_LIFE_ARRIVALS == 0:
            self._placed /= 2
            self._departed /= 2

    def placed(self) -> None:
        self._placed += 1

    def departed(self) -> None:
        self._departed += 1

    @property
    def part(self) -> float:
        """0 while a cluster fills up, 1 if as many pods leave as come."""
        return min(1.0, self._departed / self._placed) if self._placed else 0.0


@dataclass(frozen=True, slots=True)
class SlotDemand:
    """The shapes of several cards.

    `part`: of all GPU requested; `weight`: of all these shapes together, each at its best kind. `holds`:
    [kind, shape] whether an empty node holds such a pod. `seen`: how much GPU they requested, relative to the
    prior's, at most 1.
    """

    shapes: Sequence[Shape]
    part: Floats
    holds: Flags
    weight: float
    seen: float

    def prices(self, fleet: Fleet, layout: Layout, turnover: float) -> Floats:
        """[shape] The factor by which its demand for slots is multiplied.

        If pods come and go, nodes are kept whole before slots are short: broken ones seldom become free.
        Ample slots cost less until such pods are seen: if only shares arrive, keeping nodes whole for the
        prior's pods would put shares together that leave holes for good.
        """
        short = (self.scarcity(fleet, layout) - AMPLE) / (SHORT - AMPLE)
        least = max(UNSEEN_SLOT_PRICE, LEAST_SLOT_PRICE * self.seen)
        short = np.clip(short, least, 1.0) / max(self.weight, 1e-9)
        prices: Floats = np.clip(short, MOST_SLOT_PRICE * turnover, MOST_SLOT_PRICE)
        return prices

    def scarcity(self, fleet: Fleet, layout: Layout) -> Floats:
        """[shape] How much of the existing slots will be requested until the cluster is full.

        The future demand is as large as what is free, and larger pods take from the slots of smaller ones.
        Pods come at random: of n expected, n + 2·√n may well come (the deviation of a Poisson distribution).
        If no more slots than these are left, they are as scarce as slots of which `SHORT` will be requested.
        That matters only where few are expected: on small clusters, and when little is left.
        """
        free = np.bincount(layout.kind, fleet.left.sum(axis=1), len(layout.kinds)) / layout.mean_units
        scarcity, reachable = np.zeros(len(self.shapes)), free @ self.holds
        asked_per_free = np.divide(
            self.part * free.sum(), reachable, out=np.zeros(len(self.shapes)), where=reachable > 0
        )
        units_of, cards_of = np.array([(shape.units, shape.cards) for shape in self.shapes]).reshape(-1, 2).T
        for units in np.unique(units_of):
            wide = np.count_nonzero(fleet.left >= units, axis=1)
            for cards in np.unique(cards_of[units_of == units]):
                alike = (units_of == units) & (cards_of == cards)
                larger = (units_of >= units) & (cards_of >= cards)
                asked = (free * (self.holds[:, larger] @ asked_per_free[larger])) @ self.holds[:, alike]
                slots = np.bincount(layout.kind, wide // cards, len(layout.kinds)) @ self.holds[:, alike]
                gpu = units * cards / layout.mean_units
                asked = np.maximum(asked, SHORT * (asked + DEVIATIONS * np.sqrt(asked * gpu)))
                there = slots * gpu
                scarcity[alike] = np.divide(asked, there, out=np.zeros(len(asked)), where=there > 0)
        return scarcity
