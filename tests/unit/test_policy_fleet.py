"""The arrays that policies look at."""

from __future__ import annotations

import numpy as np
import pytest

from gpuslice.core.policy import Fleet, Shape, fitting_rows
from tests.unit.fleets import make_fleet, make_fleet_node


def everywhere(fleet: Fleet) -> np.ndarray:
    return np.arange(fleet.rows)


def test_taking_and_giving_back_leaves_the_fleet_as_it_was() -> None:
    fleet, shape = make_fleet((15, 15)), Shape(4, 2, compute_percent=10)
    before = fleet.left.copy()
    fleet.take(0, (0, 1), shape)
    assert fleet.left[0, :2].tolist() == [11, 11]
    fleet.give_back(0, (0, 1), shape)
    assert np.array_equal(fleet.left, before)


def test_readers_hear_of_changed_rows_only() -> None:
    fleet = make_fleet((15,), (15,), (15,))
    clock = fleet.clock
    fleet.take(1, (0,), Shape(4))
    fleet.put(make_fleet_node("n3", (15,)))  # as it was
    assert fleet.changed_since(clock).tolist() == [1]


def test_a_dropped_node_holds_nothing_and_its_row_is_used_again() -> None:
    fleet = make_fleet((15,), (15,))
    row = fleet.row_of["n1"]
    fleet.drop("n1")
    fleet.drop("never there")
    assert row not in fitting_rows(fleet, Shape(1), everywhere(fleet))
    assert row not in fitting_rows(fleet, Shape(0, 0), everywhere(fleet))
    assert fleet.put(make_fleet_node("n9", (15,))) == row


def test_a_card_that_must_not_be_used_never_fits_whatever_is_free_of_it() -> None:
    fleet = Fleet()
    fleet.put(make_fleet_node("n1", (0, 15), left=(15, 3)))
    assert fitting_rows(fleet, Shape(3), everywhere(fleet)).tolist() == [0]
    assert fitting_rows(fleet, Shape(4), everywhere(fleet)).tolist() == []


def test_a_node_with_more_cards_widens_the_fleet_and_keeps_the_rest() -> None:
    fleet = make_fleet((15,))
    fleet.take(0, (0,), Shape(4))
    fleet.put(make_fleet_node("large", (80,) * 16))
    assert fleet.left[0].tolist() == [11] + [0] * 15
    assert fitting_rows(fleet, Shape(80, 16), everywhere(fleet)).tolist() == [fleet.row_of["large"]]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_fleet_is_narrow_again_once_a_node_with_many_cards_is_gone(leaves: bool) -> None:
    """Each row has a place for every card of the widest node: one that lies would cost all for good."""
    fleet = make_fleet((15,) * 8, (15,) * 3)
    fleet.put(make_fleet_node("liar", (15,) * 100))
    fleet.take(0, (7,), Shape(4))
    version = fleet.cards_version
    if leaves:
        fleet.drop("liar")
    else:
        fleet.put(make_fleet_node("liar", (15,) * 4))
    assert fleet.left.shape[1] == fleet.size.shape[1] == fleet.compute_left.shape[1] == 8
    assert fleet.left[0].tolist() == [15] * 7 + [11]
    assert fleet.cards_version > version
    assert len(fitting_rows(fleet, Shape(15), everywhere(fleet))) == (2 if leaves else 3)


def test_a_fleet_keeps_room_for_cards_that_are_out_of_use() -> None:
    fleet = make_fleet((15, 0, 0, 0))
    fleet.put(make_fleet_node("large", (15,) * 16))
    fleet.drop("large")
    fleet.put(make_fleet_node("n1", (15, 15, 0, 0)))
    assert fleet.left.shape[1] == 4


def test_a_fleet_that_lost_all_nodes_takes_new_ones() -> None:
    fleet = make_fleet((15,) * 8)
    fleet.drop("n1")
    assert len(fitting_rows(fleet, Shape(1), everywhere(fleet))) == 0
    fleet.put(make_fleet_node("n2", (15,)))
    assert len(fitting_rows(fleet, Shape(15), everywhere(fleet))) == 1


def test_fleets_grow_past_their_first_rows() -> None:
    fleet = make_fleet(*[(15,)] * 100)
    assert len(fleet.row_of) == len(set(fleet.row_of.values())) == 100
    assert len(fitting_rows(fleet, Shape(15), everywhere(fleet))) == 100


def test_what_is_not_known_of_a_node_never_refuses_a_pod() -> None:
    fleet = make_fleet((15,))
    assert len(fitting_rows(fleet, Shape(1, cpu_milli=10**9, memory_mib=10**9), everywhere(fleet))) == 1


def test_compute_is_asked_of_the_card_that_has_the_memory() -> None:
    fleet = Fleet()
    fleet.put(make_fleet_node("n1", (15, 15), left=(15, 2), compute_left=(10, 90)))
    assert len(fitting_rows(fleet, Shape(4, compute_percent=50), everywhere(fleet))) == 0
    assert len(fitting_rows(fleet, Shape(2, compute_percent=50), everywhere(fleet))) == 1


def test_models_restrict_the_nodes() -> None:
    fleet = Fleet()
    fleet.put(make_fleet_node("a", model="A"))
    fleet.put(make_fleet_node("b", model="B"))
    only_b = fitting_rows(fleet, Shape(1, models=frozenset({"B", "no such"})), everywhere(fleet))
    assert only_b.tolist() == [fleet.row_of["b"]]
