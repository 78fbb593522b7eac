"""What `opportunity-cost` keeps where pods come and go: whole cards, and slots for pods of several cards."""

from __future__ import annotations

import pytest

from gpuslice.core.policy import Fleet, OpportunityCost, Shape
from tests.unit.fleets import make_fleet, make_fleet_node


def policy_at(fleet: Fleet, counts: dict[Shape, float], turnover: float) -> OpportunityCost:
    """Told the mix, after as many pods went as this part of those that came."""
    policy = OpportunityCost(fleet, counts)
    for number in range(100):
        policy.turnover.placed()
        if number < 100 * turnover:
            policy.turnover.departed()
    return policy


@pytest.mark.parametrize(("turnover", "row"), [(0.0, 1), (1.0, 0)])
def test_a_share_leaves_cards_whole_where_pods_come_and_go(turnover: float, row: int) -> None:
    fleet = make_fleet((10,), (10,))
    fleet.take(0, (0,), Shape(3))
    # of the 7 that are left 6 can be sold if it goes elsewhere, and nothing beside it
    policy = policy_at(fleet, {Shape(10): 8.0, Shape(4): 1.0, Shape(6): 1.0}, turnover)
    assert policy.choose(Shape(4)) == row


def test_a_hole_in_a_card_of_their_model_is_kept_for_pods_bound_to_it() -> None:
    fleet = Fleet()
    for name in ("n1", "n2"):
        fleet.put(make_fleet_node(name, (10,), model="A"))
    fleet.take(0, (0,), Shape(3))
    counts = {Shape(10, models=frozenset({"A"})): 8.0, Shape(4): 1.0, Shape(6): 1.0}
    assert policy_at(fleet, counts, 1.0).choose(Shape(4)) == 1


def test_cpu_that_a_slot_needs_is_kept_also_when_some_of_it_is_gone() -> None:
    fleet = Fleet()
    fleet.put(make_fleet_node("pair", (10, 10), cpu_milli=24.0, cpu_left=19.0))
    fleet.put(make_fleet_node("single", (10,), cpu_milli=12.0, cpu_left=12.0))
    policy = policy_at(fleet, {Shape(10, 2, cpu_milli=20): 4.0, Shape(4, cpu_milli=2): 1.0}, 1.0)
    assert policy.choose(Shape(0, 0, cpu_milli=12)) == fleet.row_of["single"]


def test_smaller_cards_of_a_node_are_no_slot_for_a_pod_of_several_large_ones() -> None:
    fleet = make_fleet((80, 80), (16, 80))
    policy = policy_at(fleet, {Shape(80, 2): 1.0, Shape(80): 1.0}, 1.0)
    assert policy.choose(Shape(80)) == 1


def test_room_for_parts_of_several_cards_is_on_nodes_with_several() -> None:
    fleet = make_fleet((10, 10), (10, 10))
    fleet.take(0, (0, 1), Shape(5, 2))
    fleet.take(1, (0,), Shape(10))
    fleet.take(1, (1,), Shape(5))
    policy = policy_at(fleet, {Shape(5, 2): 1.0, Shape(5): 1.0}, 1.0)
    assert policy.choose(Shape(5)) == 1


def test_two_pods_with_parts_of_the_same_cards_find_two_slots() -> None:
    fleet = make_fleet((10, 10), (10, 10))
    fleet.take(1, (0, 1), Shape(5, 2))
    policy = policy_at(fleet, {Shape(5, 2): 1.0, Shape(10, 2): 1.0}, 1.0)
    assert policy.choose(Shape(5, 2)) == 1


def test_one_card_with_room_for_two_parts_is_no_slot_for_a_pod_that_wants_them_of_two() -> None:
    fleet = make_fleet((20, 20), (20, 20))
    fleet.take(0, (0, 1), Shape(10, 2))
    fleet.take(1, (0,), Shape(20))
    policy = policy_at(fleet, {Shape(10, 2): 1.0, Shape(10): 1.0}, 1.0)
    assert policy.choose(Shape(10)) == 1
