"""Victims are picked card by card, and no more of them than needed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from gpuslice.core import preemption
from gpuslice.core.contract import NEUTRAL_NAMES
from gpuslice.core.holds import NodeHolds
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod, Request
from tests.builders import make_node, make_pod, make_request


def book_of(*pods: Pod, cards: tuple[int, ...] = (8, 8)) -> NodeHolds:
    ledger = Ledger()
    ledger.apply_node(make_node(cards=cards))
    for pod in pods:
        ledger.apply_pod(pod)
    allocations = ledger.holds.on("n1")
    assert allocations is not None
    return allocations


def pod(name: str, card: int, memory: int = 4, priority: int = 0) -> Pod:
    return make_pod(name, memory, uid=name, node="n1", card=card, priority=priority)


def victims(
    allocations: NodeHolds, request: Request, priority: int, proposed: Collection[str], **more: Any
) -> set[str] | None:
    found = preemption.victims(allocations, request, priority, proposed, **more)
    return None if found is None else set(found.uids)


FULL = (pod("a", 0), pod("b", 0), pod("c", 1), pod("d", 1))


def test_half_of_two_cards_becomes_the_whole_of_one() -> None:
    assert victims(book_of(*FULL), make_request(8), 10, ["a", "c"]) in ({"a", "b"}, {"c", "d"})


def test_a_choice_that_helps_on_the_cards_stands() -> None:
    assert victims(book_of(*FULL), make_request(8), 10, ["c", "d"]) == {"c", "d"}


def test_no_more_are_evicted_than_needed() -> None:
    assert victims(book_of(*FULL), make_request(3), 10, []) in ({"a"}, {"b"}, {"c"}, {"d"})


def test_the_lowest_priorities_go() -> None:
    pods = (
        pod("a", 0, priority=5),
        pod("b", 0, priority=1),
        pod("c", 1, priority=4),
        pod("d", 1, priority=4),
    )
    assert victims(book_of(*pods), make_request(4), 10, []) == {"b"}
    assert victims(book_of(*pods), make_request(8), 10, []) == {"c", "d"}


def test_equals_and_betters_stay() -> None:
    assert victims(book_of(*FULL), make_request(8), 0, []) is None
    assert victims(book_of(pod("a", 0, 8, priority=20), pod("b", 1, 8)), make_request(8), 10, []) == {"b"}


def test_nobody_is_evicted_for_a_pod_that_asks_by_names_the_node_does_not_offer() -> None:
    other = replace(make_request(8), names=NEUTRAL_NAMES)
    assert preemption.eviction(book_of(*FULL), make_request(8), 10) is not None
    assert preemption.eviction(book_of(*FULL), other, 10) is None
    assert victims(book_of(*FULL), other, 10, ["a", "b"]) is None


def test_a_pod_larger_than_any_card_is_not_helped() -> None:
    assert victims(book_of(*FULL), make_request(9), 10, ["a", "b", "c"]) is None


def test_what_is_in_the_way_of_other_resources_goes_too() -> None:
    assert victims(book_of(*FULL), make_request(4), 10, ["web", "a"]) == {"web", "a"}
    assert victims(book_of(*FULL), make_request(8), 10, ["web", "a"]) == {"web", "a", "b"}


def test_a_pod_for_several_cards_needs_room_on_each() -> None:
    pods = (pod("a", 0), pod("b", 1), pod("c", 2, 8, priority=5))
    assert victims(book_of(*pods, cards=(8, 8, 8)), make_request(12, cards=2), 10, []) == {"a", "b"}


def test_what_kube_scheduler_evicts_for_others_again_is_not_evicted() -> None:
    """By its sum it makes room for those before the pod as well, whose victims it does not know."""
    allocations = book_of(*FULL)
    assert victims(allocations, make_request(8), 10, ["a", "b", "c", "d"], taken={0: (8, 0)}) == {"c", "d"}


def test_what_it_evicts_for_something_else_is_evicted_all_the_same() -> None:
    every, allocations = ["a", "b", "c", "d"], book_of(*FULL)
    short = {"taken": {0: (8, 0)}, "suffices": lambda gone: len(set(gone)) > 2}
    assert victims(allocations, make_request(8), 10, every, **short) == set(every)


def test_where_all_that_is_needed_leaves_already_those_are_named() -> None:
    """kube-scheduler takes no answer without victims."""
    going = [make_pod(name, 4, uid=name, node="n1", card=1, terminating=True) for name in "cd"]
    allocations = book_of(pod("a", 0), pod("b", 0), *going)
    assert victims(allocations, make_request(8), 10, ["a", "b"], taken={0: (8, 0)}) == {"c", "d"}


def test_where_a_card_is_free_but_those_before_the_pod_want_for_room_its_choice_stands() -> None:
    """kube-scheduler lets nobody in while its sum does not suffice for all who are nominated."""
    allocations = book_of(*FULL, cards=(8, 8, 8))
    assert victims(allocations, make_request(8), 10, ["a", "b"], taken={0: (8, 0), 1: (8, 0)}) == {"a", "b"}
