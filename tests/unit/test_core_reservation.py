"""Cards kept for pods whose room is being made: whom they are kept from, and for how long."""

from __future__ import annotations

from dataclasses import replace

from gpuslice.core.ledger import Ledger
from gpuslice.core.preemption import NOTHING_TAKEN
from gpuslice.core.reservation import Reservation, Reservations, open_to
from tests.builders import make_node, make_placement, make_pod


def kept(*reservations: Reservation) -> Reservations:
    all_of_them = Reservations()
    for reservation in reservations:
        all_of_them.keep(reservation)
    return all_of_them


def of(uid: str, priority: int, units: int = 4, *cards: int, node: str = "n1", core: int = 0) -> Reservation:
    return Reservation(uid, priority, make_placement(node, units, *cards, core=core))


def test_cards_are_kept_from_equals_and_lesser_pods_and_not_from_the_pod_itself() -> None:
    reservations = kept(of("a", 10, 4, 1))
    assert reservations.taken("n1", "other", 10) == {1: (4, 0)}
    assert reservations.taken("n1", "other", 9) == {1: (4, 0)}
    assert reservations.taken("n1", "other", 11) == {}
    assert reservations.taken("n1", "a", 10) == {}
    assert reservations.taken("n2", "other", 10) == {}
    assert kept().taken("n1", "other", 10) == NOTHING_TAKEN
    assert reservations.nodes_closed_to("other", 10) == {"n1"}
    assert reservations.nodes_closed_to("other", 11) == set()


def test_what_is_kept_for_several_pods_adds_up_by_card() -> None:
    reservations = kept(of("a", 1, 4, 0, core=20), of("b", 1, 8, 0, 1), of("c", 1, 2, 0, node="n2"))
    assert reservations.taken("n1", "other", 1) == {0: (8, 20), 1: (4, 0)}


def test_a_more_important_pod_ends_lesser_nominations_for_the_same_cards_only() -> None:
    reservations = kept(of("same", 1, 4, 0), of("beside", 1, 4, 1), of("elsewhere", 1, 4, 0, node="n2"))
    reservations.keep(of("equal", 1, 4, 0))
    assert reservations.of("same") is not None
    reservations.keep(of("better", 2, 4, 0))
    assert {each.uid for each in reservations} == {"beside", "elsewhere", "better"}
    reservations.drop("better")
    reservations.drop("nobody")
    assert len(reservations) == 2


def test_a_second_nomination_of_a_pod_replaces_the_first() -> None:
    reservations = kept(of("a", 1, 4, 0), of("a", 1, 4, 1))
    assert reservations.taken("n1", "other", 1) == {1: (4, 0)}
    reservations.keep(of("a", 1, 4, 0, node="n2"))
    assert reservations.nodes_closed_to("other", 1) == {"n2"}
    reservations.drop("a")
    assert reservations.nodes_closed_to("other", 1) == set()


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
    held = ledger.allocations("n1")
    assert held is not None
    state = open_to(held, taken)
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
        ledger.reservations.keep(of(pod.uid, 1, 4, 1))
    ledger.assume(make_pod("a"), make_placement("n1", 4, 1))
    assert [each.uid for each in ledger.reservations] == ["uid-b"]
    ledger.remove_pod("uid-b")
    assert len(ledger.reservations) == 0


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
