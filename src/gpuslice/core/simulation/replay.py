"""Replays of a trace on a fleet, which is filled until nothing fits.

The protocol of filling is that of "Beware of Fragmentation" (USENIX ATC '23): nobody leaves, a pod that
fits nowhere is dropped, and what counts is the GPU allocated when the arrived demand is 100 and 130 % of
the cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from gpuslice.core.card_links import Link, weakest_link
from gpuslice.core.policy.fleet import Fleet, FleetNode, Shape
from gpuslice.core.policy.ranking import Policy

FULL_DEMAND = 1.3
NOTED_PCT = 10_000  # of demand: beyond a hundred times the cluster nothing is drawn any more

Progress: TypeAlias = Callable[[float], None]


def shuffled_nodes(nodes: Sequence[FleetNode], seed: int) -> list[FleetNode]:
    """The nodes in the order that breaks ties for this seed."""
    order = np.random.default_rng([seed, 0]).permutation(len(nodes))
    return [nodes[index] for index in order]


def filling_arrivals(shapes: Sequence[Shape], capacity_units: int, seed: int, demand: float) -> list[Shape]:
    """The trace in random order, topped up by draws, or thinned at random, to `demand` × the capacity."""
    random = np.random.default_rng([seed, 1])
    wanted = demand * capacity_units
    arrivals: list[Shape] = []
    units = 0
    for index in random.permutation(len(shapes)):
        shape = shapes[index]
        if units + shape.total_units > wanted:
            return arrivals
        arrivals.append(shape)
        units += shape.total_units
    while units < wanted:
        shape = shapes[int(random.integers(len(shapes)))]
        if units + shape.total_units > wanted:
            break
        arrivals.append(shape)
        units += shape.total_units
    return arrivals


@dataclass(slots=True)
class Cluster:
    """A fleet, a policy and the pods they hold."""

    fleet: Fleet
    policy: Policy
    allocated_units: int = 0

    def offer(self, shape: Shape) -> tuple[int, tuple[int, ...]] | None:
        """One pod arrives: where it went, or None when it was refused."""
        self.policy.arrived(shape)
        row = self.policy.choose(shape)
        if row is None:
            return None
        slots = self.policy.slots(shape, row)
        self.fleet.take(row, slots, shape)
        self.policy.placed(shape)
        self.allocated_units += shape.total_units
        return row, slots

    def remove(self, row: int, slots: tuple[int, ...], shape: Shape) -> None:
        """A pod leaves."""
        self.fleet.give_back(row, slots, shape)
        self.policy.departed(shape)
        self.allocated_units -= shape.total_units


@dataclass(slots=True)
class Filling:
    """`allocation_pct_at`: arrived demand in % of the cluster → allocated GPU in % of the cluster."""

    allocation_pct_at: dict[int, float] = field(default_factory=dict)
    refused: list[Shape] = field(default_factory=list)
    joined: Counter[Link] = field(default_factory=Counter)  # pods of several cards, by their weakest link


def fill(
    cluster: Cluster, arrivals: Sequence[Shape], capacity_units: int, progress: Progress | None = None
) -> Filling:
    """Offer the arrivals one after another and note the allocation at each whole percent of demand.

    Up to `NOTED_PCT`: a single pod may ask for any number of cards.
    """
    result = Filling()
    arrived = 0
    for number, shape in enumerate(arrivals):
        before = cluster.allocated_units
        if (where := cluster.offer(shape)) is None:
            result.refused.append(shape)
        elif (link := weakest_link(cluster.fleet.links.get(where[0], ()), where[1])) is not None:
            result.joined[link] += 1
        percent = (arrived + shape.total_units) * 100 // capacity_units
        for reached in range(arrived * 100 // capacity_units + 1, min(percent, NOTED_PCT) + 1):
            result.allocation_pct_at[reached] = 100 * before / capacity_units
        arrived += shape.total_units
        if progress and number % 256 == 0:
            progress(number / len(arrivals))
    return result
