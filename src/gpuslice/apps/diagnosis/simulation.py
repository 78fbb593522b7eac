"""A cluster as ``gpuslice simulate`` and the console place it again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from msgspec.structs import replace as replace_fields

from gpuslice.adapters.kube import objects
from gpuslice.apps.diagnosis.claims import Claims
from gpuslice.core.host_resources import HostResources
from gpuslice.core.ledger import Ledger, shape_of
from gpuslice.core.model import Pod
from gpuslice.core.policy import FleetNode, Shape
from gpuslice.core.simulation.capacity import Outcome, outcome_of


def with_claims(ledger: Ledger, claims: Claims, pods: Iterable[objects.Pod]) -> Ledger:
    """A copy of `ledger` in which nodes of claims, and those of `pods` that claim parts of cards, are as the
    others: as if all were given out in one way."""
    claiming = {each.pod.uid: each.pod for each in map(claims.of, pods) if each is not None}
    others = {name: ledger.host_used_without_cards(name) for name in ledger.node_names()}
    for pod in claiming.values():  # so far they count as other pods of their nodes
        if pod.node in others:
            cpu, memory = others[pod.node].cpu_milli, others[pod.node].memory_mib
            others[pod.node] = HostResources(cpu - pod.host.cpu_milli, memory - pod.host.memory_mib)
    both = Ledger()
    for name, host in others.items():
        if state := claims.ledger.state(name) or ledger.state(name):
            both.apply_node(state.node)
        both.apply_pod(Pod(f"other pods of {name}", "", f"other pods of {name}", name, host=host))
    for pod in {**ledger.pods, **claiming}.values():
        both.apply_pod(pod)
    return both


def fleet_of(ledger: Ledger) -> tuple[list[FleetNode], list[Shape], list[Shape], Outcome]:
    """The nodes that share cards, empty; what pods that have a place ask for, and what those that wait do;
    and how the cluster is."""
    nodes = []
    for name in ledger.node_names():
        holds = ledger.holds.on(name)
        if holds is None or holds.node is None or not holds.node.cards:
            continue
        row = holds.row(ledger.host_used_without_cards(name))  # those pods stay where they are
        core = (row.compute_percent,) * len(row.size)
        nodes.append(
            replace(row, left=row.size, compute_left=core, cpu_milli=row.cpu_left, memory_mib=row.memory_left)
        )
    shapes = {
        pod.uid: replace_fields(shape_of(pod.request), names="")  # the webhook changes names, where it runs
        for pod in ledger.pods.values()
        if pod.request is not None
    }
    waiting = [shape for uid, shape in shapes.items() if ledger.holds.of(uid) is None]
    now = outcome_of(ledger.flush(), waiting, len(shapes) - len(waiting), {})
    placed = [shape for uid, shape in shapes.items() if ledger.holds.of(uid) is not None]
    return nodes, placed, waiting, now
