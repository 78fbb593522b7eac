"""Which cards belong together, and what follows from it for nodes, replays, explanations and the agent."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.card_links import (
    CardLinks,
    Link,
    card_links,
    closest,
    decode_links,
    encode_links,
    links_lost,
    weakest_link,
)
from gpuslice.core.errors import ContractError
from gpuslice.core.explanation import why_there
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement
from gpuslice.core.placement import place
from gpuslice.core.policy import POLICIES, Fleet, FleetNode, Shape
from gpuslice.core.simulation.capacity import place_all
from gpuslice.core.views import node_of
from tests.builders import make_node, make_pod, make_request
from tests.unit import fleets

PAIRS = decode_links("311,11,3", 4)  # 0-1 and 2-3 by NVLink


def grouped(*levels: tuple[Link, list[int]]) -> CardLinks:
    """By groups within groups: each level names the group of each card, the first that is shared counts."""
    count = len(levels[0][1])
    return card_links(
        [
            [
                next((link for link, group in levels if group[one] == group[other]), Link.SYSTEM)
                for other in range(one + 1, count)
            ]
            for one in range(count - 1)
        ]
    )


@st.composite
def machines(draw: st.DrawFn) -> CardLinks:
    """Two to eight cards on one or two CPUs, on switches there, and of these some joined by NVLink."""
    count = draw(st.integers(2, 8))
    cpu = [draw(st.integers(0, 1)) for _ in range(count)]
    switch = [side * 2 + draw(st.integers(0, 1)) for side in cpu]
    pair = [each * 2 + draw(st.integers(0, 1)) for each in switch]
    return grouped((Link.NVLINK, pair), (Link.SWITCH, switch), (Link.NUMA, cpu))


@given(machines())
def test_what_the_agent_writes_is_what_the_extender_reads(links: CardLinks) -> None:
    assert decode_links(encode_links(links), max(2, len(links))) == links


@pytest.mark.parametrize("text", ["3", "311,11", "311,11,9", "31,1", "311,11,3,", "x"])
def test_links_that_are_not_of_these_cards_are_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ContractError, match=r'annotation "gpuslice.io/links" is .*, must be for each of 4'):
        decode_links(text, 4)


def test_cards_that_are_all_alike_are_nothing_to_keep() -> None:
    assert decode_links("333,33,3", 4) == ()
    assert encode_links(()) == ""


@given(machines(), st.data())
def test_no_other_cards_are_better_joined_than_those_that_are_chosen(
    links: CardLinks, data: st.DataObject
) -> None:
    if not links:
        return
    slots = data.draw(
        st.permutations(range(len(links))).flatmap(
            lambda order: st.integers(1, len(order)).map(lambda size: list(order)[:size])
        )
    )
    count = data.draw(st.integers(1, len(slots)))
    chosen = closest(links, slots, count)
    assert len(set(chosen)) == count
    assert set(chosen) <= set(slots)
    if count > 1:
        best = max(weakest_link(links, each) or 0 for each in combinations(slots, count))
        assert weakest_link(links, chosen) == best


def test_among_equally_joined_cards_those_are_taken_of_which_the_last_comes_first() -> None:
    assert closest(PAIRS, [3, 0, 1, 2], 2) == [0, 1]
    assert closest(PAIRS, [0, 3, 1, 2], 2) == [0, 1]
    assert closest((), [3, 0, 1], 2) == [3, 0]


def linked(name: str, left: list[int], links: CardLinks = PAIRS) -> FleetNode:
    return FleetNode(name, [10] * len(left), left, links=links)


@pytest.mark.parametrize("policy", [each.name for each in POLICIES])
def test_a_pod_of_two_cards_gets_two_that_are_joined_by_nvlink(policy: str) -> None:
    """Cards 0 and 2 are the fullest that fit, 1 and 3 the emptiest; neither pair is joined."""
    (by_name,) = [each for each in POLICIES if each.name == policy]
    fleet = Fleet()
    fleet.put(linked("n1", [5, 10, 6, 10]))
    found = fleets.place(fleet, by_name(fleet), Shape(4, 2))
    assert found is not None
    assert found[1] in {(0, 1), (2, 3)}


@pytest.mark.parametrize("policy", [each.name for each in POLICIES])
def test_a_node_that_still_has_two_joined_cards_comes_before_one_that_has_not(policy: str) -> None:
    (by_name,) = [each for each in POLICIES if each.name == policy]
    for order in (1, -1):
        fleet = Fleet()
        for node in [linked("torn", [10, 0, 10, 0]), linked("whole", [10] * 4)][::order]:
            fleet.put(node)
        found = fleets.place(fleet, by_name(fleet), Shape(4, 2))
        assert found is not None
        assert found[0] == fleet.row_of["whole"]


def test_a_node_loses_nothing_by_what_it_never_had() -> None:
    """On an empty node three cards are not joined by NVLink either."""
    assert links_lost(PAIRS, 0b1111, 3) == 0
    assert links_lost(PAIRS, 0b0101, 2) == Link.NVLINK - Link.NUMA
    assert links_lost(PAIRS, 0b0001, 2) == 0


def test_what_a_row_knew_of_its_cards_goes_with_its_node() -> None:
    fleet = Fleet()
    row = fleet.put(linked("n1", [10] * 4))
    clock = fleet.clock
    fleet.put(linked("n1", [10] * 4, links=()))
    assert fleet.links == {}
    assert fleet.changed_since(clock).tolist() == [row]
    fleet.put(linked("n1", [10] * 4))
    fleet.drop("n1")
    assert fleet.links == {}


def test_a_node_of_the_api_tells_how_its_cards_are_joined_or_what_cannot_be_read() -> None:
    capacity = {"aliyun.com/gpu-mem": "60", "aliyun.com/gpu-count": "4"}
    labels = {"cgpu": "true"}
    annotations = {"gpuslice.io/links": "311,11,3"}
    good = node_of(name="n1", labels=labels, annotations=annotations, capacity=capacity)
    assert good.links == PAIRS
    annotations = {"gpuslice.io/links": "311"}
    bad = node_of(name="n1", labels=labels, annotations=annotations, capacity=capacity)
    assert bad.links == ()
    assert bad.problem.startswith('annotation "gpuslice.io/links" is "311"')


def test_a_nodes_own_way_of_packing_keeps_cards_together_too() -> None:
    ledger = Ledger()
    ledger.apply_node(make_node("a", (8, 8, 8, 8), packing="spread", links=PAIRS))
    ledger.apply_pod(make_pod("other", 2, node="a", card=0))
    state = ledger.state("a")
    assert state is not None
    chosen = place(state, make_request(8, cards=2))
    assert isinstance(chosen, Placement)
    assert [part.card for part in chosen.slices] == [2, 3]


def test_who_asks_why_is_told_how_the_cards_are_joined() -> None:
    ledger = Ledger()
    ledger.apply_node(make_node("a", (8, 8, 8, 8), links=PAIRS))
    told = {}
    for cards in ((0, 1), (1, 2)):
        mine = make_pod("mine", 8, node="a", cards=cards)
        ledger.apply_pod(mine)
        state = ledger.state("a")
        assert state is not None
        told[cards] = list(why_there(state, mine))
        ledger.remove_pod(mine.uid)
    assert told[0, 1] == [
        "Its cards reach each other through NVLink; they differ in that on this node.",
        "It is already on the best joined and fullest cards that have room for it.",
    ]
    assert told[1, 2] == ["Its cards reach each other through one CPU; they differ in that on this node."]


def test_a_simulation_counts_how_cards_are_joined() -> None:
    nodes, pods = [linked("n1", [10] * 4)], [Shape(10), Shape(10), Shape(10, 2)]
    assert place_all(nodes, [Shape(10, 2), Shape(10, 2)], "binpack").joined == {Link.NVLINK: 2}
    assert place_all(nodes, pods, "binpack").joined == {Link.NVLINK: 1}
    assert place_all(nodes, [Shape(10), Shape(10, 3)], "binpack").joined == {Link.NUMA: 1}
    assert place_all([linked("n1", [10] * 4, links=())], pods, "binpack").joined == {}
