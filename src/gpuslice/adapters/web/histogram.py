"""Durations counted in buckets, so that a dashboard can ask for a quantile and not only for the mean.

Both kinds at once: classic buckets, of bounds that are given, which all formats of our page have; and native
ones (exponential, about 9 % apart), for a Prometheus that asks for protobuf.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gpuslice.adapters.web.exposition import Family, HistogramSample, MetricKind
from gpuslice.adapters.web.protobuf import LAST_BUCKET, SCHEMA, ZERO_BUCKET

REQUEST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Bounds for what a caller waits for."""
WORK_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Bounds for what is done without waiting for anybody."""
WAIT_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
"""Bounds for what a person waits for."""
_STEPS = tuple(2 ** (step / (1 << SCHEMA) - 1) for step in range(1 << SCHEMA))  # from 0.5 up to 1


class Histogram:
    """Seconds, in buckets, by the values of `labels`."""

    def __init__(
        self, name: str, help: str, labels: Sequence[str] = (), bounds: Sequence[float] = REQUEST_S
    ) -> None:
        self._name = name
        self._help = help
        self._labels = labels
        self._bounds = bounds
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        self._sparse: dict[tuple[str, ...], dict[int, int]] = {}
        if not labels:
            self._begin(())

    def observe(self, seconds: float, *of: str) -> None:
        """Count one duration; `of`: a value for each of the labels."""
        counts = self._counts.get(of) or self._begin(of)
        counts[bisect_left(self._bounds, seconds)] += 1
        self._sums[of] += seconds
        sparse, index = self._sparse[of], native_bucket(seconds)
        sparse[index] = sparse.get(index, 0) + 1

    @contextmanager
    def timed(self, *of: str) -> Iterator[None]:
        """Count how long the block takes, also when it fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.observe(time.perf_counter() - began, *of)

    def family(self) -> Family:
        """What a scrape gets of it."""
        family = Family(self._name, MetricKind.HISTOGRAM, self._help)
        for of, counts in sorted(self._counts.items()):
            named = dict(zip(self._labels, of, strict=True))
            family.add_histogram(
                HistogramSample(named, self._bounds, counts, self._sums[of], self._sparse[of])
            )
        return family

    def _begin(self, of: tuple[str, ...]) -> list[int]:
        self._sums[of] = 0.0
        self._sparse[of] = {}
        self._counts[of] = [0] * (len(self._bounds) + 1)
        return self._counts[of]


def native_bucket(seconds: float) -> int:
    """The index of the native bucket: it holds what is at most ``2 ** (index / 2 ** SCHEMA)``."""
    if not seconds > 0:  # a clock that was set back
        return ZERO_BUCKET
    if seconds == math.inf:
        return LAST_BUCKET
    fraction, exponent = math.frexp(seconds)
    index = bisect_left(_STEPS, fraction) + ((exponent - 1) << SCHEMA)
    return min(max(index, ZERO_BUCKET), LAST_BUCKET)
