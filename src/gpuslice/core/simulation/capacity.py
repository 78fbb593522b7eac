"""Answers about capacity: what of a workload fits, why the rest does not, how many cards it takes.

Every answer comes from placing the pods one after another with the very policy that a scheduler would use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

import numpy as np

from gpuslice.core.card_links import Link
from gpuslice.core.placement import Fit
from gpuslice.core.policy.fit import card_fits, fitting_rows, why_not
from gpuslice.core.policy.fleet import UNLIMITED, Fleet, FleetNode, Rows, Shape
from gpuslice.core.simulation.claims import simulated_policy
from gpuslice.core.simulation.replay import Cluster, Filling, Progress, fill
from gpuslice.core.simulation.trace import fleet_of
from gpuslice.core.words import counted

MOST_TIMES = 32  # the nodes given; a workload that needs more is a mistake in its description


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Pods of one shape that found no place. `never`: not even on empty nodes."""

    shape: Shape
    pods: int
    reason: str
    never: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a cluster looks when a workload has been placed. Units as the nodes count them."""

    cards: int
    units: int
    allocated_units: int
    free_cards: int  # wholly free
    free_nodes: int  # with none of their cards in use
    pods: int
    placed: int
    unplaced: tuple[Unplaced, ...]
    allocation_pct_at: dict[int, float]
    joined: Mapping[Link, int] = field(default_factory=dict)  # as of `Filling`, where a node's cards differ

    @property
    def allocation_pct(self) -> float:
        return 100 * self.allocated_units / self.units if self.units else 0.0


@dataclass(frozen=True, slots=True)
class Needed:
    """The smallest cluster found that holds all pods that any node could ever hold.

    With the same mix of nodes as given, of which `added` are more than there are.
    """

    nodes: int
    cards: int
    added: int


def place_all(
    nodes: Sequence[FleetNode], pods: Sequence[Shape], policy: str, progress: Progress | None = None
) -> Outcome:
    """Place the pods in this order on these nodes, which are taken to be empty."""
    cluster, filling = _fill(nodes, pods, policy, progress)
    placed = len(pods) - len(filling.refused)
    outcome = outcome_of(cluster.fleet, filling.refused, placed, filling.allocation_pct_at)
    return replace(outcome, joined=filling.joined)


def outcome_of(
    fleet: Fleet, refused: Sequence[Shape], placed: int, allocation_pct_at: dict[int, float]
) -> Outcome:
    """What a fleet looks like; `refused` are told why by its present state."""
    usable = fleet.size > 0
    free = usable & (fleet.left == fleet.size)
    units, left = int(fleet.size.sum()), int(fleet.left[usable].sum())
    return Outcome(
        cards=int(fleet.cards.sum()),
        units=units,
        allocated_units=units - left,
        free_cards=int(free.sum()),
        free_nodes=int(((free.sum(axis=1) == fleet.cards) & (fleet.cards > 0)).sum()),
        pods=placed + len(refused),
        placed=placed,
        unplaced=tuple(explain(fleet, shape, pods) for shape, pods in Counter(refused).most_common()),
        allocation_pct_at=allocation_pct_at,
    )


def _fill(
    nodes: Sequence[FleetNode], pods: Sequence[Shape], policy: str, progress: Progress | None = None
) -> tuple[Cluster, Filling]:
    fleet = fleet_of([empty(node) for node in nodes])
    cluster = Cluster(fleet, simulated_policy(policy, fleet))
    return cluster, fill(cluster, pods, max(1, int(fleet.size.sum())), progress)


def empty(node: FleetNode) -> FleetNode:
    """The same node with nothing on it."""
    core = tuple(100 if percent > 0 else 0 for percent in node.compute_left)
    return replace(
        node, left=node.size, compute_left=core, cpu_left=node.cpu_milli, memory_left=node.memory_mib
    )


# -- how many cards ----------------------------------------------------------------------------------------


def cards_needed(
    nodes: Sequence[FleetNode], pods: Sequence[Shape], policy: str, progress: Progress = lambda _: None
) -> Needed | None:
    """The smallest cluster of this mix of nodes that holds the pods; None when there is no such cluster.

    `progress` hears how many sizes were tried, parts of one too: about the binary logarithm of the number of
    nodes in the end.
    """
    fleet = fleet_of([empty(node) for node in nodes])
    rows = np.arange(fleet.rows)
    fits = {shape: bool(len(fitting_rows(fleet, shape, rows))) for shape in set(pods)}
    possible = [shape for shape in pods if fits[shape]]
    if not possible:
        return None
    line, tried = mixed(nodes), 0

    def holds(count: int) -> bool:
        nonlocal tried
        filling = _fill(_first(line, count), possible, policy, lambda part: progress(tried + part))[1]
        tried += 1
        return not filling.refused

    least, most = 0, len(line)
    while not holds(most):
        least, most = most, 2 * most
        if most > MOST_TIMES * len(line):
            return None
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if holds(middle) else (middle, most)
    cards = sum(_cards(node) for node in _first(line, most))
    return Needed(nodes=most, cards=cards, added=max(0, most - len(line)))


def _first(line: Sequence[FleetNode], count: int) -> list[FleetNode]:
    """The first `count` nodes of a line that begins again at its end."""
    rounds = -(-count // len(line))
    copies = [replace(node, name=f"{node.name}+{turn}") for turn in range(1, rounds) for node in line]
    return [*line, *copies][:count]


def mixed(nodes: Sequence[FleetNode]) -> list[FleetNode]:
    """The nodes so ordered that every beginning has about the same mix of kinds as all of them."""
    counts = Counter(_kind(node) for node in nodes)
    seen: Counter[object] = Counter()
    places = []
    for node in nodes:
        kind = _kind(node)
        places.append((seen[kind] + 0.5) / counts[kind])
        seen[kind] += 1
    order = sorted(range(len(nodes)), key=lambda index: (places[index], index))
    return [nodes[index] for index in order]


def most_frequent(nodes: Sequence[FleetNode]) -> FleetNode:
    """A node of the kind that there are most of."""
    kind = Counter(_kind(node) for node in nodes).most_common(1)[0][0]
    return next(node for node in nodes if _kind(node) == kind)


def like(nodes: Sequence[FleetNode], name: str, size: tuple[int, ...], model: str) -> FleetNode:
    """A new node, with as much CPU and memory for a card as the others have on average, where known."""
    cards = sum(_cards(node) for node in nodes)
    cpu, memory = sum(node.cpu_milli for node in nodes), sum(node.memory_mib for node in nodes)
    known = cards > 0 and isfinite(cpu) and isfinite(memory)
    cpu_milli = len(size) * cpu // cards if known else UNLIMITED
    memory_mib = len(size) * memory // cards if known else UNLIMITED
    core = (100,) * len(size)
    return FleetNode(name, size, size, core, model, cpu_milli, memory_mib, cpu_milli, memory_mib)


def _kind(node: FleetNode) -> tuple[object, ...]:
    return (tuple(node.size), node.model, node.cpu_milli, node.memory_mib)


def _cards(node: FleetNode) -> int:
    return sum(units > 0 for units in node.size)


# -- why not -----------------------------------------------------------------------------------------------


def explain(fleet: Fleet, shape: Shape, pods: int = 1) -> Unplaced:
    """Why no node of `fleet` holds `shape` now: what is missing, and the most there is."""
    rows = np.flatnonzero(fleet.cards > 0)
    fits = why_not(fleet, shape, rows, host_limits=True)
    rows = rows[fits > Fit.OTHER_MODEL]
    if not len(rows):
        never = {
            Fit.OTHER_MODEL: f"no node has a card of model {' or '.join(sorted(shape.models))}",
            Fit.COMPUTE_REQUIRED: "every node takes only pods that ask for compute too",
            Fit.TIER_TOO_LOW: "no node's tier of isolation is as high as the pod asks for",
            Fit.OTHER_NAMES: f"no node offers {shape.names}",
        }.get(Fit(fits.max(initial=Fit.NOT_SHARED)), "no cards")
    else:
        large = (fleet.size[rows] >= max(shape.units, 1)).sum(axis=1)
        if large.max() == 0:
            never = (
                f"no card has {counted(shape.units, 'unit')}, the largest has {int(fleet.size[rows].max())}"
            )
        elif large.max() < shape.cards:
            each = counted(shape.units, "unit")
            never = f"no node has {shape.cards} cards of {each}, at most {int(large.max())}"
        elif (fleet.cpu_milli[rows] < shape.cpu_milli).all():
            never = f"no node has {shape.cpu_milli} milli CPU"
        elif (fleet.memory_mib[rows] < shape.memory_mib).all():
            never = f"no node has {shape.memory_mib} MiB of memory"
        else:
            never = ""
    reason = never or _no_cards(fleet, shape, rows) or _no_host_resources(fleet, shape, rows)
    return Unplaced(shape, pods, reason, bool(never))


def _no_cards(fleet: Fleet, shape: Shape, rows: Rows) -> str:
    enough = card_fits(fleet, shape, rows).sum(axis=1)
    if shape.cards == 0 or enough.max() >= shape.cards:
        return ""
    left, cards = fleet.left[rows], int(enough.sum())
    if not left.any() or (shape.cards > 1 and not cards):
        return "no such card is free"
    if shape.cards > 1:
        some = f"{cards} such cards are free, but at most {int(enough.max())} on one node"
        return some if cards >= shape.cards else f"only {cards} such cards are free, on all nodes together"
    if shape.compute_percent and (left >= shape.units).any():
        percent = shape.compute_percent
        return f"no card with {counted(shape.units, 'unit')} free has {percent} % of its compute left"
    if left.sum() >= shape.units:
        return f"{int(left.sum())} units are free in pieces, at most {int(left.max())} on one card"
    return f"in all no more than {int(left.sum())} units are free"


def _no_host_resources(fleet: Fleet, shape: Shape, rows: Rows) -> str:
    """The cards are there; what is missing beside them."""
    if shape.cards:
        rows = rows[card_fits(fleet, shape, rows).sum(axis=1) >= shape.cards]
    cpu, memory = fleet.cpu_left[rows], fleet.memory_left[rows]
    if ((cpu >= shape.cpu_milli) & (memory >= shape.memory_mib)).any():
        return "there is room: gpuslice explain tells why a pod waits"
    nodes = counted(len(rows), "node")
    where = f"where such cards are free ({nodes})" if shape.cards else "on any node"
    if (cpu < shape.cpu_milli).all():
        return f"at most {int(cpu.max())} milli CPU are free {where}"
    if (memory < shape.memory_mib).all():
        return f"at most {int(memory.max())} MiB of memory are free {where}"
    few_cpu, few_memory = int((cpu < shape.cpu_milli).sum()), int((memory < shape.memory_mib).sum())
    if shape.cards and few_cpu and few_memory:
        return f"of {nodes} where such cards are free {few_cpu} lack CPU, {few_memory} lack memory"
    return f"CPU and memory are not free together {where}"
