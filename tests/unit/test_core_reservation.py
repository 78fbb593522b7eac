"""Cards kept for pods whose room is being made: whom they are kept from, and for how long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gpuslice.core.hold import NOTHING_TAKEN, Taken
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement, Pod
from gpuslice.core.placement import Fit
from tests.builders import make_node, make_placement, make_pod, make_request


def keeping(*reserved: tuple[Pod, Placement]) -> Ledger:
    ledger = Ledger()
    for pod, placement in reserved:
        ledger.holds.reserve(pod, placement)
    return ledger


def of(
    name: str, priority: int, units: int = 4, *cards: int, node: str = "n1", core: int = 0
) -> tuple[Pod, Placement]:
    return make_pod(name, uid=name, priority=priority), make_placement(node, units, *cards, core=core)


def taken(ledger: Ledger, node: str, uid: str, priority: int) -> Taken:
    holds = ledger.holds.on(node)
    return holds.kept_from(uid, priority) if holds is not None else NOTHING_TAKEN


def test_cards_are_kept_from_equals_and_lesser_pods_and_not_from_the_pod_itself() -> None:
    ledger = keeping(of("a", 10, 4, 1))
    assert taken(ledger, "n1", "other", 10) == {1: (4, 0)}
    assert taken(ledger, "n1", "other", 9) == {1: (4, 0)}
    assert taken(ledger, "n1", "other", 11) == {}
    assert taken(ledger, "n1", "a", 10) == {}
    assert taken(ledger, "n2", "other", 10) == {}
    assert taken(keeping(), "n1", "other", 10) == NOTHING_TAKEN


def test_a_node_is_closed_to_a_pod_only_where_that_must_leave_the_cards_free() -> None:
    ledger = keeping(of("a", 10, 15, 0))
    for name in ("n1", "n2"):
        ledger.apply_node(make_node(name))
    rows = np.array([ledger.flush().row_of[name] for name in ("n1", "n2")])

    def fits(uid: str, priority: int) -> Any:
        return ledger.why_not(make_request(4), rows, make_pod(uid=uid, priority=priority)).tolist()

    assert fits("other", 10) == [Fit.HELD, Fit.YES]
    assert fits("other", 11) == [Fit.YES, Fit.YES]
    assert fits("a", 10) == [Fit.YES, Fit.YES]


def test_what_is_kept_for_several_pods_adds_up_by_card() -> None:
    ledger = keeping(of("a", 1, 4, 0, core=20), of("b", 1, 8, 0, 1), of("c", 1, 2, 0, node="n2"))
    assert taken(ledger, "n1", "other", 1) == {0: (8, 20), 1: (4, 0)}


def test_a_more_important_pod_ends_lesser_nominations_for_the_same_cards_only() -> None:
    ledger = keeping(of("same", 1, 4, 0), of("beside", 1, 4, 1), of("elsewhere", 1, 4, 0, node="n2"))
    ledger.holds.reserve(*of("equal", 1, 4, 0))
    assert "same" in ledger.holds.reserved
    ledger.holds.reserve(*of("better", 2, 4, 0))
    assert ledger.holds.reserved.keys() == {"beside", "elsewhere", "better"}
    ledger.holds.end_reservation("better")
    ledger.holds.end_reservation("nobody")
    assert len(ledger.holds.reserved) == 2


def test_a_second_nomination_of_a_pod_replaces_the_first() -> None:
    ledger = keeping(of("a", 1, 4, 0), of("a", 1, 4, 1))
    assert taken(ledger, "n1", "other", 1) == {1: (4, 0)}
    ledger.holds.reserve(*of("a", 1, 4, 0, node="n2"))
    assert taken(ledger, "n1", "other", 1) == {}
    assert taken(ledger, "n2", "other", 1) == {0: (4, 0)}
    ledger.holds.end_reservation("a")
    assert taken(ledger, "n2", "other", 1) == {}
    assert ledger.holds.on("n2") is None, "nothing of it is left"


# -- beside what is free -----------------------------------------------------------------------------------


def ledger_of(*leaving: int) -> Ledger:
    """Two cards of 15, on the first 10 units of pods that stay, and of each of `leaving` of one that goes."""
    ledger = Ledger()
    ledger.apply_node(make_node(cards=(15, 15), compute_percent=100))
    ledger.apply_pod(make_pod("stays", 10, node="n1", card=0, core=10))
    for number, units in enumerate(leaving):
        ledger.apply_pod(make_pod(f"goes-{number}", units, node="n1", card=1, core=20, terminating=True))
    return ledger


def left(ledger: Ledger, taken: dict[int, tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    held = ledger.holds.on("n1")
    assert held is not None
    state = held.open_to(taken)
    return state.left, state.compute_left


def test_what_is_kept_comes_out_of_what_is_free() -> None:
    assert left(ledger_of(), {}) == ((5, 15), (90, 100))
    assert left(ledger_of(), {0: (4, 30)}) == ((1, 15), (60, 100))
    assert left(ledger_of(), {0: (9, 95)}) == ((0, 15), (0, 100)), "and never makes it less than nothing"


def test_those_who_leave_serve_the_nominated_first() -> None:
    ledger = ledger_of(6, 2)
    assert left(ledger, {}) == ((5, 7), (90, 60))
    assert left(ledger, {1: (8, 40)}) == ((5, 7), (90, 60))
    assert left(ledger, {1: (10, 50)}) == ((5, 5), (90, 50))


def test_a_card_that_is_gone_is_kept_for_nobody() -> None:
    assert left(ledger_of(), {7: (4, 0)}) == ((5, 15), (90, 100))


# -- in the ledger -----------------------------------------------------------------------------------------


def test_a_nomination_ends_when_its_pod_holds_cards_or_is_gone() -> None:
    ledger = ledger_of()
    for pod in (make_pod("a"), make_pod("b")):
        ledger.apply_pod(pod)
        ledger.holds.reserve(pod, make_placement("n1", 4, 1))
    ledger.assume(make_pod("a"), make_placement("n1", 4, 1))
    assert list(ledger.holds.reserved) == ["uid-b"]
    ledger.remove_pod("uid-b")
    assert not ledger.holds.reserved


def test_waiting_pods_whose_status_names_a_node_are_known_by_it() -> None:
    ledger, pod = ledger_of(), make_pod(nominated="n1")
    ledger.apply_pod(pod)
    assert ledger.nominated == {pod.uid: "n1"}
    ledger.apply_pod(replace(pod, nominated=""))
    assert ledger.nominated == {}
    ledger.apply_pod(pod)
    ledger.apply_pod(replace(pod, node="n1", placement=make_placement("n1", 4, 1)))
    assert ledger.nominated == {}, "it is bound: it waits no more"
    ledger.apply_pod(other := make_pod("other", nominated="n1"))
    ledger.remove_pod(other.uid)
    assert ledger.nominated == {}
