"""What is simulated: nodes and pods, changed as requested, and placed.

Imports NumPy, and is therefore imported only when it is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import ceil, log2

from msgspec.structs import replace

from gpuslice.core.policy import DEFAULT_POLICY, POLICIES, FleetNode, Shape
from gpuslice.core.simulation.capacity import (
    Needed,
    Outcome,
    cards_needed,
    like,
    most_frequent,
    place_all,
)
from gpuslice.core.simulation.claims import SIMULATED
from gpuslice.core.simulation.replay import filling_arrivals
from gpuslice.core.simulation.trace import MOST_CARDS as MOST_CARDS_OF_A_NODE
from gpuslice.diagnosis.simulate.facts import Start

_ADDED = re.compile(r"([1-9]\d{0,6})x([1-9]\d{0,6})(?:x([1-9]\d{0,6}))?(?::(.+))?")
MOST_CARDS = 1_000_000  # more than the largest clusters have; beyond it, a typing error would run for hours
MOST_PODS = 10_000_000


@dataclass(frozen=True, slots=True)
class Wish:
    """What to change, and what to find out."""

    add: Sequence[str]
    drop: Sequence[str]
    growth: float
    policies: Sequence[str]
    seed: int
    needed: bool
    borrow: float = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Which pods are placed on which nodes, in which order."""

    pods_name: str
    nodes: Sequence[FleetNode]
    pods: Sequence[Shape]
    policies: Sequence[str]
    needed: bool
    now: Outcome | None
    borrow: float = 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one policy."""

    outcome: Outcome
    needed: Needed | None


@dataclass(frozen=True, slots=True)
class Simulation:
    """A plan and its results, by policy."""

    plan: Plan
    policies: dict[str, Result]

    @property
    def cards(self) -> int:
        return sum(units > 0 for node in self.plan.nodes for units in node.size)

    @property
    def card_units(self) -> float:
        """Units of a card of mean size."""
        return sum(sum(node.size) for node in self.plan.nodes) / max(self.cards, 1)

    @property
    def asked_units(self) -> int:
        return sum(shape.total_units for shape in self.plan.pods)

    @property
    def best(self) -> str:
        """The policy that places most; among equals the default, otherwise the first."""

        def rank(name: str) -> tuple[int, bool]:
            return self.policies[name].outcome.allocated_units, name == DEFAULT_POLICY

        return max(self.policies, key=rank)


def policy_names(text: str) -> list[str]:
    """`all` of the extender's policies, or names separated by commas; ValueError lists the valid names."""
    known = [policy.name for policy in SIMULATED]
    names = [policy.name for policy in POLICIES] if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f'--policy names "{name}", must be one or more of {",".join(known)}')
    return list(dict.fromkeys(names))


# -- the changes -------------------------------------------------------------------------------------------


def plan(start: Start, wish: Wish) -> Plan:
    """The changed nodes, and the pods in the order given by the seed; ValueError if nothing is left."""
    for name in wish.drop:
        if not any(fnmatchcase(node.name, name) for node in start.nodes):
            raise ValueError(f'--drop is "{name}", must be the name of a node; * stands for anything')
    nodes = [node for node in start.nodes if not any(fnmatchcase(node.name, name) for name in wish.drop)]
    for text in wish.add:
        nodes += _added(text, start.nodes)
    units = sum(shape.total_units for shape in start.pods)
    if not nodes:
        raise ValueError("there are no nodes with shared cards to place anything on")
    if not units:
        raise ValueError("there are no pods that ask for a part of a card")
    cards = sum(len(node.size) for node in nodes)
    if cards > MOST_CARDS:
        raise ValueError(f"{cards} cards are too many to simulate: {MOST_CARDS} are the most")
    grown = len(start.pods) * wish.growth
    if grown > MOST_PODS:
        raise ValueError(f"--growth {wish.growth:g} makes {grown:.0f} pods: {MOST_PODS} are the most")
    if start.now is not None and wish.growth == 1:
        pods = list(start.pods)  # unchanged: otherwise it could not be compared with the present state
    else:
        pods = filling_arrivals(start.pods, units, wish.seed, wish.growth)
    if not pods:
        raise ValueError(f"--growth {wish.growth:g} leaves no pods")
    whole = max(max(node.size, default=0) for node in nodes)
    pods = [
        replace(shape, units=ceil(shape.units / wish.borrow)) if shape.units < whole else shape
        for shape in pods
    ]
    return Plan(start.name, nodes, pods, wish.policies, wish.needed, start.now, wish.borrow)


def _added(text: str, others: Sequence[FleetNode]) -> list[FleetNode]:
    """`4x8x80:A100`: four nodes of eight cards of 80 units; units and model default to the most common."""
    match = _ADDED.fullmatch(text)
    if match is None:
        raise ValueError(f'--add is "{text}", must be NODESxCARDS, NODESxCARDSxUNITS or either with :MODEL')
    usual = most_frequent(others) if others else None
    if match[3] is None and usual is None:
        raise ValueError(f'--add is "{text}", must name the units of a card too, as no other node has any')
    if int(match[2]) > MOST_CARDS_OF_A_NODE:
        raise ValueError(f'--add is "{text}": {MOST_CARDS_OF_A_NODE} cards of a node are the most')
    if int(match[1]) * int(match[2]) > MOST_CARDS:
        raise ValueError(f'--add is "{text}": {MOST_CARDS} cards are the most')
    units = int(match[3]) if match[3] else max(usual.size) if usual else 0
    model = match[4] or (usual.model if usual else "")
    size = (units,) * int(match[2])
    return [like(others, f"added-{text}-{number}", size, model) for number in range(1, int(match[1]) + 1)]


# -- the results -------------------------------------------------------------------------------------------


def steps(chosen: Plan) -> int:
    """The approximate number of replays, for a progress bar."""
    tries = 2 + int(log2(len(chosen.nodes))) if chosen.needed else 0
    return len(chosen.policies) * (1 + tries)


def run(chosen: Plan, progress: Callable[[float], None]) -> Simulation:
    """Place everything with each policy; `progress` gets the number of replays done, with fractions."""
    each = steps(chosen) // len(chosen.policies)

    def of_policy(number: int, name: str) -> Result:
        done = number * each
        outcome = place_all(chosen.nodes, chosen.pods, name, lambda part: progress(done + part))
        if not chosen.needed:
            return Result(outcome, None)
        needed = cards_needed(chosen.nodes, chosen.pods, name, lambda tries: progress(done + 1 + tries))
        return Result(outcome, needed)

    return Simulation(chosen, {name: of_policy(number, name) for number, name in enumerate(chosen.policies)})
