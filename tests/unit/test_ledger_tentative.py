"""Plans: cards held for a pod that waits, which the first to come may have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Refusal
from gpuslice.core.policy.fleet import Shape
from tests.builders import make_node, make_placement, make_pod, make_request


class Heard:
    """What a policy is told."""

    def __init__(self) -> None:
        self.news: list[str] = []

    def arrived(self, _: Shape) -> None:
        self.news.append("arrived")

    def placed(self, _: Shape) -> None:
        self.news.append("placed")

    def departed(self, _: Shape) -> None:
        self.news.append("departed")


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger(Heard())
    for name in ("n1", "n2"):
        made.apply_node(make_node(name, (15, 15)))
    return made


def plan(
    ledger: Ledger, name: str = "p", memory: int = 10, node: str = "n1", card: int = 0, *, priority: int = 0
) -> None:
    pod = make_pod(name, memory, priority=priority)
    ledger.apply_pod(pod)
    assert ledger.nominate(pod, make_placement(node, memory, card)) is None


def left(ledger: Ledger, node: str = "n1") -> tuple[int, ...]:
    state = ledger.state(node)
    assert state is not None
    assert list(ledger.flush().left[ledger.fleet.row_of[node]]) == list(state.left)
    return state.left


def test_a_plan_holds_cards_and_waits_for_no_answer(ledger: Ledger) -> None:
    plan(ledger)
    assert left(ledger) == (5, 15)
    assert ledger.assumed() == []
    assert ledger.holds.tentative("uid-p") == make_placement("n1", 10, 0)
    ledger.forget("uid-p")
    assert left(ledger) == (15, 15)
    assert (ledger.holds.tentative_count, ledger.holds.tentative("uid-p")) == (0, None)


def test_nothing_is_planned_where_there_is_no_room_or_for_who_has_cards(ledger: Ledger) -> None:
    plan(ledger)
    pod = make_pod("q", 10)
    assert isinstance(ledger.nominate(pod, make_placement("n1", 10, 0)), Refusal)
    ledger.assume(pod, make_placement("n1", 10, 1))
    assert isinstance(ledger.nominate(pod, make_placement("n2", 10, 1)), Refusal)
    assert left(ledger) == (5, 5)


def test_what_was_planned_is_assumed_there_or_elsewhere(ledger: Ledger) -> None:
    plan(ledger)
    ledger.assume(make_pod("p", 10), make_placement("n2", 10, 1))
    assert (left(ledger), left(ledger, "n2")) == ((15, 15), (15, 5))
    assert [hold.node for hold in ledger.assumed()] == ["n2"]
    assert ledger.holds.tentative_count == 0


def test_a_policy_hears_of_a_placement_only(ledger: Ledger) -> None:
    heard = ledger.listener
    assert isinstance(heard, Heard)
    plan(ledger)
    ledger.forget("uid-p")
    ledger.nominate(make_pod("p", 10), make_placement("n1", 10, 0))
    assert heard.news == ["arrived"]
    ledger.assume(make_pod("p", 10), make_placement("n1", 10, 0))
    ledger.apply_pod(make_pod("p", 10, node="n1", card=0))
    assert heard.news == ["arrived", "placed"]
    plan(ledger, "q", node="n2")
    ledger.remove_pod("uid-q")
    assert heard.news == ["arrived", "placed", "arrived"]


def test_a_planned_pod_seen_bound_where_it_was_planned_is_told_of(ledger: Ledger) -> None:
    heard = ledger.listener
    assert isinstance(heard, Heard)
    plan(ledger)
    ledger.apply_pod(make_pod("p", 10, node="n1", card=0))
    assert heard.news == ["arrived", "placed"]
    assert (ledger.holds.tentative_count, left(ledger)) == (0, (5, 15))


def test_a_planned_pod_that_somebody_else_bound_may_sit_on_any_card(ledger: Ledger) -> None:
    plan(ledger)
    ledger.apply_pod(make_pod("p", 10, node="n1"))  # without annotations: not as we planned
    assert left(ledger) == (5, 5)


def test_plans_make_way_where_that_helps_and_nowhere_else(ledger: Ledger) -> None:
    plan(ledger, "a", 10, "n1", 0)
    plan(ledger, "b", 10, "n1", 1)
    plan(ledger, "c", 4, "n2", 0)
    ledger.assume(make_pod("other", 8), make_placement("n2", 8, 0))
    ledger.assume(make_pod("more", 8), make_placement("n2", 8, 1))
    assert not ledger.release_nominated(make_request(16), 0)
    assert ledger.holds.tentative_count == 3
    assert ledger.release_nominated(make_request(15), 0)
    assert (left(ledger), left(ledger, "n2")) == ((15, 15), (3, 7))


def test_plans_make_way_on_one_node(ledger: Ledger) -> None:
    for number, node in enumerate(("n1", "n1", "n2", "n2")):
        plan(ledger, f"p{number}", 10, node, number % 2)
    assert ledger.release_nominated(make_request(15), 0, "n2")
    assert (left(ledger), left(ledger, "n2")) == ((5, 5), (15, 15))


def test_plans_of_the_more_important_stay(ledger: Ledger) -> None:
    for number, node in enumerate(("n1", "n1", "n2", "n2")):
        plan(ledger, f"p{number}", 10, node, number % 2, priority=7)
    assert not ledger.release_nominated(make_request(15), 6)
    assert ledger.release_nominated(make_request(15), 7)


def test_a_pod_that_was_not_expected_crowds_the_plans_out(ledger: Ledger) -> None:
    plan(ledger)
    ledger.apply_pod(make_pod("stranger", 10, node="n1", card=0))
    assert (left(ledger), ledger.holds.tentative_count) == ((5, 15), 0)
    assert list(ledger.overcommitted()) == []


def test_a_plan_outlives_news_of_its_pod(ledger: Ledger) -> None:
    plan(ledger)
    ledger.apply_pod(replace(make_pod("p", 10), version=7, nominated="n1"))
    assert ledger.holds.tentative("uid-p") is not None
    assert ledger.holds.tentative_count == 1
