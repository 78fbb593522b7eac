"""Replays of a trace on a fleet: filling it until nothing fits, and churn, where pods come and go.

The protocol of filling is that of "Beware of Fragmentation" (USENIX ATC '23): nobody leaves, a pod that
fits nowhere is dropped, and what counts is the GPU allocated when the arrived demand is 100 and 130 % of
the cluster.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from gpuslice.core.card_links import Link, weakest_link
from gpuslice.core.policy.fleet import Fleet, FleetNode, Floats, Shape
from gpuslice.core.policy.ranking import Policy

FULL_DEMAND = 1.3
NOTED_PCT = 10_000  # of demand: beyond a hundred times the cluster nothing is drawn any more
CHURN_LIFETIMES = 6.0
CHURN_MEASURED_FROM = 3.0

Progress: TypeAlias = Callable[[float], None]
Arrivals: TypeAlias = Sequence[Shape]


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
            self.policy.refused(shape)
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


@dataclass(frozen=True, slots=True)
class Churn:
    """Time-averaged allocation in % of the cluster, and refused GPU demand in % of what arrived."""

    allocation_pct: float
    refused_pct: float


@dataclass(frozen=True, slots=True)
class ChurnArrivals:
    """Arrivals with their times and lifetimes, the mean lifetime being 1."""

    time: Floats
    lifetime: Floats
    shapes: tuple[Shape, ...]
    measured_from: float
    until: float


def churn_arrivals(shapes: Sequence[Shape], capacity_units: int, load: float, seed: int) -> ChurnArrivals:
    """Poisson arrivals drawn from the trace whose demand is `load` × the capacity on average."""
    random = np.random.default_rng([seed, 2])
    mean_units = sum(shape.total_units for shape in shapes) / len(shapes)
    rate = load * capacity_units / mean_units
    count = int(random.poisson(rate * CHURN_LIFETIMES))
    time = np.sort(random.uniform(0.0, CHURN_LIFETIMES, count))
    chosen = random.integers(len(shapes), size=count)
    drawn = tuple(shapes[index] for index in chosen)
    return ChurnArrivals(time, random.exponential(1.0, count), drawn, CHURN_MEASURED_FROM, CHURN_LIFETIMES)


def churn(
    cluster: Cluster,
    arrivals: ChurnArrivals,
    capacity_units: int,
    progress: Progress | None = None,
) -> Churn:
    """Offer the arrivals from an empty start, let each pod leave at its time, measure the later part."""
    held: list[tuple[float, int, int, tuple[int, ...]]] = []
    meter = _Meter(arrivals.measured_from)
    for number, shape in enumerate(arrivals.shapes):
        now = float(arrivals.time[number])
        for time, pod in _leaving(held, now):
            meter.advance(time, cluster.allocated_units)
            cluster.remove(pod[0], pod[1], arrivals.shapes[pod[2]])
        meter.advance(now, cluster.allocated_units)
        place = cluster.offer(shape)
        meter.count(now, shape, place is None)
        if place is not None:
            heapq.heappush(held, (now + float(arrivals.lifetime[number]), number, *place))
        if progress and number % 256 == 0:
            progress(number / len(arrivals.shapes))
    for time, pod in _leaving(held, arrivals.until):
        meter.advance(time, cluster.allocated_units)
        cluster.remove(pod[0], pod[1], arrivals.shapes[pod[2]])
    meter.advance(arrivals.until, cluster.allocated_units)
    return meter.result(capacity_units, arrivals.until)


def _leaving(
    held: list[tuple[float, int, int, tuple[int, ...]]], now: float
) -> Iterator[tuple[float, tuple[int, tuple[int, ...], int]]]:
    while held and held[0][0] <= now:
        time, number, row, slots = heapq.heappop(held)
        yield time, (row, slots, number)


@dataclass(slots=True)
class _Meter:
    measured_from: float
    _time: float = 0.0
    _allocated: float = 0.0
    _arrived: int = 0
    _refused: int = 0

    def advance(self, time: float, allocated_units: int) -> None:
        """The allocation was `allocated_units` since the last call until `time`."""
        start = max(self._time, self.measured_from)
        if time > start:
            self._allocated += (time - start) * allocated_units
        self._time = time

    def count(self, time: float, shape: Shape, refused: bool) -> None:
        if time >= self.measured_from:
            self._arrived += shape.total_units
            self._refused += shape.total_units * refused

    def result(self, capacity_units: int, until: float) -> Churn:
        span = (until - self.measured_from) * capacity_units
        return Churn(100 * self._allocated / span, 100 * self._refused / max(self._arrived, 1))
