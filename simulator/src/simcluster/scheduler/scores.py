"""The in-tree scores that matter here: the emptier and the more evenly filled node wins."""

from __future__ import annotations

from collections.abc import Iterable

from simcluster.cluster.amounts import Object, add, pod_requests
from simcluster.scheduler.filters import pod_tolerates
from simcluster.scheduler.nodes import NodeInfo

MAX_SCORE = 100
TAINT_WEIGHT = 3
SCORED = ("cpu", "memory")


def scores(pod: Object, nodes: Iterable[NodeInfo]) -> dict[str, int]:
    """Least allocated, balanced allocation and soft taints, with the default profile's weights."""
    asked = pod_requests(pod)
    many = list(nodes)
    soft = {}
    for node in many:
        taints = (taint for taint in node.taints if taint.get("effect") == "PreferNoSchedule")
        soft[node.name] = sum(not pod_tolerates(pod, taint) for taint in taints)
    most = max(soft.values(), default=0)
    return {
        node.name: _least_allocated(asked, node)
        + _balanced(asked, node)
        + TAINT_WEIGHT * (MAX_SCORE - (MAX_SCORE * soft[node.name] // most if most else 0))
        for node in many
    }


def _fractions(asked: dict[str, int], node: NodeInfo) -> list[float]:
    used = add(node.used, asked)
    return [
        min(1.0, used.get(name, 0) / node.allocatable[name])
        for name in SCORED
        if node.allocatable.get(name, 0) > 0
    ]


def _least_allocated(asked: dict[str, int], node: NodeInfo) -> int:
    fractions = _fractions(asked, node)
    return int(sum(MAX_SCORE * (1 - one) for one in fractions) / len(fractions)) if fractions else 0


def _balanced(asked: dict[str, int], node: NodeInfo) -> int:
    fractions = _fractions(asked, node)
    if len(fractions) < 2:
        return MAX_SCORE
    return int(MAX_SCORE * (1 - abs(fractions[0] - fractions[1]) / 2))
