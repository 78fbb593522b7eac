"""The workload as learned from the pods that arrive, and a prior for the time before that.

The prior is 30 pods and fades as old arrivals do: of 100 pods, 45 request one whole card, 45 a share of 10 …
90 % (five of each), four 2, three 4 and three 8 cards. Each requests 0.7 × the cluster's CPU and memory per
card: a cluster is usually bought so that cards run out first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import isfinite

import numpy as np

from gpuslice.core.policy.fleet import Fleet, Floats, Shape

PRIOR_PODS = 30.0
PRIOR_HOST_SHARE = 0.7  # of the cluster's CPU and memory per card
PRIOR_CARDS = {1: 45.0, 2: 4.0, 4: 3.0, 8: 3.0}
PRIOR_SHARE = 5.0  # for each tenth of a card
HALF_LIFE_ARRIVALS = 20_000
RENEW_FIRST, RENEW_PART, RENEW_LAST = 50, 0.1, 500


class LearnedWorkload:
    """Counts of the shapes that arrived, including refused ones; halved every 20,000 arrivals."""

    def __init__(self) -> None:
        self._counts: dict[Shape, float] = {}
        self._prior_pods = PRIOR_PODS
        self._seen = 0
        self._next = 0

    @property
    def due(self) -> bool:
        """True at the start, and again after as many arrivals as 10 % of those seen, at least 50, at most
        500.
        """
        return self._seen >= self._next

    @property
    def seen(self) -> Mapping[Shape, float]:
        """The counts without the prior."""
        return self._counts

    def arrived(self, shape: Shape) -> None:
        """Count one pod."""
        shape = shape.amounts
        self._counts[shape] = self._counts.get(shape, 0.0) + 1.0
        self._seen += 1
        if self._seen % HALF_LIFE_ARRIVALS == 0:
            self._prior_pods /= 2
            self._counts = {each: count / 2 for each, count in self._counts.items() if count >= 0.25}

    def renew(self, fleet: Fleet) -> dict[Shape, float]:
        """The counts, including the prior for this fleet; the next renewal is due some arrivals later."""
        self._next = self._seen + int(min(RENEW_LAST, max(RENEW_FIRST, RENEW_PART * self._seen)))
        counts = defaultdict(float, self._counts)
        for shape, part in prior(fleet).items():
            counts[shape] += part * self._prior_pods
        return dict(counts)


def prior(fleet: Fleet) -> dict[Shape, float]:
    """The pods expected before any was seen, as fractions of 1; card sizes are weighted by how many there
    are.
    """
    parts: dict[Shape, float] = defaultdict(float)
    sizes, numbers = np.unique(fleet.size[fleet.size > 0], return_counts=True)
    cpu, memory = _prior_request(fleet.cpu_milli, fleet), _prior_request(fleet.memory_mib, fleet)
    for size, number in zip(sizes.tolist(), numbers.tolist(), strict=True):
        part = number / int(numbers.sum()) / 100.0
        for cards, count in PRIOR_CARDS.items():
            parts[Shape(size, cards, round(cpu * cards), round(memory * cards))] += part * count
        for tenth in range(1, 10):
            units = max(1, round(size * tenth / 10))
            shape = Shape(units, 1, round(cpu * tenth / 10), round(memory * tenth / 10))
            parts[shape] += part * PRIOR_SHARE
    return dict(parts)


def _prior_request(amount: Floats, fleet: Fleet) -> float:
    """What a pod of one card requests of a resource; 0 if the nodes' amounts are unknown."""
    known = fleet.cards > 0
    total = float(amount[known].sum())
    return PRIOR_HOST_SHARE * total / int(fleet.cards.sum()) if isfinite(total) and known.any() else 0.0
