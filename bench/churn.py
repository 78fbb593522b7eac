"""Churn: a fleet on which the pods of a trace come and go, after the replay that fills it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpuslice.core.policy.fleet import Floats, Shape
from gpuslice.core.simulation.replay import Cluster, Progress

LIFETIMES = 6.0
MEASURED_FROM = 3.0


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
    count = int(random.poisson(rate * LIFETIMES))
    time = np.sort(random.uniform(0.0, LIFETIMES, count))
    chosen = random.integers(len(shapes), size=count)
    drawn = tuple(shapes[index] for index in chosen)
    return ChurnArrivals(time, random.exponential(1.0, count), drawn, MEASURED_FROM, LIFETIMES)


def churn(
    cluster: Cluster,
    arrivals: ChurnArrivals,
    capacity_units: int,
    progress: Progress | None = None,
) -> Churn:
    """Offer the arrivals to an empty cluster, let each pod leave at its time, and measure the later part."""
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
