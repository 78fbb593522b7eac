"""What holds for every policy, whatever it prefers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.core.policy import (
    DEFAULT_POLICY,
    NEVER,
    POLICIES,
    Fleet,
    Policy,
    Shape,
    fitting_rows,
    make_policy,
)
from gpuslice.core.policy.ranking import RankCache
from tests.unit.fleets import fleet_nodes, fleets, make_fleet, place, shapes

NAMES = [policy.name for policy in POLICIES]
each_policy = pytest.mark.parametrize("name", NAMES)


class History:
    """Random events on a fleet, told to a policy as the product tells them."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self.fleet, self.policy = fleet, policy
        self.held: list[tuple[int, tuple[int, ...], Shape]] = []

    def happen(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(["arrive", "arrive", "arrive", "leave", "node", "drop"]))
        if event == "arrive":
            shape = data.draw(shapes)
            where = place(self.fleet, self.policy, shape)
            if where is not None:
                self.held.append((*where, shape))
        elif event == "leave" and self.held:
            row, slots, shape = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.fleet.give_back(row, slots, shape)
            self.policy.departed(shape)
        elif event == "node":
            self.fleet.put(data.draw(fleet_nodes(f"new{data.draw(st.integers(0, 2))}")))
            self.held = [pod for pod in self.held if pod[0] not in self._rows("new")]
        elif event == "drop":
            gone = self.fleet.row_of.get("new0")
            self.held = [pod for pod in self.held if pod[0] != gone]
            self.fleet.drop("new0")

    def _rows(self, prefix: str) -> set[int]:
        return {row for name, row in self.fleet.row_of.items() if name.startswith(prefix)}


@each_policy
@settings(max_examples=25)
@given(data=st.data())
def test_ranks_kept_through_changes_are_those_computed_anew(name: str, data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    policy = make_policy(name, fleet)
    history = History(fleet, policy)
    for _ in range(data.draw(st.integers(1, 25))):
        history.happen(data)
    for shape in data.draw(st.lists(shapes, min_size=1, max_size=3)):
        kept = policy.keys(shape)
        anew = RankCache(fleet, policy.cache().ranker).ranks(shape).keys
        assert kept.tolist() == anew.tolist()


@each_policy
@settings(max_examples=25)
@given(data=st.data())
def test_a_chosen_place_always_has_room(name: str, data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    policy = make_policy(name, fleet)
    for shape in data.draw(st.lists(shapes, max_size=25)):
        fitting = fitting_rows(fleet, shape, np.arange(fleet.rows)).tolist()
        where = place(fleet, policy, shape)
        assert (where is None) == (not fitting)
        if where is not None:
            assert where[0] in fitting
            assert len(set(where[1])) == shape.cards
        assert (fleet.left >= 0).all()
        assert (fleet.compute_left >= 0).all()
        assert (fleet.cpu_left[list(fleet.row_of.values())] >= 0).all()


@each_policy
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_same_history_leads_to_the_same_places(name: str, data: st.DataObject) -> None:
    nodes = [data.draw(fleet_nodes(f"n{number}")) for number in range(4)]
    arrivals = data.draw(st.lists(shapes, max_size=20))

    def replay() -> list[Any]:
        fleet = Fleet()
        for node in nodes:
            fleet.put(node)
        policy = make_policy(name, fleet)
        return [place(fleet, policy, shape) for shape in arrivals]

    assert replay() == replay()


@each_policy
def test_the_best_of_some_rows_is_chosen_among_these_only(name: str) -> None:
    fleet = make_fleet((15,), (15,), (15,), (8,))
    policy = make_policy(name, fleet)
    assert policy.choose(Shape(10), np.array([2, 1])) in (1, 2)
    assert policy.choose(Shape(10), np.array([3])) is None
    assert policy.choose(Shape(10), np.array([], dtype=np.int64)) is None


@each_policy
def test_asking_for_cards_where_nothing_fits_is_an_error(name: str) -> None:
    policy = make_policy(name, make_fleet((15,)))
    with pytest.raises(ValueError, match="does not fit on row 0"):
        policy.slots(Shape(16), 0)


@each_policy
def test_an_empty_fleet_refuses_everything(name: str) -> None:
    policy = make_policy(name, Fleet())
    assert policy.choose(Shape(1)) is None
    assert policy.choose(Shape(0, 0)) is None


def test_ranks_of_many_shapes_do_not_pile_up() -> None:
    fleet = make_fleet((15,))
    cache = RankCache(fleet, make_policy("bestfit", fleet).cache().ranker, most_bytes=0)
    for cpu in range(1, 40):
        cache.ranks(Shape(1, cpu_milli=cpu))
    assert [shape.cpu_milli for shape in cache.shapes()] == list(range(32, 40))


def test_policies_have_the_documented_names() -> None:
    assert NAMES == ["binpack", "spread", "bestfit", "fgd", "opportunity-cost"]
    page = (Path(__file__).parents[2] / "docs" / "reference" / "policies.md").read_text()
    listed = re.findall(r"^\| `([a-z-]+)`", page, re.MULTILINE)
    assert listed == NAMES
    assert f"`{DEFAULT_POLICY}` (default)" in page


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r'"worst" is unknown, must be one of binpack, spread'):
        make_policy("worst", Fleet())


def test_a_row_where_a_shape_does_not_fit_ranks_never() -> None:
    policy = make_policy("binpack", make_fleet((15,), (4,)))
    assert (policy.keys(Shape(5))[:2] == NEVER).tolist() == [False, True]
