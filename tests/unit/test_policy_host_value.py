"""What free CPU and memory are worth where they run out before the cards."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.core.policy import UNLIMITED, Fleet, FleetNode, OpportunityCost, Shape
from gpuslice.core.policy.fleet import Floats
from gpuslice.core.policy.host_value import (
    CARD_STEPS,
    HOST_STEPS,
    HostValue,
    host_value,
    scarce,
    worth_table,
)

HEAVY, LIGHT = Shape(100, 1, cpu_milli=24_000), Shape(100, 1, cpu_milli=4_000)
MIX = {HEAVY: 1.0, LIGHT: 10.0}  # 5.8 cores for a card


def make_node(name: str, cards: int, cores: int, cores_left: int, memory_mib: float = UNLIMITED) -> FleetNode:
    size = (100,) * cards
    return FleetNode(name, size, size, (), "", cores * 1000.0, memory_mib, cores_left * 1000.0, memory_mib)


def make_fleet(*nodes: FleetNode) -> Fleet:
    fleet = Fleet()
    for node in nodes:
        fleet.put(node)
    return fleet


@pytest.fixture
def short_of_cores() -> Fleet:
    """Two nodes with cores left, and a large one without: 112 cores where the mix asks for 186."""
    return make_fleet(make_node("12", 8, 24, 12), make_node("24", 8, 24, 24), make_node("0", 16, 64, 0))


def worth_under(fleet: Fleet, counts: dict[Shape, float], turnover: float = 0.0) -> HostValue | None:
    """W where something is scarce and felt."""
    found = scarce(fleet, 100.0, counts, turnover)
    return host_value(fleet, 100.0, counts, found) if found and found.is_felt(fleet) else None


def reference(pods: list[tuple[int, int, int]], host: int, cards: int) -> float:
    """The mean GPU of arrivals at random until none fits; pods are (count, host, cards), in whole steps."""

    @cache
    def worth(host: int, cards: int) -> float:
        fitting = [pod for pod in pods if pod[1] <= host and pod[2] <= cards and (cards or not pod[2])]
        total = sum(pod[0] for pod in fitting)
        return sum(n * (g + worth(host - c, cards - g)) for n, c, g in fitting) / total if total else 0.0

    return worth(host, cards)


host_steps, steps_of_cards = st.integers(1, HOST_STEPS), st.integers(0, CARD_STEPS)
pods_in_steps = st.lists(st.tuples(st.integers(1, 9), host_steps, steps_of_cards), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(pods_in_steps, st.integers(0, HOST_STEPS), st.integers(0, CARD_STEPS))
def test_the_table_is_what_arrivals_at_random_make_of_a_node(
    pods: list[tuple[int, int, int]], host: int, cards: int
) -> None:
    count, takes, gpu = np.array(pods, dtype=np.float64).T
    assert worth_table(count, takes, gpu)[host, cards] == pytest.approx(reference(pods, host, cards))


@pytest.mark.parametrize("host", [0.03, 0.4, 1.0, 2.6, 3.0])
def test_pods_of_any_size_sell_what_they_ask_for(host: float) -> None:
    """With room for many of them, whether or not what they take falls between the steps."""
    table = worth_table(np.array([5.0]), np.array([host]), np.array([host / 4]))
    assert table[HOST_STEPS, CARD_STEPS] == pytest.approx(HOST_STEPS / 4, rel=0.05)


def test_pods_larger_than_any_node_are_left_out() -> None:
    large = worth_table(np.array([1.0, 1.0]), np.array([200.0, 4.0]), np.array([1.0, 99.0]))
    assert not large.any()


def test_cores_are_worth_more_where_only_pods_with_few_cores_fit(short_of_cores: Fleet) -> None:
    """24 cores may all go to one heavy pod, twice 12 serve six light ones for certain."""
    worth = worth_under(short_of_cores, MIX)
    assert worth is not None
    free, memory = np.array([8.0, 8.0]), np.array([UNLIMITED, UNLIMITED])
    on_24, on_12 = worth.of(free, np.array([24_000.0, 12_000.0]), memory).tolist()
    assert on_24 == pytest.approx(1 + 10 / 11 * 5, rel=0.02)
    assert on_12 == pytest.approx(3, rel=0.02)


def test_a_pod_goes_where_it_keeps_a_heavier_one_out(short_of_cores: Fleet) -> None:
    policy = OpportunityCost(short_of_cores, MIX)
    assert policy.choose(LIGHT) == short_of_cores.row_of["24"]


def test_scarce_cores_count_from_the_moment_that_they_are_felt(short_of_cores: Fleet) -> None:
    """Not when the workload is learned anew, which may be after the last of them are gone."""
    short_of_cores.put(make_node("0", 16, 64, 12))
    policy = OpportunityCost(short_of_cores, MIX)
    assert policy.choose(LIGHT) == short_of_cores.row_of["12"]
    short_of_cores.take(short_of_cores.row_of["0"], (), Shape(0, 0, 12_000))
    assert policy.choose(LIGHT) == short_of_cores.row_of["24"]


def test_without_cards_cores_sell_nothing(short_of_cores: Fleet) -> None:
    worth = worth_under(short_of_cores, MIX)
    assert worth is not None
    amounts = (np.array([0.0]), np.array([24_000.0]), np.array([UNLIMITED]))
    assert worth.of(*amounts).tolist() == [0.0]


def test_amounts_past_the_largest_node_and_below_nothing_stay_on_the_table(short_of_cores: Fleet) -> None:
    worth = worth_under(short_of_cores, MIX)
    assert worth is not None

    def of(cards: float, cores: float) -> Floats:
        return worth.of(np.array([cards]), np.array([cores]), np.array([UNLIMITED]))

    assert of(99.0, 9e9) == of(16.0, 64_000.0)
    assert of(8.0, -5.0) == of(8.0, 0.0) == 0.0


def test_memory_counts_like_cores_where_it_runs_out_first() -> None:
    nodes = [make_node(name, 8, 1000, 1000, memory_mib=8_000.0) for name in "ab"]
    fleet = make_fleet(*nodes)
    mix = {Shape(100, 1, 1000, 4_000): 1.0}  # memory for four of sixteen cards
    fleet.take(0, (0,), Shape(100, 1, 1000, 4_000))
    worth = worth_under(fleet, mix)
    assert worth is not None
    cores, memory = np.array([1e6, 1e6, 1_000.0]), np.array([8_000.0, 4_000.0, 8_000.0])
    assert worth.of(np.array([8.0] * 3), cores, memory).tolist() == pytest.approx([2.0, 1.0, 1.0], rel=0.02)


def test_cards_that_run_out_first_leave_feed_unpriced(short_of_cores: Fleet) -> None:
    assert worth_under(short_of_cores, {LIGHT: 1.0, Shape(100): 1.0}) is None
    assert worth_under(short_of_cores, {Shape(0, 0, 4_000): 1.0}) is None
    assert worth_under(Fleet(), MIX) is None
    unknown = make_fleet(FleetNode("a", (100,), (100,)))
    assert worth_under(unknown, MIX) is None


def test_pods_without_gpu_are_among_those_that_make_cores_scarce(short_of_cores: Fleet) -> None:
    wanted = {Shape(100, 1, cpu_milli=3_000): 1.0}  # 96 cores for all cards, of 112
    assert scarce(short_of_cores, 100.0, wanted, turnover=0.0) is None
    found = scarce(short_of_cores, 100.0, {**wanted, Shape(0, 0, 3_000): 1.0}, turnover=0.0)
    assert found is not None
    assert found.asked == pytest.approx(192 / 112)


def test_feed_is_unpriced_while_pods_come_and_go_or_much_is_left(short_of_cores: Fleet) -> None:
    assert worth_under(short_of_cores, MIX, turnover=0.2) is not None
    assert worth_under(short_of_cores, MIX, turnover=0.25) is None
    short_of_cores.put(make_node("0", 16, 64, 12))  # 48 of 112 cores: as yet the part that is served
    assert worth_under(short_of_cores, MIX) is None
