"""A cluster as ``gpuslice simulate`` and the console place it again."""

from __future__ import annotations

from collections.abc import Iterable

from gpuslice.adapters.kube import objects
from gpuslice.apps.diagnosis.claims import Claims
from gpuslice.core.host_resources import HostResources
from gpuslice.core.ledger import Ledger, shape_of
from gpuslice.core.model import Pod
from gpuslice.core.policy import UNLIMITED, FleetNode, Shape
from gpuslice.core.simulation.capacity import Outcome, outcome_of


def with_claims(ledger: Ledger, claims: Claims, pods: Iterable[objects.Pod]) -> Ledger:
    """A copy of `ledger` in which nodes of claims, and those of `pods` that claim parts of cards, are as the
    others: as if all were given out in one way."""
    claiming = {each.pod.uid: each.pod for each in map(claims.of, pods) if each is not None}
    guests = {name: ledger.host_used_without_cards(name) for name in ledger.node_names()}
    for pod in claiming.values():  # so far they count as guests of their nodes
        if pod.node in guests:
            cpu, memory = guests[pod.node].cpu_milli, guests[pod.node].memory_mib
            guests[pod.node] = HostResources(cpu - pod.host.cpu_milli, memory - pod.host.memory_mib)
    both = Ledger()
    for name, host in guests.items():
        if state := claims.ledger.state(name) or ledger.state(name):
            both.apply_node(state.node)
        both.apply_pod(Pod(f"guests of {name}", "", f"guests of {name}", name, host=host))
    for pod in {**ledger.pods, **claiming}.values():
        both.apply_pod(pod)
    return both


def fleet_of(ledger: Ledger) -> tuple[list[FleetNode], list[Shape], list[Shape], Outcome]:
    """The nodes that share cards, empty; what pods that have a place ask for, and what those that wait do;
    and how the cluster is."""
    states = [state for name in ledger.node_names() if (state := ledger.state(name)) and state.node.cards]
    nodes = []
    for state in states:
        node = state.node
        size = tuple(0 if card.index in node.unhealthy else card.units for card in node.cards)
        models = {card.model for card in node.cards}
        core = (node.compute_percent,) * len(size)
        model = models.pop() if len(models) == 1 else ""
        guests = ledger.host_used_without_cards(node.name)  # they stay where they are
        cpu = max(0, node.host.cpu_milli - guests.cpu_milli) if node.host.cpu_milli else UNLIMITED
        memory = max(0, node.host.memory_mib - guests.memory_mib) if node.host.memory_mib else UNLIMITED
        nodes.append(FleetNode(node.name, size, size, core, model, cpu, memory, cpu, memory, node.links))
    shapes = {pod.uid: shape_of(pod.request) for pod in ledger.pods.values() if pod.request is not None}
    waiting = [shape for uid, shape in shapes.items() if ledger.allocation(uid) is None]
    now = outcome_of(ledger.flush(), waiting, len(shapes) - len(waiting), {})
    placed = [shape for uid, shape in shapes.items() if ledger.allocation(uid) is not None]
    return nodes, placed, waiting, now
