"""What a run of the tests cost, and what it may."""

from __future__ import annotations

import pytest

from tests.costs import BUDGETS_S, kind_of, over_budget


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("tests/unit/test_fit.py", "pure"),
        ("tests/scenarios/test_placement.py", "pure"),
        ("tests/integration/test_demo.py", "process"),
        ("simulator/tests/test_cluster_watch.py", "process"),
        ("tests/e2e/test_story.py", "cluster"),
    ],
)
def test_a_folder_says_what_its_tests_need(path: str, kind: str) -> None:
    assert kind_of(path) == kind


def test_only_what_costs_too_much_is_named() -> None:
    assert over_budget({"pure": BUDGETS_S["pure"], "process": 1.0}) == []
    assert over_budget({"pure": 10_000.0}) == [
        f"the tests of kind pure took 10000 s of processor time, and may take {BUDGETS_S['pure']:.0f}"
    ]
