"""What waits for cards, which nodes would hold it, and which nodes could be emptied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.views import pod_view
from gpuslice.core.ledger import shape_of
from gpuslice.core.model import Pod
from gpuslice.core.node_filters import NodeFilters, Place
from gpuslice.core.node_group import group_of, is_leaving, lasting
from gpuslice.core.policy import DEFAULT_POLICY
from gpuslice.core.policy.fleet import FleetNode, Shape
from gpuslice.core.simulation.capacity import empty
from gpuslice.core.simulation.node_demand import Demand, Waiting, demand, emptied
from gpuslice.core.words import counted
from gpuslice.diagnosis.cluster import Cluster
from gpuslice.diagnosis.places import wish_of
from gpuslice.diagnosis.table import fitted

UNGROUPED = "-"
MOST_EMPTIED = 1000  # nodes that are tried, those with the least in use first


@dataclass(frozen=True, slots=True)
class Capacity:
    """`waiting`: pods, and where each could go; `nodes`: how many each group has.

    `moves`: nodes that could be emptied, all together: node → pod → the node to which it would go.
    """

    waiting: Sequence[tuple[Pod, str]]
    nodes: Mapping[str, int]
    needed: Demand
    moves: Mapping[str, Mapping[str, str]]


def capacity_of(cluster: Cluster, namespace: str = "") -> Capacity:
    """Of the nodes that share cards by an extended resource. Pods behind scheduling gates are left out."""
    nodes, new, places = _groups(cluster)
    waiting = [
        (each, view)
        for each in cluster.pods
        if (view := pod_view(each)).request is not None and not (view.node or view.gates or view.terminating)
    ]
    asking = [_waiting(each, view, places) for each, view in waiting]
    needed = demand(nodes, new, asking, DEFAULT_POLICY, most=max(1, len(asking)))
    groups = {each.uid: each.groups for each in asking}
    shown = [
        (view, _where(view, groups[view.uid], needed))
        for _, view in waiting
        if namespace in ("", view.namespace)
    ]
    counts = {name: len(nodes.get(name, ())) for name in places}
    return Capacity(shown, counts, needed, _moves(cluster, nodes))


def _groups(
    cluster: Cluster,
) -> tuple[dict[str, list[FleetNode]], dict[str, FleetNode], dict[str, Place]]:
    """Nodes by group, and of each group a new one, with its cards and as others see it."""
    ledger, nodes = cluster.ledger, defaultdict[str, list[FleetNode]](list)
    new, places = dict[str, FleetNode](), dict[str, Place]()
    for place in cluster.places:
        holds = ledger.holds.on(place.name)
        if holds is None or holds.node is None or not holds.node.divides_cards:
            continue
        group = group_of(place.labels)
        name = group.name if group is not None else UNGROUPED
        row = holds.row(ledger.host_used(place.name))
        if place.ready and place.schedulable and not is_leaving(place.taints):
            nodes[name].append(row)
        if group is not None:
            new[name] = empty(row)
        taints = lasting(place.taints)
        places.setdefault(name, Place(place.name, labels=place.labels, taints=taints))
    return nodes, new, places


def _waiting(each: objects.Pod, view: Pod, places: Mapping[str, Place]) -> Waiting:
    assert view.request is not None
    wish = wish_of(each, view.request)
    groups = (name for name, place in places.items() if not NodeFilters([place], wish).obstacle(place))
    return Waiting(view.uid, shape_of(view.request), frozenset(groups))


def _where(pod: Pod, groups: Iterable[str], needed: Demand) -> str:
    if not groups:
        return "on no nodes that there are: selectors, affinity or taints"
    if pod.uid in needed.nowhere:
        return "on no node of any group, even empty"
    group = needed.group_of.get(pod.uid)
    return f"on a new node of {group}" if group is not None else "on a node that there is"


def _moves(cluster: Cluster, nodes: Mapping[str, list[FleetNode]]) -> dict[str, dict[str, str]]:
    ledger = cluster.ledger
    on: dict[str, dict[str, Shape]] = {}
    for found in nodes.values():
        for node in found:
            holds = ledger.holds.by_node[node.name].by_uid.values()
            pods = [each.pod for each in holds if each.placement is not None]
            shapes = {pod.key: shape_of(pod.request) for pod in pods if pod.request is not None}
            if shapes and len(shapes) == len(holds):
                on[node.name] = shapes
    order = sorted(on, key=lambda name: sum(shape.total_units for shape in on[name].values()))
    return emptied(nodes, {name: on[name] for name in order[:MOST_EMPTIED]}, DEFAULT_POLICY)


# -- in words ----------------------------------------------------------------------------------------------


def document(found: Capacity) -> dict[str, Any]:
    """For programs."""
    return {
        "waiting": [
            {
                "pod": pod.key,
                "units": pod.request.units if pod.request is not None else 0,
                "cards": pod.request.card_count if pod.request is not None else 0,
                "fits": where,
            }
            for pod, where in found.waiting
        ],
        "groups": [
            {
                "group": name,
                "nodes": found.nodes.get(name, 0),
                "add": found.needed.nodes.get(name, 0),
                "hidden": found.needed.hidden.get(name, 0),
            }
            for name in sorted(found.nodes)
        ],
        "emptied": [
            {"node": node, "moves": [{"pod": pod, "to": to} for pod, to in moves.items()]}
            for node, moves in sorted(found.moves.items())
        ],
    }


def text(found: Capacity) -> str:
    """For people."""
    parts = []
    if found.waiting:
        rows = [["WAITING", "ASKS FOR", "WOULD START"]]
        for pod, where in found.waiting:
            request = pod.request
            assert request is not None
            cards = f" on {request.card_count} cards" if request.card_count > 1 else ""
            rows.append([pod.key, f"{counted(request.units, 'unit')}{cards}", where])
        parts.append(fitted(rows, cut=(0, 2)))
    rows = [["GROUP", "NODES", "TO ADD", "OF THESE HIDDEN BY SUMS"]]
    for name in sorted(found.nodes):
        needed = found.needed
        amounts = (found.nodes[name], needed.nodes.get(name, 0), needed.hidden.get(name, 0))
        rows.append([name, *map(str, amounts)])
    parts.append(fitted(rows, cut=(0,)))
    if found.moves:
        rows = [["COULD BE EMPTIED", "BY MOVING", "TO"]]
        for node, moves in sorted(found.moves.items()):
            for number, (moved, to) in enumerate(moves.items()):
                rows.append(["" if number else node, moved, to])
        parts.append(fitted(rows, cut=(1, 0, 2)))
    return "\n".join(parts)
