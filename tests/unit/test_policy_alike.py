"""Nodes in the same state are found, however the fleet came to be in it."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.policy import Fleet, Shape
from gpuslice.core.policy.node_classes import NodeClasses
from tests.unit.fleets import make_fleet, make_fleet_node

SIZES = st.sampled_from([(4,), (4, 4), (8, 8), (4, 4, 4)])
CHANGES = st.one_of(
    st.tuples(st.just("take"), st.integers(0, 9), st.integers(0, 2)),
    st.tuples(st.just("put"), st.integers(0, 30), SIZES),
    st.tuples(st.just("drop"), st.integers(0, 30), st.none()),
    st.tuples(st.just("look"), st.none(), st.none()),
)


def state_of(fleet: Fleet, row: int) -> tuple[object, ...]:
    by_card = (fleet.left, fleet.compute_left, fleet.size)
    by_node = (fleet.model, fleet.cpu_left, fleet.memory_left)
    return (*(tuple(part[row].tolist()) for part in by_card), *(part[row].item() for part in by_node))


def change(fleet: Fleet, kind: str, number: int, how: Any) -> None:
    if kind == "put":
        fleet.put(make_fleet_node(f"n{number}", how, cpu_left=1000.0 * (number % 3)))
    elif kind == "drop":
        fleet.drop(f"n{number}")
    elif fleet.rows > number and fleet.left[number].any():
        fleet.take(number, (int(fleet.left[number].argmax()),), Shape(1, cpu_milli=500 * how))


@given(st.lists(CHANGES, max_size=60), st.data())
def test_every_node_is_with_all_those_in_its_state(
    changes: list[tuple[str, Any, Any]], data: st.DataObject
) -> None:
    fleet = make_fleet((4, 4), (8, 8))
    alike = NodeClasses(fleet)
    for kind, number, how in [*changes, ("look", None, None)]:
        if kind != "look":
            change(fleet, kind, number, how)
            continue
        rows = np.array(data.draw(st.lists(st.integers(0, fleet.rows - 1), unique=True, min_size=1)))
        first, like = alike.distinct(rows)
        states = [state_of(fleet, row) for row in first.tolist()]
        assert len(set(states)) == len(states)
        assert set(first.tolist()) <= set(rows.tolist())
        assert [states[each] for each in like.tolist()] == [state_of(fleet, row) for row in rows.tolist()]


def test_states_of_the_past_are_forgotten() -> None:
    fleet = make_fleet(*[(1000,)] * 16)
    alike = NodeClasses(fleet)
    for _ in range(900):
        fleet.take(3, (0,), Shape(1))
        first, like = alike.distinct(np.arange(16))
        assert first.tolist() == [0, 3]
        assert like.sum() == 1
    assert alike.states <= 2 * fleet.rows + 1
