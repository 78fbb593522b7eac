"""Where kube-scheduler puts claims: the yardstick for packing by dynamic resource allocation.

It chooses the node by CPU and memory alone, as its default plugins score them, and on it the first card
that fits. An agent publishes its fullest card first; so the card is what `bestfit` would take, the node not.
Source: kube-scheduler's NodeResourcesFit and NodeResourcesBalancedAllocation, each with weight 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from gpuslice.core.policy import POLICIES, Fleet, Policy, Shape, make_policy
from gpuslice.core.policy.fit import card_fits
from gpuslice.core.policy.fleet import Floats, Ints, Rows
from gpuslice.core.policy.packing import FULL_SCORE, NodePolicy, fullest_card
from gpuslice.core.policy.ranking import keys_of


class Claims(NodePolicy):
    """kube-scheduler as it is shipped: the node with most CPU and memory left, both used alike."""

    name: ClassVar[str] = "claims"
    joins: ClassVar[bool] = False  # it takes the first cards that fit

    def rank(self, shape: Shape, rows: Rows) -> tuple[Ints, Ints]:
        cpu = _used(self.fleet.cpu_milli[rows], self.fleet.cpu_left[rows] - shape.cpu_milli)
        memory = _used(self.fleet.memory_mib[rows], self.fleet.memory_left[rows] - shape.memory_mib)
        balanced = FULL_SCORE * (1 - np.abs(cpu - memory) / 2)
        score = self.fit(cpu, memory).astype(np.int64) + balanced.astype(np.int64)
        if not shape.cards:
            return keys_of(-score, rows), np.full(len(rows), -1)
        return keys_of(-score, rows), fullest_card(self.fleet.left[rows], card_fits(self.fleet, shape, rows))

    def fit(self, cpu: Floats, memory: Floats) -> Floats:
        """NodeResourcesFit's score, of what is used of each, 0…1."""
        score: Floats = FULL_SCORE * (2 - cpu - memory) / 2
        return score


class PackedClaims(Claims):
    """The same with scoringStrategy MostAllocated, which an administrator may set."""

    name: ClassVar[str] = "claims-most-allocated"

    def fit(self, cpu: Floats, memory: Floats) -> Floats:
        score: Floats = FULL_SCORE * (cpu + memory) / 2
        return score


SIMULATED: tuple[type[Policy], ...] = (*POLICIES, Claims, PackedClaims)
"""What a replay may place by: the extender's policies, and kube-scheduler alone."""


def simulated_policy(name: str, fleet: Fleet, counts: Mapping[Shape, float] | None = None) -> Policy:
    """The policy of this name; ValueError names those there are."""
    found = next((each for each in (Claims, PackedClaims) if each.name == name), None)
    return found(fleet) if found is not None else make_policy(name, fleet, counts)


def _used(size: Floats, left: Floats) -> Floats:
    """Which part of what a node has is used; nothing of what is unlimited."""
    with np.errstate(invalid="ignore", divide="ignore"):
        used = 1 - left / size
    found: Floats = np.where(np.isfinite(used), np.clip(used, 0.0, 1.0), 0.0)
    return found
