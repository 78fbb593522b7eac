"""Fleets for tests: mention only what matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from gpuslice.core.policy import Fleet, FleetNode, Policy, Shape

MODELS = ("A", "B")


def make_fleet_node(
    name: str = "n1", cards: Sequence[int] = (15,), *, left: Sequence[int] | None = None, **fields: Any
) -> FleetNode:
    """`cards`: the units of each card; all of them are free unless `left` says what is."""
    return FleetNode(name, tuple(cards), tuple(cards if left is None else left), **fields)


def make_fleet(*nodes: Sequence[int]) -> Fleet:
    """A fleet of nodes n1, n2 … with cards of these sizes."""
    fleet = Fleet()
    for number, cards in enumerate(nodes, start=1):
        fleet.put(make_fleet_node(f"n{number}", cards))
    return fleet


def place(fleet: Fleet, policy: Policy, shape: Shape) -> tuple[int, tuple[int, ...]] | None:
    """Let a pod arrive, and hold what it gets."""
    policy.arrived(shape)
    row = policy.choose(shape)
    if row is None:
        return None
    slots = policy.slots(shape, row)
    fleet.take(row, slots, shape)
    policy.placed(shape)
    return row, slots


shapes = st.builds(
    Shape,
    units=st.integers(1, 20) | st.sampled_from([801, 9_600]),
    cards=st.sampled_from([0, 1, 1, 1, 2, 4]),
    cpu_milli=st.sampled_from([0, 500, 4000]),
    memory_mib=st.sampled_from([0, 1024]),
    models=st.sampled_from([frozenset(), frozenset({"A"}), frozenset(MODELS)]),
    compute_percent=st.sampled_from([0, 0, 30]),
)


@st.composite
def fleet_nodes(draw: st.DrawFn, name: str) -> FleetNode:
    """A node with up to eight cards, of one size or several, some not usable, CPU known or not."""
    cards = draw(st.lists(st.sampled_from([15, 15, 15, 20, 19_200, 0]), max_size=8))
    known = draw(st.booleans())
    cpu = float(draw(st.integers(1000, 32_000))) if known else float("inf")
    memory = float(draw(st.integers(1000, 64_000))) if known else float("inf")
    core = tuple(draw(st.sampled_from([100, 100, 20])) if units else 0 for units in cards)
    model = draw(st.sampled_from(MODELS))
    return FleetNode(name, tuple(cards), tuple(cards), core, model, cpu, memory, cpu, memory)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Up to eight nodes."""
    fleet = Fleet()
    for number in range(draw(st.integers(1, 8))):
        fleet.put(draw(fleet_nodes(f"n{number}")))
    return fleet
