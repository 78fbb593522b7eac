"""How many nodes waiting pods need by cards, which of them sums hide, and which nodes could be emptied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.policy import DEFAULT_POLICY, FleetNode, Shape
from gpuslice.core.simulation.node_demand import MOST_NODES, Demand, Waiting, demand, emptied

PAIR = (16, 16)


def node(name: str, size: Sequence[int], left: Sequence[int] = (), **fields: Any) -> FleetNode:
    return FleetNode(name, size, left or size, (100,) * len(size), **fields)


def waiting(*units: int, groups: str = "pair", cards: int = 1, asked: bool = True) -> list[Waiting]:
    allowed = frozenset(groups.split())
    return [Waiting(f"{each}-{at}", Shape(each, cards), allowed, asked) for at, each in enumerate(units)]


def needed(pods: Sequence[Waiting], *left: Sequence[int], **more: FleetNode) -> Demand:
    """Of nodes with two cards of 16 units, with this much `left`; `more`: other groups without nodes."""
    there = [node(f"n{at}", PAIR, each) for at, each in enumerate(left)]
    return demand({"pair": there}, {"pair": node("new", PAIR), **more}, pods, DEFAULT_POLICY)


@pytest.mark.parametrize(
    ("pods", "left", "nodes", "hidden"),
    [
        (waiting(6), [(4, 4)], 1, 1),
        (waiting(6), [(4, 8)], 0, 0),  # it fits on a card
        (waiting(6), [(1, 1)], 1, 0),  # every autoscaler sees that
        (waiting(*[6] * 10), [(4, 4)], 3, 1),  # by sums five fit on a new node, and one on the old
        (waiting(9, 9, 9), [], 2, 1),
        (waiting(16, cards=2), [(8, 8)], 1, 0),
        (waiting(10, cards=2), [(9, 16), (16, 9)], 1, 1),
        ([*waiting(6), *waiting(12, asked=False)], [(4, 4)], 1, 0),  # the node for one holds the other too
    ],
)
def test_what_sums_hide_is_what_cards_need_beyond_it(
    pods: list[Waiting], left: list[tuple[int, int]], nodes: int, hidden: int
) -> None:
    found = needed(pods, *left)
    assert (found.nodes.get("pair", 0), found.hidden.get("pair", 0)) == (nodes, hidden)


def test_no_node_is_added_for_a_pod_that_none_holds_even_empty() -> None:
    found = needed(waiting(20, 6), (4, 4))
    assert found.nodes == {"pair": 1}
    assert found.nowhere == {"20-0"}


def test_a_pod_takes_the_room_there_is_before_that_of_new_nodes() -> None:
    found = needed([*waiting(20, groups="large"), *waiting(6, 4)], (4, 4), large=node("new", (32,)))
    assert found.nodes == {"pair": 1, "large": 1}
    both = needed(waiting(20, 6, 4, groups="pair large"), (4, 4), large=node("new", (32,)))
    assert both.nodes == {"large": 1}
    assert both.group_of == {"20-0": "large", "6-1": "large"}


def test_the_smallest_group_that_holds_a_pod_gets_the_node() -> None:
    large, larger = node("new", (32,)), node("new", (80, 80))
    pods = waiting(20, groups="pair large larger")
    assert needed(pods, PAIR, large=large, larger=larger).hidden == {"large": 1}
    assert needed(waiting(20, groups="larger"), PAIR, large=large, larger=larger).nodes == {"larger": 1}


def test_a_pod_that_sums_would_hold_and_nobody_asks_about_waits_for_something_else() -> None:
    assert not needed(waiting(6, asked=False), (4, 4)).nodes


def test_pods_that_lack_cpu_get_a_node_which_autoscalers_see() -> None:
    pods = [Waiting("p", Shape(6, cpu_milli=4000), frozenset({"pair"}))]
    there = {"pair": [node("n0", PAIR, cpu_milli=8000, cpu_left=1000)]}
    new = {"pair": node("new", PAIR, cpu_milli=8000, cpu_left=8000)}
    found = demand(there, new, pods, DEFAULT_POLICY)
    assert (found.nodes, found.hidden) == ({"pair": 1}, {})


def test_what_is_added_at_once_is_bounded() -> None:
    pods = waiting(*[16] * (3 * MOST_NODES))
    assert needed(pods).nodes == {"pair": MOST_NODES}
    new = {"pair": node("new", PAIR)}
    assert demand({}, new, pods, DEFAULT_POLICY, most=len(pods)).nodes == {"pair": 1.5 * MOST_NODES}


@given(
    st.lists(st.integers(1, 24), max_size=12),
    st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16)), max_size=4),
)
def test_all_pods_that_fit_an_empty_node_find_a_card_once_the_nodes_are_there(
    units: list[int], left: list[tuple[int, int]]
) -> None:
    pods = waiting(*units)
    found = needed(pods, *left)
    again = needed(pods, *left, *[PAIR] * found.nodes.get("pair", 0))
    assert not again.nodes
    assert found.nowhere == {each.uid for each in pods if each.shape.units > 16}
    assert found.hidden.get("pair", 0) <= found.nodes.get("pair", 0)


# -- nodes that could go -----------------------------------------------------------------------------------


def moves(pods: dict[str, dict[str, int]], **left: tuple[int, int]) -> dict[str, dict[str, str]]:
    there = {"pair": [node(name, PAIR, each) for name, each in left.items()]}
    shapes = {name: {pod: Shape(units) for pod, units in held.items()} for name, held in pods.items()}
    return emptied(there, shapes, DEFAULT_POLICY)


def test_a_node_can_go_if_the_others_hold_its_pods_card_by_card() -> None:
    assert moves({"n1": {"a": 6}}, n0=(4, 8), n1=(10, 16)) == {"n1": {"a": "n0"}}
    assert moves({"n1": {"a": 6}}, n0=(4, 4), n1=(10, 16)) == {}  # by sums it could
    assert moves({"n1": {"a": 6, "b": 4}}, n0=(6, 3), n1=(10, 12)) == {}


def test_no_pod_moves_to_a_node_that_is_empty_or_goes_too() -> None:
    assert moves({"n0": {"a": 6}}, n0=(10, 16), n1=PAIR) == {}
    both = {"n0": {"a": 6}, "n1": {"b": 6}}
    assert moves(both, n0=(10, 16), n1=(10, 16)) == {"n0": {"a": "n1"}}
    three = {f"n{at}": {f"p{at}": 6} for at in range(3)}
    assert len(moves(three, n0=(10, 16), n1=(10, 16), n2=(10, 16))) == 2
