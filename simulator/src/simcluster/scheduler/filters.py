"""The in-tree filters, in their default order and with their exact words (Kubernetes 1.36)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpuslice.core.node_affinity import meets
from simcluster.cluster.amounts import Object, pod_requests
from simcluster.controllers.placement import tolerates
from simcluster.scheduler.nodes import NodeInfo, host_ports

UNSCHEDULABLE_TAINT = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a node was filtered out; `unresolvable` if removing other pods would not help."""

    reasons: tuple[str, ...]
    unresolvable: bool = False


Filter = Callable[[Object, NodeInfo, frozenset[str]], Failure | None]


def check(pod: Object, node: NodeInfo, ignored: frozenset[str] = frozenset()) -> Failure | None:
    """The first filter that rejects. `ignored`: resources of an extender with ``ignoredByScheduler``."""
    for one in FILTERS:
        failure = one(pod, node, ignored)
        if failure is not None:
            return failure
    return None


def _unschedulable(pod: Object, node: NodeInfo, _: frozenset[str]) -> Failure | None:
    if not node.unschedulable or tolerates(pod, UNSCHEDULABLE_TAINT):
        return None
    return Failure(("node(s) were unschedulable",), unresolvable=True)


def _node_name(pod: Object, node: NodeInfo, _: frozenset[str]) -> Failure | None:
    wanted = pod["spec"].get("nodeName")
    if not wanted or wanted == node.name:
        return None
    return Failure(("node(s) didn't match the requested node name",), unresolvable=True)


def _taints(pod: Object, node: NodeInfo, _: frozenset[str]) -> Failure | None:
    hard = [taint for taint in node.taints if taint.get("effect") in ("NoSchedule", "NoExecute")]
    if all(pod_tolerates(pod, taint) for taint in hard):
        return None
    return Failure(("node(s) had untolerated taint(s)",), unresolvable=True)


def node_affinity(pod: Object, node: NodeInfo, _: frozenset[str]) -> Failure | None:
    selector = pod["spec"].get("nodeSelector") or {}
    plain = all(node.labels.get(key) == value for key, value in selector.items())
    if plain and meets(pod["spec"].get("affinity"), node.name, node.labels):
        return None
    return Failure(("node(s) didn't match Pod's node affinity/selector",), unresolvable=True)


def _ports(pod: Object, node: NodeInfo, _: frozenset[str]) -> Failure | None:
    if host_ports(pod).isdisjoint(node.ports()):
        return None
    return Failure(("node(s) didn't have free ports for the requested pod ports",))


def _resources(pod: Object, node: NodeInfo, ignored: frozenset[str]) -> Failure | None:
    reasons: list[str] = []
    unresolvable = False
    if len(node.pods) + 1 > node.allocatable.get("pods", 0):
        reasons.append("Too many pods")
    for name, asked in pod_requests(pod).items():
        allocatable = node.allocatable.get(name, 0)
        if name in ignored or asked == 0 or asked <= allocatable - node.used.get(name, 0):
            continue
        reasons.append(f"Insufficient {name}")
        unresolvable = unresolvable or asked > allocatable
    return Failure(tuple(reasons), unresolvable) if reasons else None


FILTERS: tuple[Filter, ...] = (_unschedulable, _node_name, _taints, node_affinity, _ports, _resources)


def pod_tolerates(pod: Object, taint: dict[str, str]) -> bool:
    return any(tolerates(one, taint) for one in pod["spec"].get("tolerations") or ())
