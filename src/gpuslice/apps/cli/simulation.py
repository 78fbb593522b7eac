"""What ``gpuslice simulate`` does: gather nodes and pods, change them as wished, place, tell.

Imports NumPy, therefore it is imported only when the command is called.

`document` is the shape of ``-o json``::

    nodes, cards, pods                      what was simulated
    now {…}                                 with --from-cluster: the cluster as it is, without changes
    policies[]  policy, allocatedPercent, placed, pods, freeCards, freeNodes
                needed {nodes, cards, added}        absent when not asked for or not found
                unplaced[]  pods, cards, unitsPerCard, corePercent, cpuMilli, memoryMiB, models, reason, never
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import log2
from pathlib import Path
from typing import Any

from gpuslice.adapters.kube.resources import CONFIG_MAPS, NODES, PODS
from gpuslice.adapters.kube.sync import SyncClient
from gpuslice.adapters.kube.views import node_view, pod_view, unhealthy_view
from gpuslice.apps.cli.cluster import client_of
from gpuslice.apps.cli.flags import Flags
from gpuslice.apps.cli.output import counted
from gpuslice.apps.cli.table import aligned, row
from gpuslice.apps.cli.trace_files import find_nodes, load_nodes, load_pods
from gpuslice.core.contract import SYSTEM_NAMESPACE
from gpuslice.core.ledger import Ledger, shape_of
from gpuslice.core.policy import POLICIES, UNLIMITED, FleetNode, Shape
from gpuslice.core.policy.capacity import (
    Needed,
    Outcome,
    Unplaced,
    cards_needed,
    like,
    most_frequent,
    outcome_of,
    place_all,
)
from gpuslice.core.policy.replay import filling_arrivals

MOST_LINES = 10  # of what does not fit, in a table
_ADDED = re.compile(r"(\d+)x(\d+)(?:x(\d+))?(?::(.+))?")


@dataclass(frozen=True, slots=True)
class Start:
    """The nodes, empty, and the pods to begin with. `now`: how the cluster is, where there is one."""

    name: str
    nodes: Sequence[FleetNode]
    pods: Sequence[Shape]
    now: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be different, and what to find out."""

    add: Sequence[str]
    drop: Sequence[str]
    growth: float
    policies: Sequence[str]
    seed: int
    needed: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What is placed on what, in which order."""

    pods_name: str
    nodes: Sequence[FleetNode]
    pods: Sequence[Shape]
    policies: Sequence[str]
    needed: bool
    now: Outcome | None


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one policy."""

    outcome: Outcome
    needed: Needed | None


@dataclass(frozen=True, slots=True)
class Simulation:
    """A plan and what came of it, by policy."""

    plan: Plan
    policies: dict[str, Result]

    @property
    def cards(self) -> int:
        return sum(units > 0 for node in self.plan.nodes for units in node.size)


def policy_names(text: str) -> list[str]:
    """`all`, or names with commas between; ValueError says which there are."""
    known = [policy.name for policy in POLICIES]
    names = known if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f'--policy names "{name}", wants all or some of {",".join(known)}')
    return list(dict.fromkeys(names))


# -- where it starts ---------------------------------------------------------------------------------------


def from_files(pods: Path, nodes: Path | None) -> Start:
    """A trace."""
    trace = load_pods(pods)
    return Start(trace.name, load_nodes(find_nodes(pods, nodes)), trace.shapes)


def from_cluster(flags: Flags) -> Start:
    """The nodes that share cards, and all living pods that ask for a part of one."""
    ledger = _read_ledger(client_of(flags))
    states = [state for name in ledger.node_names() if (state := ledger.state(name)) and state.node.gpus]
    nodes = []
    for state in states:
        node = state.node
        size = tuple(0 if gpu.index in node.unhealthy else gpu.units for gpu in node.gpus)
        models = {gpu.model for gpu in node.gpus}
        core = (node.core_percent,) * len(size)
        model = models.pop() if len(models) == 1 else ""
        guests = ledger.eaten_by_guests(node.name)  # they stay where they are
        cpu = max(0, node.feed.cpu_milli - guests.cpu_milli) if node.feed.cpu_milli else UNLIMITED
        memory = max(0, node.feed.memory_mib - guests.memory_mib) if node.feed.memory_mib else UNLIMITED
        nodes.append(FleetNode(node.name, size, size, core, model, cpu, memory, cpu, memory))
    shapes = {pod.uid: shape_of(pod.request) for pod in ledger.pods.values() if pod.request is not None}
    waiting = [shape for uid, shape in shapes.items() if ledger.holding(uid) is None]
    now = outcome_of(ledger.flush(), waiting, len(shapes) - len(waiting), {})
    return Start("the cluster's pods", nodes, list(shapes.values()), now)


def _read_ledger(client: SyncClient) -> Ledger:
    """What the cluster holds now, as the scheduler extender sees it."""
    unhealthy = {}
    for config_map in client.list(CONFIG_MAPS, SYSTEM_NAMESPACE):
        found = unhealthy_view(config_map)
        if found is not None:
            unhealthy[found[0]] = found[1]
    ledger = Ledger()
    for node in client.list(NODES):
        ledger.apply_node(node_view(node, unhealthy.get(node.metadata.name, frozenset())))
    for pod in client.list(PODS):
        ledger.apply_pod(pod_view(pod))
    return ledger


# -- what is different -------------------------------------------------------------------------------------


def plan(start: Start, wish: Wish) -> Plan:
    """The changed nodes and the pods in the order of the seed; ValueError when nothing is left."""
    nodes = [node for node in start.nodes if not any(fnmatchcase(node.name, name) for name in wish.drop)]
    for text in wish.add:
        nodes += _added(text, start.nodes)
    units = sum(shape.total_units for shape in start.pods)
    if not nodes:
        raise ValueError("there are no nodes with shared cards to place anything on")
    if not units:
        raise ValueError("there are no pods that ask for a part of a card")
    pods = filling_arrivals(start.pods, units, wish.seed, wish.growth)
    return Plan(start.name, nodes, pods, wish.policies, wish.needed, start.now)


def _added(text: str, others: Sequence[FleetNode]) -> list[FleetNode]:
    """`4x8x80:A100`: four nodes of eight cards of 80 units; units and model as most others have them."""
    match = _ADDED.fullmatch(text)
    if match is None:
        raise ValueError(f'--add is "{text}", wants NODESxCARDS, NODESxCARDSxUNITS or either with :MODEL')
    usual = most_frequent(others) if others else None
    if match[3] is None and usual is None:
        raise ValueError(f'--add is "{text}", wants the units of a card too, as no other node has any')
    units = int(match[3]) if match[3] else max(usual.size) if usual else 0
    model = match[4] or (usual.model if usual else "")
    size = (units,) * int(match[2])
    return [like(others, f"added-{text}-{number}", size, model) for number in range(1, int(match[1]) + 1)]


# -- what comes of it --------------------------------------------------------------------------------------


def steps(chosen: Plan) -> int:
    """About how many replays there will be, for a progress bar."""
    tries = 2 + int(log2(len(chosen.nodes))) if chosen.needed else 0
    return len(chosen.policies) * (1 + tries)


def run(chosen: Plan, done: Callable[[], None]) -> Simulation:
    """Place everything with each policy; `done` hears of every replay."""
    results = {}
    for name in chosen.policies:
        outcome = place_all(chosen.nodes, chosen.pods, name)
        done()
        needed = cards_needed(chosen.nodes, chosen.pods, name, done) if chosen.needed else None
        results[name] = Result(outcome, needed)
    return Simulation(chosen, results)


# -- how it is told ----------------------------------------------------------------------------------------


def document(simulation: Simulation) -> dict[str, Any]:
    """For programs; see the head of this file."""
    chosen = simulation.plan
    head: dict[str, Any] = {
        "nodes": len(chosen.nodes),
        "cards": simulation.cards,
        "pods": len(chosen.pods),
    }
    if chosen.now is not None:
        head["now"] = _outcome(chosen.now)
    return head | {"policies": [_policy(name, result) for name, result in simulation.policies.items()]}


def _policy(name: str, result: Result) -> dict[str, Any]:
    told = {"policy": name, **_outcome(result.outcome)}
    if result.needed is not None:
        needed = result.needed
        told["needed"] = {"nodes": needed.nodes, "cards": needed.cards, "added": needed.added}
    return told


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "allocatedPercent": round(outcome.allocation_pct, 2),
        "pods": outcome.pods,
        "placed": outcome.placed,
        "freeCards": outcome.free_cards,
        "freeNodes": outcome.free_nodes,
        "unplaced": [_unplaced(each) for each in outcome.unplaced],
    }


def _unplaced(each: Unplaced) -> dict[str, Any]:
    shape = each.shape
    told = {
        "pods": each.pods,
        "cards": shape.cards,
        "unitsPerCard": shape.units or None,
        "corePercent": shape.core_percent or None,
        "cpuMilli": shape.cpu_milli or None,
        "memoryMiB": shape.memory_mib or None,
        "models": sorted(shape.models) or None,
        "reason": each.reason,
        "never": each.never,
    }
    return {key: value for key, value in told.items() if value is not None}


def table(simulation: Simulation) -> str:
    """For people: a line for each policy, then what does not fit with the first of them."""
    text = row("POLICY", "ALLOCATED", "PODS PLACED", "FREE CARDS", "FREE NODES", "CARDS NEEDED")
    if simulation.plan.now is not None:
        text += _line("(now)", simulation.plan.now, "")
    for name, result in simulation.policies.items():
        text += _line(name, result.outcome, _needed(result.needed) if simulation.plan.needed else "")
    first, result = next(iter(simulation.policies.items()))
    return aligned(text) + _freed(simulation) + _not_fitting(first, result.outcome.unplaced)


def _line(name: str, outcome: Outcome, needed: str) -> str:
    placed = f"{outcome.placed} of {outcome.pods}"
    return row(
        name, f"{outcome.allocation_pct:.1f} %", placed, outcome.free_cards, outcome.free_nodes, needed
    )


def _needed(needed: Needed | None) -> str:
    if needed is None:
        return "not found"
    more = f", {needed.added} more" if needed.added else ""
    return f"{needed.cards} ({counted(needed.nodes, 'node')}{more})"


def _freed(simulation: Simulation) -> str:
    """What placing all anew with each policy would free, against the cluster as it is."""
    now = simulation.plan.now
    if now is None:
        return ""
    text = "\n"
    for name, result in simulation.policies.items():
        cards = result.outcome.free_cards - now.free_cards
        nodes = result.outcome.free_nodes - now.free_nodes
        text += f"{name} in place of how it is now: {cards:+d} wholly free cards, {nodes:+d} free nodes\n"
    return text


def _not_fitting(name: str, unplaced: Sequence[Unplaced]) -> str:
    if not unplaced:
        return f"\nEverything fits with {name}.\n"
    lines: Counter[tuple[str, str]] = Counter()
    for each in unplaced:
        lines[asked(each.shape), each.reason] += each.pods
    text = row("PODS", "ASKS FOR", "WHY NOT")
    for (words, reason), pods in lines.most_common(MOST_LINES):
        text += row(pods, words, reason)
    more = sum(pods for _, pods in lines.most_common()[MOST_LINES:])
    rest = f"… and {more} more pods; -o json lists all\n" if more > 0 else ""
    return f"\nDoes not fit with {name}:\n" + aligned(text) + rest


def asked(shape: Shape) -> str:
    """What a shape wants of the cards, in words; of a pod without GPU, what else it wants."""
    if not shape.cards:
        return f"{shape.cpu_milli} milli CPU, {shape.memory_mib} MiB"
    words = [f"{shape.units} units" + (f" on each of {shape.cards} cards" if shape.cards > 1 else "")]
    if shape.core_percent:
        words.append(f"{shape.core_percent} % compute")
    if shape.models:
        words.append("|".join(sorted(shape.models)))
    return ", ".join(words)
