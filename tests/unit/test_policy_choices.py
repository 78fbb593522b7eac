"""What each policy prefers, in small clusters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.policy import (
    NEVER,
    BestFit,
    Binpack,
    Fgd,
    Fleet,
    FleetNode,
    OpportunityCost,
    Shape,
    Spread,
    fitting_rows,
    make_policy,
)
from gpuslice.core.policy.fgd import typical_pods
from gpuslice.core.policy.learned_workload import LearnedWorkload, prior
from gpuslice.core.units import MOST_UNITS
from tests.unit.fleets import make_fleet, make_fleet_node, place


def test_binpack_takes_used_cards_then_used_nodes_then_the_smallest_free_node() -> None:
    fleet = make_fleet((15, 15), (15, 15, 15), (15,))
    policy = Binpack(fleet)
    fleet.take(1, (1,), Shape(5))
    assert place(fleet, policy, Shape(10)) == (1, (1,))
    assert place(fleet, policy, Shape(10)) == (1, (0,))
    assert place(fleet, policy, Shape(15)) == (1, (2,))
    assert place(fleet, policy, Shape(15)) == (2, (0,))


def test_binpack_takes_the_fuller_of_cards_with_the_most_units_there_may_be() -> None:
    fleet = make_fleet((MOST_UNITS,), (MOST_UNITS,))
    fleet.take(0, (0,), Shape(MOST_UNITS // 10))
    fleet.take(1, (0,), Shape(MOST_UNITS // 10 * 7))
    assert Binpack(fleet).choose(Shape(1)) == 1


def test_spread_takes_the_emptiest_node_and_there_the_emptiest_card() -> None:
    fleet = make_fleet((15, 15), (15, 15))
    policy = Spread(fleet)
    places = [place(fleet, policy, Shape(3)) for _ in range(4)]
    assert places == [(0, (0,)), (1, (0,)), (0, (1,)), (1, (1,))]
    assert policy.slots(Shape(2, 2), 0) == (0, 1)


def test_bestfit_leaves_the_least_cpu_and_gpu() -> None:
    fleet = Fleet()
    for name, cpu in (("much", 64_000.0), ("little", 8_000.0)):
        fleet.put(make_fleet_node(name, (15,), cpu_milli=64_000.0, cpu_left=cpu))
    assert BestFit(fleet).choose(Shape(4, cpu_milli=1000)) == fleet.row_of["little"]


def test_bestfit_takes_the_fullest_card_that_fits() -> None:
    fleet = make_fleet((15, 15, 15))
    fleet.take(0, (2,), Shape(9))
    fleet.take(0, (1,), Shape(3))
    assert BestFit(fleet).slots(Shape(6), 0) == (2,)
    assert BestFit(fleet).slots(Shape(7), 0) == (1,)
    assert BestFit(fleet).slots(Shape(6, 2), 0) == (1, 2)


def test_fgd_keeps_a_card_whole_for_the_pods_that_need_it_whole() -> None:
    fleet = make_fleet((10,), (10,))
    fleet.take(1, (0,), Shape(5))
    policy = Fgd(fleet, {Shape(10): 1.0, Shape(5): 1.0})
    assert policy.choose(Shape(5)) == 1


def test_fgd_knows_that_free_gpu_without_cpu_is_of_no_use() -> None:
    fleet = Fleet()
    fleet.put(make_fleet_node("rich", (10, 10), cpu_left=100.0))
    fleet.put(make_fleet_node("poor", (10, 10), cpu_left=20.0))
    policy = Fgd(fleet, {Shape(10, cpu_milli=50): 1.0})
    assert policy.choose(Shape(10, cpu_milli=10)) == fleet.row_of["poor"]


def test_fgd_takes_a_card_with_enough_compute_beside_one_with_as_much_memory() -> None:
    fleet = Fleet()
    fleet.put(make_fleet_node("n1", (10, 10, 10), left=(4, 8, 8), compute_left=(100, 20, 100)))
    assert Fgd(fleet).slots(Shape(8, compute_percent=30), 0) == (2,)


def test_typical_pods_cover_the_most_frequent_and_leave_memory_out() -> None:
    counts = {Shape(5, memory_mib=1): 40.0, Shape(5, memory_mib=2): 40.0, Shape(10): 16.0, Shape(3): 4.0}
    typical = typical_pods(counts, make_fleet((10,)))
    assert typical.units.tolist() == [5, 10]
    assert np.allclose(typical.chance, [80 / 96, 16 / 96])


def test_opportunity_cost_packs_shares_so_that_cards_stay_whole() -> None:
    fleet = make_fleet((10, 10), (10, 10))
    policy = OpportunityCost(fleet, {Shape(10): 50.0, Shape(5): 50.0})
    first, second = place(fleet, policy, Shape(5)), place(fleet, policy, Shape(5))
    assert first == second


@pytest.mark.parametrize("units", [2, 3, 4, 5, 6])
def test_before_anything_is_known_of_the_mix_shares_fill_the_card_in_use(units: int) -> None:
    fleet = make_fleet((15, 15, 15, 15), (15, 15, 15, 15))
    policy = OpportunityCost(fleet)
    chosen = []
    for _ in range(2):
        policy.arrived(Shape(units))
        chosen.append(place(fleet, policy, Shape(units)))
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("name", ["bestfit", "opportunity-cost"])
@given(
    st.lists(st.integers(0, 15), min_size=1, max_size=8),
    st.integers(1, 15),
)
def test_on_the_chosen_node_the_fullest_card_that_fits_is_taken(
    name: str, left: list[int], units: int
) -> None:
    """What the vendor documents; the extender and the replays of traces take the card from here."""
    fleet = Fleet()
    fleet.put(FleetNode("n", (15,) * len(left), left))
    fitting = [(free, slot) for slot, free in enumerate(left) if free >= units]
    policy = make_policy(name, fleet)
    if policy.choose(Shape(units)) is None:
        assert not fitting
    else:
        assert policy.slots(Shape(units), 0) == (min(fitting)[1],)


def test_opportunity_cost_leaves_parts_that_the_mix_can_fill() -> None:
    """Pods of 7 and of 3 share a card: a pod of 3 belongs where 3 are left, not where it cuts into 7."""
    fleet = make_fleet((10,), (10,), (10,))
    fleet.take(0, (0,), Shape(3))
    fleet.take(1, (0,), Shape(7))
    policy = OpportunityCost(fleet, {Shape(7): 50.0, Shape(3): 50.0})
    assert policy.choose(Shape(3)) == 1
    assert policy.choose(Shape(7)) == 0


def test_opportunity_cost_spares_the_model_that_few_cards_have() -> None:
    fleet = Fleet()
    fleet.put(make_fleet_node("rare", (10,), model="R"))
    for number in range(4):
        fleet.put(make_fleet_node(f"usual{number}", (10,), model="U"))
    policy = OpportunityCost(fleet, {Shape(10): 80.0, Shape(10, models=frozenset({"R"})): 20.0})
    chosen = [place(fleet, policy, Shape(10)) for _ in range(4)]
    assert fleet.row_of["rare"] not in [row for row, _ in filter(None, chosen)]


def test_opportunity_cost_puts_pods_where_their_cpu_is_not_missed() -> None:
    fleet = Fleet()
    fleet.put(make_fleet_node("tight", (10, 10), cpu_milli=20.0, cpu_left=20.0))
    fleet.put(make_fleet_node("ample", (10, 10), cpu_milli=200.0, cpu_left=200.0))
    policy = OpportunityCost(fleet, {Shape(10, cpu_milli=10): 1.0})
    assert policy.choose(Shape(0, 0, cpu_milli=15)) == fleet.row_of["ample"]


def test_a_hole_is_no_dearer_for_pods_that_are_too_large_for_it() -> None:
    """60 of 141 units are left beside a pod of 80; that pods of 141 use no other card makes no difference."""
    fleet = make_fleet((80,), (141,))
    fleet.take(1, (0,), Shape(80))
    policy = OpportunityCost(fleet, {Shape(60): 1.0, Shape(80): 1.0, Shape(141): 6.0})
    assert policy.choose(Shape(60)) == 1


def test_pods_without_gpu_go_to_nodes_without_free_gpu_first() -> None:
    fleet = Fleet()
    for name in ("n1", "n2"):
        fleet.put(make_fleet_node(name, (10,), cpu_milli=10.0, cpu_left=10.0))
    fleet.take(1, (0,), Shape(10))
    assert OpportunityCost(fleet, {Shape(10, cpu_milli=8): 1.0}).choose(Shape(0, 0, cpu_milli=5)) == 1


def test_large_nodes_stay_whole_among_equals() -> None:
    fleet = make_fleet((10,) * 8, (10,) * 2)
    assert OpportunityCost(fleet, {Shape(10): 1.0}).choose(Shape(10)) == 1


def test_small_cards_are_used_first_among_equals() -> None:
    """Both gaps cost next to nothing: pods of 60 or 160 units can use neither."""
    fleet = make_fleet((160,), (60,), (160,))
    mix = {Shape(160): 50.0, Shape(60): 50.0, Shape(1): 1.0}
    for row in (0, 1):
        fleet.take(row, (0,), Shape(50 + 100 * (row == 0)))
    assert OpportunityCost(fleet, mix).choose(Shape(1)) == 1


def test_a_small_pod_goes_where_it_fits_exactly_though_it_costs_little_elsewhere() -> None:
    """It is smaller than the step below which costs count as equal, and the first node has room, too."""
    fleet = make_fleet((160,), (160,))
    for row, units in ((0, 153), (1, 159)):
        fleet.take(row, (0,), Shape(units))
    mix = {Shape(160): 1.0, Shape(7): 50.0, Shape(1): 50.0}
    assert OpportunityCost(fleet, mix).choose(Shape(1)) == 1


def test_ranks_stay_in_force_until_the_new_ones_are_ready() -> None:
    """With `maintain`, no request pays for a new mix, and in the end all is as if it had."""
    fleet = make_fleet(*[(10,) * 4] * 5)
    beside = OpportunityCost(fleet, renew_when_asked=False)
    inside = OpportunityCost(fleet)
    shapes = [Shape(units) for units in (3, 7, 10)]
    for policy in (beside, inside):
        for shape in shapes:
            policy.keys(shape)
        for shape in shapes * 40:
            policy.arrived(shape)
    before = beside.cache()
    assert beside.maintain()
    assert beside.cache() is before
    while beside.maintain():
        pass
    assert beside.cache() is not before
    for shape in shapes:
        assert beside.keys(shape).tolist() == inside.keys(shape).tolist()
    assert not beside.maintain()


@pytest.mark.parametrize("what", ["widened", "cut", "lengthened"])
def test_new_ranks_that_were_begun_for_other_cards_are_given_up(what: str) -> None:
    """Whatever became of the fleet's arrays while they were worked out."""
    fleet = make_fleet(*[(10,) * 4] * 5, *[(10,) * (64 if what == "cut" else 4)])
    policy = OpportunityCost(fleet, renew_when_asked=False)
    shapes = [Shape(units) for units in (3, 7, 10)]
    for shape in shapes:
        policy.keys(shape)
    for shape in shapes * 40:
        policy.arrived(shape)
    assert policy.maintain()
    if what == "cut":
        fleet.drop("n6")
    for number in range({"widened": 1, "cut": 0, "lengthened": 500}[what]):
        fleet.put(make_fleet_node(f"late{number}", (10,) * (64 if what == "widened" else 4)))
    while policy.maintain():
        pass
    for shape in shapes:
        ranked = np.flatnonzero(policy.keys(shape) < NEVER)
        assert ranked.tolist() == fitting_rows(fleet, shape, np.arange(fleet.rows)).tolist()


def test_nodes_in_the_same_state_are_costed_once_and_alike() -> None:
    """A large fleet is looked at by distinct states: every row costs what it costs when asked alone."""
    fleet = make_fleet(*[(10,) * 4] * 400, *[(10,) * 2] * 400)
    policy = OpportunityCost(fleet, {Shape(10): 10.0, Shape(3): 60.0, Shape(10, 4): 1.0})
    for row in range(0, 800, 3):
        fleet.take(row, (row % 2,), Shape(3 + row % 5))
    for shape in (Shape(3), Shape(10), Shape(10, 2)):
        ranker = policy.cache().ranker
        rows = fitting_rows(fleet, shape, np.arange(fleet.rows))
        together = ranker.rank(shape, rows)[0].tolist()
        assert together == [int(ranker.rank(shape, rows[at : at + 1])[0][0]) for at in range(len(rows))]


def test_the_mix_is_the_prior_at_first_and_what_arrived_later() -> None:
    fleet, mix = make_fleet((10,) * 8), LearnedWorkload()
    assert mix.due
    first = mix.renew(fleet)
    assert sum(first.values()) == 30
    assert not mix.due
    for _ in range(50):
        mix.arrived(Shape(4))
    assert mix.due
    assert mix.renew(fleet)[Shape(4)] == 50 + first[Shape(4)]


def test_old_arrivals_fade_and_the_prior_with_them() -> None:
    fleet, mix = make_fleet((10,)), LearnedWorkload()
    for _ in range(20_000):
        mix.arrived(Shape(4))
    for _ in range(20_000):
        mix.arrived(Shape(6))
    counts = mix.renew(fleet)
    share = prior(fleet)[Shape(4)] * 7.5
    assert counts[Shape(4)] == 5_000 + share
    assert counts[Shape(6)] == 10_000 + share


def test_the_prior_knows_all_sizes_of_cards_and_how_many_there_are() -> None:
    fleet = make_fleet((10, 10, 10), (20,))
    parts = prior(fleet)
    assert abs(sum(parts.values()) - 1) < 1e-9
    assert parts[Shape(20, 8)] * 3 == parts[Shape(10, 8)]
