"""Why a pod waits: nodes in classes, and what follows from them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.explanation import (
    NOT_SHARED,
    ROOM,
    explain,
    room_by_eviction,
    room_in_the_making,
    why_there,
)
from gpuslice.core.host_resources import HostResources
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement
from gpuslice.core.node_filters import NodeFilters, Occupant, Place, Taint, Toleration, Wish
from gpuslice.core.placement import place
from gpuslice.core.units import MIB
from tests.builders import make_node, make_pod, make_request


def obstacle(node: Place, wish: Wish) -> str:
    return NodeFilters([node], wish).obstacle(node)


TEAM = Taint("team", "b")


@pytest.mark.parametrize(
    ("toleration", "covers"),
    [
        (Toleration("team", "Equal", "b"), True),
        (Toleration("team", "Equal", "b", "NoSchedule"), True),
        (Toleration("team", "Equal", "b", "NoExecute"), False),
        (Toleration("team", "Equal", "a"), False),
        (Toleration("team", "Exists"), True),
        (Toleration("", "Exists"), True),
        (Toleration("", "Equal", "b"), False),
        (Toleration("other", "Exists"), False),
    ],
)
def test_a_toleration_covers_what_kubernetes_says(toleration: Toleration, covers: bool) -> None:
    assert toleration.covers(TEAM) is covers
    wish = Wish(make_request(), tolerations=(toleration,))
    assert (obstacle(Place("n1", taints=(TEAM,)), wish) == "") is covers


def test_a_taint_that_only_prefers_keeps_nobody_out() -> None:
    assert not obstacle(Place("n1", taints=(Taint("a", "", "PreferNoSchedule"),)), Wish(make_request()))


def test_a_label_that_somebody_has_set_is_not_asked_for_again() -> None:
    """What is missing then is something else, which doctor finds."""
    ledger = Ledger()
    ledger.apply_node(make_node("n1", []))
    (hint,) = explain(ledger, [Place("n1", labels={"cgpu": "true"})], Wish(make_request())).hints
    assert hint == "n1 is labelled cgpu=true and does not offer that yet: see gpuslice doctor."
    (hint,) = explain(ledger, [Place("n1")], Wish(make_request())).hints
    assert hint.startswith("No node shares its cards: label one cgpu=true")
    ledger.apply_node(make_node("n1", [15]))
    wish, labels = Wish(make_request(core=30)), {"ack.node.gpu.schedule": "core_mem"}
    (hint,) = explain(ledger, [Place("n1")], wish).hints
    assert "label one ack.node.gpu.schedule=core_mem" in hint
    (hint,) = explain(ledger, [Place("n1", labels=labels)], wish).hints
    assert hint.startswith("n1 is labelled ack.node.gpu.schedule=core_mem")


H100 = {"key": "gpu", "operator": "In", "values": ["H100", "H200"]}
ZONE = {"key": "zone", "operator": "Exists"}


def requiring(*terms: dict[str, Any]) -> Wish:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
    return Wish(make_request(), affinity={"nodeAffinity": required})


def test_a_node_that_required_affinity_keeps_out_is_told_what_it_lacks() -> None:
    wish = requiring({"matchExpressions": [ZONE, H100]})
    assert obstacle(Place("n1", labels={"gpu": "H200", "zone": "a"}), wish) == ""
    told = obstacle(Place("n1", labels={"gpu": "T4", "zone": "a"}), wish)
    assert told == "Is not gpu In (H100, H200), as the pod's node affinity requires"
    either = requiring({"matchExpressions": [H100]}, {"matchExpressions": [ZONE]})
    assert obstacle(Place("n1", labels={"zone": "a"}), either) == ""
    assert obstacle(Place("n1"), either) == "Meets none of the 2 terms of the pod's node affinity"


def ledger_of(cards: dict[str, tuple[int, ...]], **used: int) -> Ledger:
    """Nodes with their cards; `used`: units held on card 0 of a node."""
    ledger = Ledger()
    for name, sizes in cards.items():
        ledger.apply_node(make_node(name, sizes))
    for name, units in used.items():
        ledger.apply_pod(make_pod(f"on-{name}", units, node=name, card=0))
    return ledger


def test_nodes_that_are_alike_make_one_class_with_the_best_of_them() -> None:
    ledger = ledger_of({"a": (8,), "b": (8,), "c": (8,)}, a=3, b=6, c=4)
    told = explain(ledger, map(Place, ["a", "b", "c", "plain"]), Wish(make_request(8)))
    full, plain = told.classes
    assert (full.nodes, full.best, full.card, full.most, full.never) == (("a", "b", "c"), "a", 0, 5, False)
    assert (plain.reason, plain.most, plain.never) == (NOT_SHARED, None, True)
    assert told.hints == ("Free in all: 11 units, but no node has 8 of them.",)


def test_pieces_on_several_cards_are_told_as_such() -> None:
    ledger = ledger_of({"a": (8, 8, 8)}, a=8)
    (hint,) = explain(ledger, [Place("a")], Wish(make_request(15, cards=3))).hints
    assert "a has 16 units free in all" in hint
    assert "5 are wanted on each of 3 cards" in hint


def test_what_no_card_can_hold_is_told_so_although_a_node_takes_nobody_now() -> None:
    ledger = ledger_of({"a": (8, 8), "b": (8,)})
    told = explain(ledger, [Place("a"), Place("b", schedulable=False), Place("plain")], Wish(make_request(9)))
    assert [each.never for each in told.classes] == [True, True, True]
    (hint,) = told.hints
    assert hint.startswith("It will never fit here: it asks for 9 units, and the largest shared card")


def test_no_shared_node_at_all_says_what_to_do() -> None:
    (hint,) = explain(Ledger(), [Place("a")], Wish(make_request())).hints
    assert "label one cgpu=true" in hint


def test_a_share_of_compute_where_no_node_divides_it_says_what_to_do() -> None:
    ledger, wish = ledger_of({"a": (8,)}), Wish(make_request(4, core=20))
    (hint,) = explain(ledger, [Place("a")], wish).hints
    assert "No node divides the compute of its cards: label one ack.node.gpu.schedule=core_mem" in hint
    ledger.apply_node(make_node("b", (2,), compute_percent=100))
    assert not any("divides" in hint for hint in explain(ledger, [Place("a"), Place("b")], wish).hints)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5), st.integers(1, 10), st.integers(1, 2))
def test_it_says_room_exactly_where_placement_finds_some(used: list[int], units: int, cards: int) -> None:
    names = [f"n{number}" for number in range(len(used))]
    held = {name: units for name, units in zip(names, used, strict=True) if units}
    ledger = ledger_of(dict.fromkeys(names, (8, 8)), **held)
    request = make_request(units * cards, cards=cards)
    told = explain(ledger, map(Place, names), Wish(request))
    roomy = {name for each in told.classes if each.reason == ROOM for name in each.nodes}
    states = ledger.snapshot()
    assert roomy == {name for name in names if isinstance(place(states[name], request), Placement)}
    assert sorted(name for each in told.classes for name in each.nodes) == names
    assert told.hints


def test_a_pod_of_priority_is_told_who_could_leave_for_it() -> None:
    ledger = ledger_of({"a": (15,), "b": (15,)}, a=8, b=9)
    places, wish = [Place("a"), Place("b", schedulable=False)], Wish(make_request(10))
    (hint,) = room_by_eviction(ledger, places, wish, make_pod("high", 10, priority=5))
    assert hint.startswith("Its priority 5 is above others': default/on-a could leave a, card 0.")
    assert not list(room_by_eviction(ledger, places, wish, make_pod("equal", 10)))


def test_a_nominated_pod_is_told_whom_it_waits_for() -> None:
    ledger = ledger_of({"a": (15,)})
    ledger.apply_pod(make_pod("old", 8, node="a", card=0, terminating=True))
    high = make_pod("high", 10, priority=5, nominated="a")
    assert list(room_in_the_making(ledger, high)) == [
        "Room is being made for it on a, card 0: default/old must leave first."
    ]
    ledger.remove_pod("uid-old")
    (hint,) = room_in_the_making(ledger, high)
    assert hint.startswith("a, card 0 is kept for it")
    assert not list(room_in_the_making(ledger, make_pod("plain", 10)))


def test_cpu_and_memory_that_are_missing_are_told_where_cards_are_free() -> None:
    ledger = ledger_of({"a": (15,), "b": (15,), "c": (15,)})
    ledger.apply_pod(make_pod("web", 0, node="a", request=None, host=HostResources(5000, 1)))
    has = {"a": (8000, 1000), "b": (2000, 1000), "c": (9000, 10)}
    places = [Place(name, allocatable={"cpu": cpu, "memory": mib * MIB}) for name, (cpu, mib) in has.items()]
    wish = Wish(make_request(4), pod=Occupant("default/p", amounts={"cpu": 4000, "memory": 100 * MIB}))
    told = explain(ledger, places, wish)
    found = {(each.reason, each.never): each.nodes for each in told.classes}
    assert {reason: nodes for (reason, _), nodes in found.items()} == {
        "Insufficient cpu": ("a", "b"),
        "Insufficient memory": ("c",),
    }
    assert told.hints[0].startswith("Cards are free on nodes that lack something else: ")
    assert "4000 milli CPU are wanted" in told.hints[0]
    assert explain(ledger, places, Wish(make_request(4))).fits


def test_too_many_cards_for_any_node_are_told_as_such() -> None:
    (hint,) = explain(
        ledger_of({"a": (8, 8), "b": (8,)}), map(Place, "ab"), Wish(make_request(12, cards=3))
    ).hints
    assert hint.endswith(
        "4 units on each of 3 cards of one node, and no node has more than 2 that large. Ask for fewer cards."
    )


@pytest.mark.parametrize(
    ("placement", "card", "which"), [("", 0, "fullest"), ("spread", 1, "emptiest"), ("", 1, "")]
)
def test_a_placed_pod_is_told_what_speaks_for_its_card(placement: str, card: int, which: str) -> None:
    ledger = Ledger()
    ledger.apply_node(make_node("a", (8, 8), packing=placement))
    ledger.apply_pod(make_pod("other", 2, node="a", card=0))
    mine = make_pod("mine", 3, node="a", card=card)
    ledger.apply_pod(mine)
    state = ledger.state("a")
    assert state is not None
    told = list(why_there(state, mine))
    assert told == ([f"It is already on the {which} card that has room for it."] if which else [])
