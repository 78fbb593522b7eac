"""What a pod requires of a node beside room on a card, and what nodes are like in that."""

from __future__ import annotations

from collections.abc import Iterable

from gpuslice.adapters.kube import objects
from gpuslice.core.advice import MayRun
from gpuslice.core.explanation import Place, Taint, Toleration, Wish, obstacle
from gpuslice.core.model import Pod, Request


def place_of(node: objects.Node) -> Place:
    """What matters about a node besides its cards."""
    conditions = {each.type: each.status for each in node.status.conditions or ()}
    return Place(
        name=node.metadata.name,
        ready=conditions.get("Ready", "True") == "True",
        schedulable=not node.spec.unschedulable,
        labels=node.metadata.labels or {},
        taints=tuple(Taint(each.key, each.value, each.effect) for each in node.spec.taints or ()),
    )


def wish_of(pod: objects.Pod, request: Request, *, claims: bool = False) -> Wish:
    """What a pod requires of a node."""
    tolerations = (
        Toleration(each.key, each.operator or "Equal", each.value, each.effect)
        for each in pod.spec.tolerations or ()
    )
    return Wish(request, claims, pod.spec.node_selector or {}, tuple(tolerations), pod.spec.affinity)


def may_run(pods: Iterable[objects.Pod], nodes: Iterable[objects.Node]) -> MayRun:
    """Whether a pod's selectors and tolerations let it run on a node, by its name."""
    by_uid = {pod.metadata.uid: pod for pod in pods}
    places = {node.metadata.name: place_of(node) for node in nodes}

    def answer(pod: Pod, node: str) -> bool:
        found, place = by_uid.get(pod.uid), places.get(node)
        if found is None or place is None or pod.request is None:
            return False
        return not obstacle(place, wish_of(found, pod.request))

    return answer
