"""Replays by claims: kube-scheduler's node, and the first card that fits in the order that agents publish."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.claims import Pool, device_index
from gpuslice.core.policy import Fleet, FleetNode, Shape
from gpuslice.core.simulation.claims import SIMULATED, simulated_policy
from gpuslice.diagnosis.simulate.rule import policy_names
from tests.builders import make_card


def node(name: str, *left: int, size: int = 16, cpu: float = 64_000, cpu_left: float = 64_000) -> FleetNode:
    memory = 256.0 * 1024
    return FleetNode(
        name,
        left=left,
        size=(size,) * len(left),
        cpu_milli=cpu,
        cpu_left=cpu_left,
        memory_mib=memory,
        memory_left=memory * cpu_left / cpu,
    )


def chosen(policy: str, *nodes: FleetNode, units: int = 4) -> str:
    fleet = Fleet()
    rows = {fleet.put(each): each.name for each in nodes}
    row = simulated_policy(policy, fleet).choose(Shape(units=units))
    assert row is not None
    return rows[row]


def test_the_node_is_kube_schedulers_choice_by_cpu_and_memory() -> None:
    packed, empty = node("packed", 4, 16, cpu_left=16_000), node("empty", 16, 16)
    assert chosen("claims", packed, empty) == "empty"
    assert chosen("claims-most-allocated", packed, empty) == "packed"
    assert chosen("bestfit", packed, empty) == "packed"


@given(st.lists(st.integers(0, 16), min_size=1, max_size=8), st.integers(1, 16))
def test_the_card_is_the_first_that_fits_as_an_agent_publishes_them(left: list[int], units: int) -> None:
    fleet = Fleet()
    row = fleet.put(node("n1", *left))
    slots = simulated_policy("claims", fleet).fitting_slots(Shape(units=units), row)
    cards = tuple(make_card(index, 16) for index in range(len(left)))
    held = {index: 16 - free for index, free in enumerate(left)}
    published = [device_index(each["name"]) for each in Pool("n1", cards).devices(held)]
    first = next((index for index in published if index is not None and left[index] >= units), None)
    assert slots == (None if first is None else (first,))


def test_a_simulation_may_ask_for_claims_and_all_means_the_extenders_policies() -> None:
    assert policy_names("claims,opportunity-cost") == ["claims", "opportunity-cost"]
    assert "claims" not in policy_names("all")
    with pytest.raises(ValueError, match="claims-most-allocated"):
        policy_names("tetris")
    assert len({policy.name for policy in SIMULATED}) == len(SIMULATED)
