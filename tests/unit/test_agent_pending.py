"""Which device ids the agent proposes and accepts: the decisions behind kubelet's two questions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.apps.agent.pending import (
    PendingContainer,
    Proposal,
    Recipient,
    TentativeGrant,
    pending_containers,
    propose,
    recipient_of,
)
from gpuslice.apps.agent.pods import NodePod
from gpuslice.core.contract import device_id
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.grant import GrantError, units_per_card
from gpuslice.core.model import ContainerKind, ContainerRequest, Pod, Refusal, Request
from tests.builders import make_node, make_placement, make_pod, make_request

NODE = make_node(cards=(15, 15))
UUIDS = [gpu.uuid for gpu in NODE.cards]


def ids(card: int, *units: int) -> list[str]:
    return [device_id(UUIDS[card], unit) for unit in units]


def free(*amounts: int) -> list[str]:
    """The last so many units of each card."""
    return [one for card, amount in enumerate(amounts) for one in ids(card, *range(15 - amount, 15))]


def wants(*pods: Pod, served: Iterable[tuple[str, str]] = (), created: str = "") -> list[PendingContainer]:
    return pending_containers([NodePod(pod, created) for pod in pods], set(served), {})


def cards_of(answer: Proposal | Refusal) -> dict[int, int]:
    assert isinstance(answer, Proposal), answer
    return {UUIDS.index(uuid): count for uuid, count in units_per_card(answer.ids).items()}


def containers(*amounts: int, card_count: int = 1) -> Request:
    made = tuple(ContainerRequest(f"c{place}", place, amount) for place, amount in enumerate(amounts))
    return Request(sum(amounts), card_count, containers=made)


# -- proposing -------------------------------------------------------------------------------------------
def test_the_annotated_card_is_proposed_although_another_fits_better() -> None:
    assert cards_of(propose(free(4, 15), [], 4, wants(make_pod(card=1)), NODE)) == {1: 4}


def test_the_pod_that_was_placed_first_is_served_first() -> None:
    late = make_pod("late", card=0, assume_time_ns=2)
    early = make_pod("early", card=1, assume_time_ns=1)
    assert cards_of(propose(free(15, 15), [], 4, wants(late, early), NODE)) == {1: 4}


def test_a_wish_whose_card_is_full_does_not_hide_the_next_one() -> None:
    first = make_pod("first", card=0, assume_time_ns=1)
    second = make_pod("second", card=1, assume_time_ns=2)
    assert cards_of(propose(free(3, 15), [], 4, wants(first, second), NODE)) == {1: 4}


def test_without_a_wish_the_smallest_room_that_is_enough_is_taken() -> None:
    assert cards_of(propose(free(9, 5), [], 4, [], NODE)) == {1: 4}


def test_free_units_of_a_card_out_of_use_are_not_told_of_as_room() -> None:
    node = make_node(cards=(15, 15), unhealthy=frozenset({1}))
    answer = propose(free(3, 15), [], 4, [], node)
    assert isinstance(answer, Refusal)
    assert answer.reason.endswith("(free units: card 0: 3, card 1: out of use)")


def test_an_unhealthy_card_is_not_taken_for_want_of_a_wish() -> None:
    node = make_node(cards=(15, 15), unhealthy=frozenset({1}))
    assert cards_of(propose(free(9, 5), [], 4, [], node)) == {0: 4}


def test_reused_ids_stay_in_and_the_rest_comes_from_their_card() -> None:
    must = ids(1, 0, 1)
    answer = propose([*free(15, 9), *must], must, 4, wants(make_pod(card=0)), NODE)
    assert cards_of(answer) == {1: 4}
    assert isinstance(answer, Proposal)
    assert set(must) <= set(answer.ids)


def test_a_pod_on_two_cards_gets_half_of_each() -> None:
    pod = make_pod(memory=8, cards=(0, 1))
    assert cards_of(propose(free(15, 4), [], 8, wants(pod), NODE)) == {0: 4, 1: 4}
    assert isinstance(propose(free(15, 3), [], 8, wants(pod), NODE), Refusal)


def test_too_little_room_is_told_card_by_card() -> None:
    answer = propose(free(3, 2), [], 4, wants(make_pod(card=0)), NODE)
    assert isinstance(answer, Refusal)
    assert answer.reason == (
        "node n1 has no room for 4 units of aliyun.com/gpu-mem on one card (free units: card 0: 3, card 1: 2)"
    )


def test_too_little_room_on_several_cards_is_told_by_each_ones_part() -> None:
    answer = propose(free(3, 15), [], 8, wants(make_pod(memory=8, cards=(0, 1))), NODE)
    assert isinstance(answer, Refusal)
    assert "no room for 4 units of aliyun.com/gpu-mem on each of 2 cards" in answer.reason


def test_the_wish_of_another_amount_is_nobodys_for_this_one() -> None:
    answer = propose(free(15, 9), [], 4, wants(make_pod(memory=8, card=0)), NODE)
    assert cards_of(answer) == {1: 4}
    assert isinstance(answer, Proposal)
    assert answer.pending is None


def test_who_was_placed_by_nobody_gets_what_fits_best() -> None:
    answer = propose(free(15, 9), [], 4, wants(make_pod("placed", 6, card=0), make_pod("plain")), NODE)
    assert isinstance(answer, Proposal)
    assert answer.pending is not None
    assert (answer.pending.pod.view.name, answer.pending.cards, cards_of(answer)) == ("plain", (), {1: 4})


def test_a_pod_for_two_cards_that_nobody_placed_gets_half_of_each() -> None:
    plain = make_pod(request=make_request(8, cards=2))
    assert cards_of(propose(free(15, 4), [], 8, wants(plain), NODE)) == {0: 4, 1: 4}


def test_what_must_be_used_draws_the_rest_to_its_card_also_without_a_wish() -> None:
    must = ids(1, 0, 1)
    assert cards_of(propose([*free(5, 9), *must], must, 4, [], NODE)) == {1: 4}
    assert cards_of(propose([*free(5, 9), *must], must, 2, wants(make_pod(memory=2, card=1)), NODE)) == {1: 2}


def test_an_amount_that_its_cards_cannot_halve_goes_where_it_fits() -> None:
    pod = Pod("u", "d", "p", request=containers(3, 5), placement=make_placement("n1", 8, 0, 1))
    assert cards_of(propose(free(15, 4), [], 3, wants(pod), NODE)) == {1: 3}


def test_ids_that_somebody_runs_with_are_for_nobody_else() -> None:
    """kubelet takes them for free: it forgot them with its checkpoint."""
    kept = dict.fromkeys(ids(1, 13, 14), "uid-runs")
    assert cards_of(propose(free(15, 5), [], 4, [], NODE, in_use=kept)) == {0: 4}
    assert isinstance(propose(free(3, 5), [], 4, [], NODE, in_use=kept), Refusal)
    mine = make_pod(card=1, uid="uid-runs", assigned=True)
    answer = propose(free(15, 5), [], 4, wants(mine), NODE, in_use=kept)
    assert isinstance(answer, Proposal)
    assert set(answer.ids) == {*ids(1, 10, 11, 12), *ids(1, 13)}, "its own come last"


def test_devices_of_cards_that_are_gone_are_not_proposed() -> None:
    assert cards_of(propose(["GPU-gone-_-1", "nonsense", *free(5, 0)], [], 4, [], NODE)) == {0: 4}


def test_must_include_of_a_foreign_card_is_refused() -> None:
    answer = propose(free(15, 15), ["GPU-elsewhere-_-1"], 4, [], NODE)
    assert isinstance(answer, Refusal)
    assert "GPU-elsewhere-_-1" in answer.reason


@given(
    room=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    size=st.integers(1, 15),
    card=st.sampled_from([None, 0, 1]),
)
def test_a_proposal_is_whole_free_and_of_one_card(room: tuple[int, int], size: int, card: int | None) -> None:
    pods = [make_pod(memory=size, card=card)] if card is not None else []
    available = free(*room)
    answer = propose(available, [], size, wants(*pods), NODE)
    if max(room) < size:
        assert isinstance(answer, Refusal)
    else:
        assert isinstance(answer, Proposal)
        assert len(set(answer.ids)) == size
        assert set(answer.ids) <= set(available)
        assert len(cards_of(answer)) == 1
        if card is not None and room[card] >= size:
            assert cards_of(answer) == {card: size}


# -- accepting -------------------------------------------------------------------------------------------
def test_ids_are_for_the_pod_that_was_placed_on_their_card() -> None:
    other = make_pod("other", card=0, assume_time_ns=1)
    mine = make_pod("mine", card=1, assume_time_ns=2)
    recipient = recipient_of(frozenset(ids(1, 0, 1, 2, 3)), wants(other, mine), [], [], NODE)
    assert isinstance(recipient, Recipient)
    assert recipient.pending is not None
    assert recipient.pending.pod.view.name == "mine"


def test_ids_of_two_cards_are_refused_unless_a_pod_was_placed_like_that() -> None:
    mixed = frozenset([*ids(0, 0, 1), *ids(1, 0, 1)])
    refused = recipient_of(mixed, wants(make_pod(card=0)), [], [], NODE, unplaced=True)
    assert isinstance(refused, Refusal)
    assert "(2 of card 0, 2 of card 1)" in refused.reason
    spread = recipient_of(mixed, wants(make_pod(memory=4, cards=(0, 1))), [], [], NODE)
    assert isinstance(spread, Recipient)


def test_an_uneven_mix_is_refused_also_for_a_pod_on_two_cards() -> None:
    mixed = frozenset([*ids(0, 0, 1, 2), *ids(1, 0)])
    assert isinstance(recipient_of(mixed, wants(make_pod(memory=4, cards=(0, 1))), [], [], NODE), Refusal)


def test_the_same_ids_again_are_granted_again() -> None:
    again = frozenset(ids(0, 0, 1, 2, 3))
    guess = TentativeGrant("uid-p", "main", again, 0.0)
    assert recipient_of(again, [], [guess], [], NODE) == Recipient(again=guess)


def test_ids_that_kubelets_book_shows_are_granted_again_and_others_like_them_are_not() -> None:
    held = DeviceAssignment("default", "p", "main", frozenset(ids(0, 0, 1, 2, 3)))
    assert recipient_of(held.ids, [], [], [held], NODE) == Recipient()
    assert isinstance(recipient_of(frozenset(ids(0, 4, 5, 6, 7)), [], [], [held], NODE), Refusal)


def test_a_pod_that_nobody_placed_is_given_one_card_where_that_is_allowed() -> None:
    one = frozenset(ids(0, 0, 1, 2, 3))
    assert recipient_of(one, [], [], [], NODE, unplaced=True) == Recipient()
    assert isinstance(recipient_of(one, [], [], [], NODE), Refusal)


def test_an_app_container_may_get_any_mix_of_its_init_containers_ids() -> None:
    init = frozenset([*ids(0, 0, 1), *ids(1, 0, 1)])
    request = Request(
        4,
        2,
        containers=(
            ContainerRequest("init", 0, 4, kind=ContainerKind.INIT),
            ContainerRequest("app", 0, 2),
        ),
    )
    pod = make_pod(memory=4, cards=(0, 1))
    pod = Pod(uid="u", namespace="default", name="p", request=request, placement=pod.placement)
    waiting = wants(pod, served=[("u", "init")])
    recipient = recipient_of(
        frozenset(ids(0, 0, 1)), waiting, [TentativeGrant("u", "init", init, 0.0)], [], NODE
    )
    assert isinstance(recipient, Recipient)
    assert recipient.pending is not None
    assert recipient.pending.container.name == "app"


@pytest.mark.parametrize("bad", [["GPU-elsewhere-_-1"], ["x"]])
def test_foreign_ids_are_an_error_that_names_them(bad: list[str]) -> None:
    with pytest.raises(GrantError, match=bad[0].split("-_-", maxsplit=1)[0]):
        recipient_of(frozenset(bad), [], [], [], NODE)


# -- who is next -----------------------------------------------------------------------------------------
def test_a_pod_that_is_half_admitted_comes_before_older_ones() -> None:
    half = make_pod("half", card=1, assume_time_ns=9)
    half = Pod(uid="half", namespace="d", name="half", request=containers(2, 2), placement=half.placement)
    old = make_pod("old", 2, card=0, assume_time_ns=1)
    assert [want.pod.view.name for want in wants(old, half, served=[("half", "c0")])] == ["half", "old"]


def test_whatever_comes_before_a_served_container_was_served() -> None:
    request = Request(
        4, containers=(ContainerRequest("i", 0, 4, kind=ContainerKind.INIT), ContainerRequest("a", 0, 2))
    )
    pod = Pod(uid="u", namespace="d", name="p", request=request, placement=make_placement())
    assert [want.container.name for want in wants(pod)] == ["i", "a"]
    assert wants(pod, served=[("u", "a")]) == []


def test_of_several_served_containers_the_last_counts() -> None:
    pod = Pod(uid="u", namespace="d", name="p", request=containers(2, 2, 2), placement=make_placement())
    (want,) = wants(pod, served=[("u", "c0"), ("u", "c1")])
    assert (want.container.name, want.next_of_pod, want.begun) == ("c2", True, True)
    assert [(each.next_of_pod, each.begun) for each in wants(pod)] == [
        (True, False),
        (False, False),
        (False, False),
    ]


def test_only_pods_of_init_containers_alone_are_never_listed_by_kubelet() -> None:
    init = ContainerRequest("i", 0, 4, kind=ContainerKind.INIT)
    app = ContainerRequest("a", 0, 2)
    only, both = Request(4, containers=(init,)), Request(4, containers=(init, app))
    assert [each.never_listed for each in wants(make_pod(request=only))] == [True]
    assert [each.never_listed for each in wants(make_pod(request=both))] == [False, False]


def test_pods_that_had_their_devices_once_ask_in_the_order_of_their_creation() -> None:
    pods = [
        NodePod(make_pod("b", card=0, assigned=True, assume_time_ns=1), "2026-01-02T00:00:00Z"),
        NodePod(make_pod("a", card=1, assigned=True, assume_time_ns=2), "2026-01-01T00:00:00Z"),
        NodePod(make_pod("new", card=1, assume_time_ns=3), "2026-01-03T00:00:00Z"),
    ]
    assert [want.pod.view.name for want in pending_containers(pods, set(), {})] == ["new", "a", "b"]


@pytest.mark.parametrize("state", [{"finished": True}, {"terminating": True}, {"request": None}])
def test_pods_that_end_or_ask_for_nothing_want_nothing(state: dict[str, Any]) -> None:
    assert wants(make_pod(card=0, **state)) == []
