"""What filter let pass is remembered until bind comes, in bounded memory."""

from __future__ import annotations

import tracemalloc

import numpy as np

from gpuslice.apps.extender.node_query import PassedNodes


def test_bind_is_answered_for_the_nodes_that_filter_let_pass_last() -> None:
    passed = PassedNodes()
    passed.note("a", np.array([3, 5]))
    assert [passed.holds("a", row) for row in (3, 4, 5)] == [True, False, True]
    passed.note("a", np.array([4]))
    assert [passed.holds("a", row) for row in (3, 4, 5)] == [False, True, False]
    passed.note("a", np.array([], dtype=np.int64))
    assert (passed.count("a"), passed.holds("a", 4)) == (0, False)
    assert not passed.holds("b", 4)


def test_pods_that_come_and_go_for_months_take_no_memory() -> None:
    passed, one, none = PassedNodes(), np.array([7]), np.array([], dtype=np.int64)

    def held_bytes_after(pods: range) -> int:
        for number in pods:
            passed.note(f"refused-{number}", none)
            passed.note(f"placed-{number}", one)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    before = held_bytes_after(range(30_000))
    after = held_bytes_after(range(30_000, 60_000))
    tracemalloc.stop()
    assert passed.holds("placed-59999", 7)
    assert after - before < 1_000_000
