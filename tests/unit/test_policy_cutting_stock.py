"""Prices of cutting stock against the program they are the dual of, and what follows from them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from gpuslice.core.policy.cutting_stock import MOST_KEPT_PATTERNS, CuttingStock, best_pattern, value_of_space
from gpuslice.core.policy.fleet import Floats, Shape
from gpuslice.core.policy.layout import layout_of
from gpuslice.core.policy.node_value import (
    MOST_PIECE_SIZES,
    PackedValue,
    card_values,
    demand_of,
    in_few_sizes,
)
from gpuslice.core.simulation.trace import fleet_of
from tests.unit.fleets import make_fleet_node

demands = st.dictionaries(st.integers(1, 100), st.floats(0.001, 1000), min_size=1, max_size=25)


def fewest_cards(length: int, sizes: list[int], demand: list[float]) -> float:
    """The program of which the prices are the dual: as few cards as possible for all pieces."""
    patterns: list[Floats] = [np.eye(len(sizes))[i] * (length // size) for i, size in enumerate(sizes)]
    while True:
        solved = linprog(
            np.ones(len(patterns)), A_ub=-np.array(patterns).T, b_ub=-np.array(demand), method="highs-ds"
        )
        value, found = best_pattern(length, np.array(sizes), -solved.ineqlin.marginals)
        if value <= 1 + 1e-9:
            return float(solved.fun)
        patterns.append(np.array([float(found.get(column, 0)) for column in range(len(sizes))]))


@settings(max_examples=40, deadline=None)
@given(demands)
def test_all_pieces_cost_as_many_cards_as_they_need_at_least(demand: dict[int, float]) -> None:
    sizes = sorted(demand)
    total = sum(demand.values())
    parts = [demand[size] / total for size in sizes]
    prices = CuttingStock(100).prices(demand)
    ours = sum(part * prices[size] for part, size in zip(parts, sizes, strict=True))
    assert ours == pytest.approx(fewest_cards(100, sizes, parts), rel=1e-5)


@given(demands)
def test_no_pattern_is_worth_more_than_a_card(demand: dict[int, float]) -> None:
    prices = CuttingStock(100).prices(demand)
    assert min(prices.values()) >= 0
    assert value_of_space(100, prices)[100] <= 1 + 1e-6


@settings(max_examples=30, deadline=None)
@given(st.lists(demands, min_size=2, max_size=5))
def test_patterns_kept_from_one_demand_do_not_spoil_the_next(several: list[dict[int, float]]) -> None:
    kept = CuttingStock(100)
    for demand in several:
        sizes, weights = sorted(demand), np.array([demand[size] for size in sorted(demand)])
        again, fresh = kept.prices(demand), CuttingStock(100).prices(demand)
        value = [float(weights @ np.array([prices[size] for size in sizes])) for prices in (again, fresh)]
        assert value[0] == pytest.approx(value[1], rel=1e-5)


def test_without_demand_there_are_no_prices() -> None:
    assert CuttingStock(100).prices({}) == {}
    assert CuttingStock(100).prices({40: 0.0}) == {}


def test_a_half_is_worth_half_a_card_where_all_ask_for_halves() -> None:
    assert CuttingStock(100).prices({50: 7.0}) == {50: 0.5}


@given(
    st.sampled_from([4, 15, 140, 1000, 16130]),
    st.lists(st.tuples(st.integers(1, 16130), st.integers(1, 50)), max_size=20),
)
def test_more_free_space_is_never_worth_less(size: int, asked: list[tuple[int, int]]) -> None:
    counts = {Shape(min(units, size)): float(count) for units, count in asked}
    values = card_values(layout_of(fleet_of([make_fleet_node(cards=(size,))])), demand_of(counts), {})
    assert values[0] == 0
    assert values[-1] == pytest.approx(1)
    assert (np.diff(values) >= -1e-9).all()


def test_without_shares_in_the_mix_only_a_whole_free_card_is_worth_something() -> None:
    values = card_values(layout_of(fleet_of([make_fleet_node(cards=(15,))])), demand_of({Shape(15): 3.0}), {})
    assert values.tolist() == [0.0] * 15 + [1.0]


def test_a_size_that_was_only_assumed_is_not_priced_once_another_was_seen() -> None:
    """Of a free 0.7 only half a card can be sold, although 0.7 was assumed at the start."""
    layout, seen = layout_of(fleet_of([make_fleet_node(cards=(10,))])), {Shape(5): 99.0}
    values = card_values(layout, demand_of({**seen, Shape(7): 1.0}, seen), {})
    packed = 0.01 * (0.7 - 0.5)  # before any pod was seen, each part was worth its fraction of a card
    next_pod = 0.7 - 0.5 * 0.99
    assert values[7] - values[5] == pytest.approx(0.7 * packed + 0.3 * next_pod)


@pytest.mark.parametrize("small", [97.0, 100.0, 103.0])
def test_of_prices_that_explain_the_demand_alike_the_large_piece_has_the_higher(small: float) -> None:
    """Else two of 34 would go together as gladly as one beside one of 51, and a third of a card is lost."""
    pieces = np.zeros(101)
    pieces[[15, 34, 51]] = 40.0, small, 100.0
    worth = PackedValue(100).renew(pieces, seen=1.0)
    assert worth[51] == pytest.approx(1)
    assert worth[49] == pytest.approx(0)


@pytest.mark.parametrize("size", [1000, 16_130, 81_559])
def test_what_fills_a_card_exactly_fills_it_in_parts(size: int) -> None:
    card = layout_of(fleet_of([make_fleet_node(cards=(size,))])).classes[0]
    for count in range(1, 101):  # equal pieces, as many as fit in truth
        assert card.parts // card.pieces(size // count) >= count
    pieces = [size * 333 // 1000, size * 267 // 1000, size * 4 // 10]
    assert sum(card.pieces(units) for units in pieces) <= card.parts


def test_cards_are_valued_by_their_size() -> None:
    layout = layout_of(fleet_of([make_fleet_node("a", (10,)), make_fleet_node("b", (30,))]))
    values = card_values(layout, demand_of({}), {})
    small, large = layout.classes
    assert values[small.start + small.parts] == pytest.approx(0.5)
    assert values[large.start + large.parts] == pytest.approx(1.5)


def test_nothing_is_printed_into_what_a_program_reads() -> None:
    """By the solver, which writes to the process's standard output itself."""
    code = "from gpuslice.core.policy.cutting_stock import CuttingStock; CuttingStock(15).prices({4: 1.0})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_a_tenant_that_asks_for_every_size_does_not_stop_the_scheduler() -> None:
    """With a program of a thousand sizes the extender's event loop stood still for 28 s."""
    pieces = np.concatenate([[0.0], np.ones(1000)])
    pieces[[333, 500]] = 5000.0
    few = in_few_sizes(pieces)
    sizes = np.flatnonzero(few)
    assert len(sizes) <= MOST_PIECE_SIZES
    assert few.sum() == pieces.sum()
    assert {333, 500, 1000} <= set(sizes.tolist())
    assert (np.diff(sizes) <= 16).all()  # no piece counts as more than 1/64 of a card larger
    assert (np.cumsum(few) <= np.cumsum(pieces)).all()  # nor as a smaller one
    usual = np.where(np.arange(1001) % 10 == 0, pieces, 0.0)
    assert in_few_sizes(usual) is usual


def test_patterns_of_workloads_long_past_are_forgotten() -> None:
    cutter, chance = CuttingStock(1000), np.random.default_rng(1)
    for _ in range(12):
        cutter.prices({int(size): 1.0 for size in chance.integers(100, 500, 64)})
    assert len(cutter._patterns) == MOST_KEPT_PATTERNS
