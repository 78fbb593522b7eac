"""When `opportunity-cost` keeps nodes whole for pods of several cards: while they are short of slots."""

from __future__ import annotations

import numpy as np
import pytest

from gpuslice.core.policy import Fleet, OpportunityCost, Shape
from gpuslice.core.policy.layout import layout_of
from gpuslice.core.policy.slot_price import SlotDemand, Turnover
from tests.unit.fleets import make_fleet, make_fleet_node, place

SINGLE, SEVERAL = Shape(10, cpu_milli=4), Shape(10, 4, cpu_milli=16)
HEAVY = Shape(10, cpu_milli=12)


def fleet_with_empty_nodes(count: int) -> Fleet:
    """Nodes of four cards: on the first, three are free with the cores for three; the others are empty."""
    fleet = Fleet()
    fleet.put(make_fleet_node("begun", (10,) * 4, left=(0, 10, 10, 10), cpu_milli=48.0, cpu_left=12.0))
    for number in range(count):
        fleet.put(make_fleet_node(f"empty{number}", (10,) * 4, cpu_milli=48.0, cpu_left=48.0))
    return fleet


@pytest.mark.parametrize(("empty", "begun"), [(20, False), (1, True)], ids=["ample", "short"])
def test_a_node_is_kept_whole_for_a_larger_pod_while_slots_are_short(empty: int, begun: bool) -> None:
    fleet = fleet_with_empty_nodes(empty)
    several = 2.0 if begun else 0.5
    policy = OpportunityCost(fleet, {SINGLE: 10.0, SEVERAL: several})
    assert (policy.choose(HEAVY) == fleet.row_of["begun"]) == begun


def test_pods_that_no_empty_node_holds_do_not_make_slots_dear() -> None:
    fleet = fleet_with_empty_nodes(20)
    policy = OpportunityCost(fleet, {SINGLE: 10.0, SEVERAL: 0.5})
    for _ in range(30):
        assert place(fleet, policy, Shape(10, 4, cpu_milli=100)) is None
    assert policy.choose(HEAVY) != fleet.row_of["begun"]


def slots(
    fleet: Fleet, shapes: list[Shape], part: list[float], weight: float = 0.2, seen: float = 1.0
) -> SlotDemand:
    layout = layout_of(fleet)
    several = np.array([shape.cards > 1 for shape in shapes])
    wanted = [shape for shape in shapes if shape.cards > 1]
    holds = layout.allowed(wanted) & (layout.pieces(wanted) > 0)
    return SlotDemand(wanted, np.array(part)[several], holds, weight, seen)


def scarcity(fleet: Fleet, shapes: list[Shape], part: list[float]) -> list[float]:
    found: list[float] = slots(fleet, shapes, part).scarcity(fleet, layout_of(fleet)).tolist()
    return found


def test_slots_are_short_by_what_will_be_asked_of_them_until_the_cluster_is_full() -> None:
    """640 cards are free: half of them will be asked for by pods of four, and half lie in slots for them."""
    fleet = make_fleet(*[(10,) * 4] * 80, *[(10,)] * 320)
    assert scarcity(fleet, [Shape(10), Shape(10, 4)], [0.5, 0.5]) == [1.0]
    fleet.take(0, (1,), Shape(5))
    assert scarcity(fleet, [Shape(10), Shape(10, 4)], [0.5, 0.5]) == pytest.approx([639.5 * 0.5 / 316])


def test_larger_pods_take_from_the_slots_of_smaller_ones() -> None:
    fleet = make_fleet(*[(10,) * 4] * 80)
    shapes = [Shape(10), Shape(10, 2), Shape(10, 4)]
    assert scarcity(fleet, shapes, [0.25, 0.25, 0.5]) == [0.75, 0.5]


@pytest.mark.parametrize(("nodes", "found"), [(4, 0.75 * 3 / 4), (400, 0.25)], ids=["few", "many"])
def test_few_slots_are_kept_for_more_pods_than_are_expected(nodes: int, found: float) -> None:
    """Of one pod expected three may come, of a hundred hardly more than 120."""
    fleet = make_fleet(*[(10,) * 4] * nodes)
    assert scarcity(fleet, [Shape(10), Shape(10, 4)], [0.75, 0.25]) == pytest.approx([found])


def test_slots_of_another_model_help_nobody() -> None:
    fleet = Fleet()
    for number, model in enumerate("AAB" * 40):
        fleet.put(make_fleet_node(f"n{number}", (10, 10), model=model))
    shapes = [Shape(10), Shape(10, 2, models=frozenset("B"))]
    assert scarcity(fleet, shapes, [0.5, 0.5]) == [1.5]


@pytest.mark.parametrize(
    ("part", "weight", "turnover", "price"),
    [(0.2, 0.2, 0.0, 0.1), (1.0, 0.2, 0.0, 5.0), (1.0, 0.01, 0.0, 8.0), (0.2, 0.2, 1.0, 8.0)],
    ids=["ample", "short", "short and rare", "pods come and go"],
)
def test_a_slot_costs_its_cards_where_short_and_more_where_pods_come_and_go(
    part: float, weight: float, turnover: float, price: float
) -> None:
    fleet = make_fleet(*[(10,) * 4] * 80)
    demand = slots(fleet, [Shape(10, 4)], [part], weight)
    assert demand.prices(fleet, layout_of(fleet), turnover).tolist() == pytest.approx([price])


@pytest.mark.parametrize(("seen", "price"), [(0.0, 0.04), (0.7, 0.07), (1.0, 0.1)])
def test_ample_slots_cost_less_until_pods_for_them_were_seen(seen: float, price: float) -> None:
    fleet = make_fleet(*[(10,) * 4] * 80)
    ample, short = (slots(fleet, [Shape(10, 4)], [part], 0.2, seen) for part in (0.2, 1.0))
    assert ample.prices(fleet, layout_of(fleet), 0.0).tolist() == pytest.approx([price])
    assert short.prices(fleet, layout_of(fleet), 0.0).tolist() == pytest.approx([5.0])


@pytest.mark.parametrize(
    ("several", "kept_whole"), [(0, False), (10, True)], ids=["only shares", "several too"]
)
def test_no_node_is_kept_whole_for_larger_pods_that_never_came(several: int, kept_whole: bool) -> None:
    """What is kept is a third of a card for a pod that wants it, or an empty node for one of four cards."""
    fleet = make_fleet((24,), *[(24,) * 4] * 20)
    fleet.take(0, (0,), Shape(16))
    policy = OpportunityCost(fleet)
    for shape in [Shape(3), Shape(8), Shape(12)] * 200 + [Shape(24, 4)] * several:
        policy.arrived(shape)
    assert (policy.choose(Shape(3)) == 0) == kept_whole


def test_slots_that_go_fast_become_dear_before_the_mix_is_learned_anew() -> None:
    fleet = fleet_with_empty_nodes(20)
    policy = OpportunityCost(fleet, {SINGLE: 10.0, SEVERAL: 1.0})
    assert policy.choose(HEAVY) != fleet.row_of["begun"]
    for number in range(19):
        fleet.take(fleet.row_of[f"empty{number}"], (0, 1, 2, 3), SEVERAL)
    policy.arrived(HEAVY)
    assert policy.choose(HEAVY) == fleet.row_of["begun"]


def test_turnover_is_how_many_pods_leave_for_each_that_is_placed() -> None:
    turnover = Turnover()
    assert turnover.part == 0.0
    for number in range(100):
        turnover.arrived()
        turnover.placed()
        if number % 4 == 0:
            turnover.departed()
    assert turnover.part == 0.25
