"""What a scenario cannot ask: cards that a policy chose, the refusals' two kinds, compute beside memory."""

from __future__ import annotations

from dataclasses import replace

from gpuslice.core.contract import GPU_CORE
from gpuslice.core.model import CardSlice, Node, Placement, Refusal, Request
from gpuslice.core.placement import (
    CORE_REQUIRED,
    KUBELET_AWAY,
    NO_CORE,
    NO_ROOM,
    NodeState,
    choose_slots,
    not_shared,
    place,
)
from gpuslice.core.views import with_unhealthy
from tests.builders import make_node, make_placement, make_request


def state(*left: int, core: tuple[int, ...] = (), node: Node | None = None) -> NodeState:
    node = node or make_node(cards=[15] * len(left))
    return NodeState(node, left, core or (0,) * len(left))


def refused(answer: Placement | Refusal) -> Refusal:
    assert isinstance(answer, Refusal)
    return answer


def test_a_policys_choice_of_card_is_followed() -> None:
    assert place(state(4, 15), make_request(4)) == make_placement("n1", 4, 0)
    assert place(state(4, 15), make_request(4), slots=(1,)) == make_placement("n1", 4, 1)


def test_a_nodes_own_rule_wins_over_a_policys_choice() -> None:
    spreading = make_node(cards=(15, 15), packing="spread")
    assert place(state(8, 15, node=spreading), make_request(4), slots=(0,)) == make_placement("n1", 4, 1)
    packing = make_node(cards=(15, 15), packing="binpack")
    assert place(state(8, 15, node=packing), make_request(4), slots=(1,)) == make_placement("n1", 4, 0)


def test_a_node_without_its_kubelet_takes_nothing_and_says_why() -> None:
    away = with_unhealthy(replace(make_node(cards=(15, 15)), kubelet_away=True), frozenset())
    answer = refused(place(state(0, 0, node=away), make_request(4)))
    assert (answer.reason, answer.never) == (KUBELET_AWAY, False)
    assert away.unhealthy == {0, 1}, "nor is anybody evicted for a place there"
    assert with_unhealthy(replace(away, kubelet_away=False), frozenset({1})).unhealthy == {1}


def test_a_choice_that_does_not_fit_is_refused_though_another_card_would_hold_it() -> None:
    """Between a policy's choice and its being carried out the card may have been taken."""
    assert refused(place(state(3, 15), make_request(4), slots=(0,))).reason == NO_ROOM
    both = place(state(8, 3), make_request(8, cards=2), slots=(0, 1))
    assert isinstance(both, Refusal)


def test_cards_are_named_by_their_index_and_in_its_order() -> None:
    gaps = Node("n1", tuple(make_node(cards=(15, 15, 15)).cards[index] for index in (0, 2)))
    answer = place(state(4, 4, node=gaps), make_request(8, cards=2), slots=(1, 0))
    assert answer == Placement("n1", (CardSlice(0, 4), CardSlice(2, 4)))


def test_exactly_enough_is_enough() -> None:
    assert place(state(4), make_request(4)) == make_placement("n1", 4, 0)
    assert place(state(15), make_request(15)) == make_placement("n1", 15, 0)
    assert refused(place(state(15), make_request(16))).never


def test_too_few_fitting_cards_are_none() -> None:
    assert choose_slots(state(8, 3, 8), make_request(12, cards=3)) == ()
    assert choose_slots(state(8, 4, 8), make_request(12, cards=3)) == (1, 0, 2)


def test_a_full_node_may_have_room_again_and_one_too_small_never() -> None:
    full, small = refused(place(state(0), make_request(4))), refused(place(state(15), make_request(20)))
    assert (full.reason, full.never) == (NO_ROOM, False)
    assert (small.reason, small.never) == (NO_ROOM, True)
    assert full.detail == (
        "asked for 4 units on one card; the most free on one card of n1 is 0 of 15 (card 0), "
        "its largest card has 15"
    )


def test_a_full_card_of_just_that_size_may_have_room_again() -> None:
    assert not refused(place(state(14), make_request(15))).never


def test_a_node_without_shared_cards_will_not_have_room_later() -> None:
    answer = refused(place(NodeState(Node("n1", ()), (), ()), make_request(4)))
    assert answer == not_shared("n1")
    assert answer.never


# -- compute -----------------------------------------------------------------------------------------------


def dividing(*left: int, core: tuple[int, ...], required: bool = False) -> NodeState:
    node = make_node(cards=[15] * len(left), compute_percent=100, compute_required=required)
    return state(*left, core=core, node=node)


def test_a_card_needs_memory_and_compute() -> None:
    nodes = dividing(15, 4, 15, core=(10, 100, 40))
    assert place(nodes, make_request(4, core=30)) == make_placement("n1", 4, 1, core=30)
    assert place(nodes, make_request(8, core=30)) == make_placement("n1", 8, 2, core=30)
    assert isinstance(place(nodes, make_request(8, core=30), slots=(0,)), Refusal)


def test_too_little_compute_is_told_with_the_most_there_is_beside_the_memory() -> None:
    answer = refused(place(dividing(4, 3, 4, core=(10, 100, 40)), make_request(4, core=50)))
    assert (answer.reason, answer.never) == (NO_CORE.format(name=GPU_CORE), False)
    assert answer.detail == (
        "asked for 50 % of the compute of one card that has 4 units free; the most left on such a card of "
        "n1 is 40 %"
    )


def test_all_the_compute_of_a_card_may_be_there_later() -> None:
    assert not refused(place(dividing(15, core=(50,)), make_request(4, core=100))).never


def test_compute_of_a_node_that_does_not_divide_it_is_never_there() -> None:
    answer = refused(place(state(15), make_request(4, core=20)))
    assert (answer.reason, answer.never) == (NO_CORE.format(name=GPU_CORE), True)


def test_where_no_card_has_the_memory_that_is_what_is_told() -> None:
    assert refused(place(dividing(3, core=(100,)), make_request(4, core=20))).reason == NO_ROOM


def test_a_node_that_wants_both_takes_no_pod_that_asks_for_memory_alone() -> None:
    both = dividing(15, 15, core=(100, 100), required=True)
    for slots in (None, (0,)):
        answer = refused(place(both, make_request(4), slots))
        assert (answer.reason, answer.never) == (
            CORE_REQUIRED.format(name=GPU_CORE),
            True,
        )
    assert place(both, make_request(4, core=20)) == make_placement("n1", 4, 0, core=20)
    assert refused(place(both, make_request(20, core=20))).reason == NO_ROOM


def test_a_request_for_nothing_in_particular_has_no_share_of_compute() -> None:
    assert place(state(15), Request(units=4)) == make_placement("n1", 4, 0)


def test_a_node_that_gives_cards_out_whole_says_that_it_shares_none() -> None:
    whole = with_unhealthy(make_node(cards=(15,), shared=False), frozenset())
    assert refused(place(state(0, node=whole), make_request(4))) == not_shared("n1")
