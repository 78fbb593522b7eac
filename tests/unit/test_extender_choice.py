"""Of the nodes that fit the best are let pass, however many and however alike they are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.apps.extender.placer import best_of, scores
from gpuslice.core.policy.ranking import NEVER, TIE_BITS, keys_of


@given(st.integers(2, 3000), st.integers(1, 3000), st.integers(1, 200), st.randoms())
def test_those_that_pass_are_the_best_in_order(nodes: int, count: int, costs: int, dice: object) -> None:
    rng = np.random.default_rng(dice.getrandbits(32))  # type: ignore[attr-defined]
    keys = keys_of(rng.integers(0, costs, nodes), rng.permutation(nodes))
    fitting = np.flatnonzero(rng.random(nodes) < rng.choice([0.02, 0.8, 1.0]))
    keys[np.setdiff1d(np.arange(nodes), fitting)] = NEVER
    count = min(count, len(fitting))
    if not count:
        return
    best = best_of(keys, count)
    assert sorted(keys[best]) == sorted(keys[fitting])[:count]
    assert best.tolist() == sorted(best)


@given(st.lists(st.integers(-50, 50) | st.none(), max_size=80))
def test_the_best_has_10_alone_and_the_others_as_much_less_as_they_cost_more(costs: list[int | None]) -> None:
    keys = np.array(
        [NEVER if cost is None else (cost << TIE_BITS) + row for row, cost in enumerate(costs)],
        dtype=np.int64,
    )
    known = [cost for cost in costs if cost is not None]
    step = 9 / max(1, max(known) - min(known)) if known else 0
    expected = [0 if cost is None else round((max(known) - cost) * step) for cost in costs]
    if known:
        expected[costs.index(min(known))] = 10
    assert scores(keys).tolist() == expected
