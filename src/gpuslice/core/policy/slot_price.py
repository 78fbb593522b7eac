"""What a kept slot for a pod of several cards is worth: more where slots are short or pods come and go."""

from __future__ import annotations

import numpy as np

from gpuslice.core.policy.fleet import Flags, Fleet, Floats, Shape
from gpuslice.core.policy.layout import Layout

AMPLE, SHORT = 0.5, 0.75  # of the slots there are will be asked for before the cluster is full
LEAST_SLOT_PRICE = 0.02  # of all slots together where they are ample; 1, all of their cards, where short
MOST_SLOT_PRICE = 8.0  # × the slots' demand
TURNOVER_HALF_LIFE_ARRIVALS = 2_000


class Turnover:
    """How many pods leave for each that is placed, of late."""

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
        """0 while a cluster fills up, 1 where as many pods leave as come."""
        return min(1.0, self._departed / self._placed) if self._placed else 0.0


def slot_prices(demand: float, scarcity: Floats, turnover: float) -> Floats:
    """[shape] By what the demand for slots is multiplied; `demand`: that of all shapes of several cards.

    Where pods come and go, nodes are kept whole before slots are short: broken ones seldom come free again.
    """
    short = np.clip((scarcity - AMPLE) / (SHORT - AMPLE), LEAST_SLOT_PRICE, 1.0)
    prices: Floats = np.clip(short / max(demand, 1e-9), MOST_SLOT_PRICE * turnover, MOST_SLOT_PRICE)
    return prices


def slot_scarcity(fleet: Fleet, layout: Layout, shapes: list[Shape], part: Floats, holds: Flags) -> Floats:
    """[shape] How much of the slots there are will be asked for until the cluster is full; 0 for one card.

    `part`: of all GPU that is asked for; `holds`: [kind, shape] whether an empty node holds such a pod. As
    much will be asked for as is free, and larger pods take from the slots of smaller ones.
    """
    free = np.bincount(layout.kind, fleet.left.sum(axis=1), len(layout.kinds)) / layout.mean_units
    reachable = free @ holds
    asked_per_free = np.divide(part * free.sum(), reachable, out=np.zeros(len(shapes)), where=reachable > 0)
    scarcity = np.zeros(len(shapes))
    for units, cards in {(shape.units, shape.cards) for shape in shapes if shape.cards > 1}:
        alike = np.array([(shape.units, shape.cards) == (units, cards) for shape in shapes])
        larger = np.array([shape.units >= units and shape.cards >= cards for shape in shapes])
        asked = (free * (holds[:, larger] @ asked_per_free[larger])) @ holds[:, alike]
        slots = np.bincount(layout.kind, (fleet.left >= units).sum(axis=1) // cards, len(layout.kinds))
        there = slots @ holds[:, alike] * (units * cards / layout.mean_units)
        scarcity[alike] = np.divide(asked, there, out=np.zeros(len(asked)), where=there > 0)
    return scarcity
