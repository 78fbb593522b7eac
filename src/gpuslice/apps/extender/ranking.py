"""From ranks to answers: the best nodes, and scores."""

from __future__ import annotations

import numpy as np

from gpuslice.apps.extender.node_query import Positions
from gpuslice.core.policy import NEVER
from gpuslice.core.policy.fleet import Ints
from gpuslice.core.policy.ranking import TIE_BITS

TOP_SCORE = 10  # MaxExtenderPriority
SAMPLE_EVERY = 16


def best_of(keys: Ints, count: int) -> Positions:
    """The positions of the `count` best, in order. At least that many must fit."""
    few = keys
    # a sample shows below which key there are enough nodes and few more; partitioning all takes ten times as
    # long
    sample = keys[::SAMPLE_EVERY]
    rank = 3 * count // SAMPLE_EVERY  # so that three times as many as needed are expected
    if rank < len(sample):
        found = keys[keys <= np.partition(sample, rank)[rank]]
        if len(found) >= count:
            few = found
    least = np.partition(few, count - 1)[count - 1]  # no two keys are equal
    best: Positions = (keys <= least).nonzero()[0]
    return best


def scores(keys: Ints) -> Ints:
    """10 for the best key, 9 to 0 for the others by their cost, 0 for what does not fit."""
    if not len(keys) or keys[best := keys.argmin()] == NEVER:
        return np.zeros(len(keys), dtype=np.int64)
    costs = keys >> TIE_BITS  # the policy's cost, without the order among equals
    least, most = int(costs[best]), int(costs.max())
    if most == NEVER >> TIE_BITS:
        never = keys == NEVER
        most = int(costs[~never].max())
        costs[never] = most
    scores: Ints = np.rint((most - costs) * ((TOP_SCORE - 1) / max(1, most - least))).astype(np.int64)
    scores[best] = TOP_SCORE
    return scores
