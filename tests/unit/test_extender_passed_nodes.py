"""What filter let pass is remembered until bind comes, in bounded memory."""

from __future__ import annotations

import numpy as np

from gpuslice.apps.extender.node_query import MOST_PASSED_PODS, PassedNodes


def test_bind_is_answered_for_the_nodes_that_filter_let_pass_last() -> None:
    passed = PassedNodes()
    passed.note("a", np.array([3, 5]))
    assert [passed.holds("a", row) for row in (3, 4, 5)] == [True, False, True]
    passed.note("a", np.array([4]))
    assert [passed.holds("a", row) for row in (3, 4, 5)] == [False, True, False]
    passed.note("a", np.array([], dtype=np.int64))
    assert (passed.count("a"), passed.holds("a", 4)) == (0, False)
    assert not passed.holds("b", 4)


def test_pods_that_come_and_go_for_months_take_no_more_memory() -> None:
    passed = PassedNodes()
    for number in range(MOST_PASSED_PODS):
        passed.note(str(number), np.array([7]))
    for number in range(MOST_PASSED_PODS):  # refused pods take no place
        passed.note(f"refused-{number}", np.array([], dtype=np.int64))
    assert passed.holds("0", 7)
    passed.note("one more", np.array([7]))
    assert (passed.holds("0", 7), passed.holds("1", 7), passed.holds("one more", 7)) == (False, True, True)
    assert len(passed._rows) == MOST_PASSED_PODS
