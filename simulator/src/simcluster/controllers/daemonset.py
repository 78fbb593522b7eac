"""DaemonSets: one pod on each eligible node."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from simcluster.controllers.actions import Action, Again, Create, Tell, delete, patch_status
from simcluster.controllers.ownership import controller_reference, is_going, labels_of, template_hash
from simcluster.controllers.placement import node_takes, pinned_node
from simcluster.controllers.pods import available_in_s, is_available, is_finished, is_ready, new_pod
from simcluster.controllers.revisions import LABEL, record

Object = Mapping[str, Any]

_TOLERATED = {
    "node.kubernetes.io/not-ready": "NoExecute",
    "node.kubernetes.io/unreachable": "NoExecute",
    "node.kubernetes.io/disk-pressure": "NoSchedule",
    "node.kubernetes.io/memory-pressure": "NoSchedule",
    "node.kubernetes.io/pid-pressure": "NoSchedule",
    "node.kubernetes.io/unschedulable": "NoSchedule",
}


def reconcile(
    daemon_set: Object,
    pods: Sequence[Object],
    revisions: Sequence[Object],
    nodes: Sequence[Object],
    now_s: float,
) -> list[Action]:
    """Pods to create where one is missing, and to delete where one is surplus or outdated."""
    by_node: dict[str, list[Object]] = {}
    for pod in pods:
        by_node.setdefault(pinned_node(pod), []).append(pod)
    spec = _with_tolerations(daemon_set["spec"]["template"]["spec"])
    eligible = {node["metadata"]["name"] for node in nodes if node_takes(spec, node)}
    actions: list[Action] = []
    if not is_going(daemon_set):
        name, held = daemon_set["metadata"]["name"], (labels_of(pod).get(LABEL, "") for pod in pods)
        digest = template_hash(daemon_set["spec"]["template"])
        kept = {f"{name}-{value}" for value in held}
        past = record(daemon_set, "DaemonSet", digest, revisions, kept)
        namespace = daemon_set["metadata"]["namespace"]
        missing = sorted(eligible - by_node.keys())
        actions = [Create("Pod", _pod(daemon_set, node), namespace) for node in missing]
        for node, there in by_node.items():
            surplus = _surplus(there, node in eligible, beside=_surge(daemon_set, len(eligible)) > 0)
            actions += [step for pod in surplus if not is_going(pod) for step in _delete(pod)]
        actions = past + (actions or _roll(daemon_set, by_node, eligible, now_s))
    return [*actions, *_status(daemon_set, by_node, eligible, now_s)]


def _surplus(pods: Sequence[Object], eligible: bool, *, beside: bool) -> Sequence[Object]:
    """All pods if none may run here; otherwise finished ones, and all but the oldest.

    `beside`: a second one may be replacing it.
    """
    if not eligible:
        return pods
    finished = [pod for pod in pods if is_finished(pod)]
    running = sorted((pod for pod in pods if not is_finished(pod)), key=_age)
    return [*finished, *running[2 if beside else 1 :]]


def _age(pod: Object) -> str:
    return str(pod["metadata"]["creationTimestamp"])


def _delete(pod: Object) -> list[Action]:
    return [Tell("SuccessfulDelete", f"Deleted pod: {pod['metadata']['name']}"), delete("Pod", pod)]


def _pod(daemon_set: Object, node: str) -> dict[str, Any]:
    metadata, template = daemon_set["metadata"], daemon_set["spec"]["template"]
    labels = {LABEL: template_hash(template)}
    if "templateGeneration" in metadata:
        labels["pod-template-generation"] = str(metadata["templateGeneration"])
    reference = controller_reference(daemon_set, "apps/v1", "DaemonSet")
    pod = new_pod(template, reference, labels, generateName=f"{metadata['name']}-")
    pod["spec"] = _with_tolerations(pod["spec"])
    # node affinity to this node, replacing the template's own terms, which the node has met
    spec = pod["spec"]
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": [term]}
    return pod


def _with_tolerations(spec: Object) -> dict[str, Any]:
    own: dict[str, Any] = copy.deepcopy(dict(spec))
    wanted = dict(_TOLERATED)
    if own.get("hostNetwork"):
        wanted["node.kubernetes.io/network-unavailable"] = "NoSchedule"
    added = [{"key": key, "operator": "Exists", "effect": effect} for key, effect in wanted.items()]
    held = own.get("tolerations") or []
    own["tolerations"] = [*held, *(item for item in added if item not in held)]
    return own


def _is_current(daemon_set: Object, pod: Object) -> bool:
    return labels_of(pod).get(LABEL) == template_hash(daemon_set["spec"]["template"])


def _roll(
    daemon_set: Object, by_node: Mapping[str, Sequence[Object]], eligible: set[str], now_s: float
) -> list[Action]:
    """Deletes outdated pods while no more than ``maxUnavailable`` nodes are without an available one."""
    strategy = daemon_set["spec"].get("updateStrategy") or {}
    if strategy.get("type") != "RollingUpdate":
        return []
    if surge := _surge(daemon_set, len(eligible)):
        return _roll_beside(daemon_set, by_node, eligible, surge, now_s)
    allowed = max(_nodes((strategy.get("rollingUpdate") or {}).get("maxUnavailable", 1), len(eligible)), 1)
    held = [pods[0] for node, pods in by_node.items() if node in eligible and pods]
    min_ready_s = daemon_set["spec"].get("minReadySeconds", 0)
    away = len(eligible) - sum(is_available(pod, min_ready_s, now_s) and not is_going(pod) for pod in held)
    old = [pod for pod in held if not _is_current(daemon_set, pod) and not is_going(pod)]
    unavailable = [pod for pod in old if not is_available(pod, min_ready_s, now_s)]
    available = [pod for pod in old if pod not in unavailable]
    chosen = [*unavailable, *available[: max(allowed - away, 0)]]
    return [step for pod in chosen for step in _delete(pod)]


def _roll_beside(
    daemon_set: Object,
    by_node: Mapping[str, Sequence[Object]],
    eligible: set[str],
    surge: int,
    now_s: float,
) -> list[Action]:
    """A new pod beside an outdated one on ``surge`` nodes at a time; the old one goes when it serves."""
    min_ready_s = daemon_set["spec"].get("minReadySeconds", 0)
    actions: list[Action] = []
    alone: list[tuple[bool, str]] = []  # the outdated: whether it is available, and its node
    beside = 0
    for node in sorted(eligible & by_node.keys()):
        living = [pod for pod in by_node[node] if not is_going(pod)]
        old = [pod for pod in living if not _is_current(daemon_set, pod)]
        new = [pod for pod in living if _is_current(daemon_set, pod)]
        if old and any(is_available(pod, min_ready_s, now_s) for pod in new):
            actions += [step for pod in old for step in _delete(pod)]
        elif old and new:
            beside += 1
        elif old:
            alone.append((is_available(old[0], min_ready_s, now_s), node))
    for available, node in sorted(alone):  # who is of no use waits for nobody
        if not available or beside < surge:
            actions.append(Create("Pod", _pod(daemon_set, node), daemon_set["metadata"]["namespace"]))
            beside += available
    return actions


def _surge(daemon_set: Object, nodes: int) -> int:
    strategy = (daemon_set["spec"].get("updateStrategy") or {}).get("rollingUpdate") or {}
    return _nodes(strategy.get("maxSurge", 0), nodes)


def _nodes(amount: int | str, nodes: int) -> int:
    """A number of nodes, or a part of them such as "25%", rounded up."""
    return math.ceil(int(amount.rstrip("%")) * nodes / 100) if isinstance(amount, str) else amount


def _status(
    daemon_set: Object, by_node: Mapping[str, Sequence[Object]], eligible: set[str], now_s: float
) -> list[Action]:
    held = [min(pods, key=_age) for node, pods in by_node.items() if node in eligible and pods]
    min_ready_s = daemon_set["spec"].get("minReadySeconds", 0)
    due = [
        wait_s for pod in held if is_ready(pod) and (wait_s := available_in_s(pod, min_ready_s, now_s)) > 0
    ]
    available = sum(is_available(pod, min_ready_s, now_s) for pod in held)
    status = {
        "observedGeneration": daemon_set["metadata"]["generation"],
        "desiredNumberScheduled": len(eligible),
        "currentNumberScheduled": len(held),
        "updatedNumberScheduled": sum(_is_current(daemon_set, pod) for pod in held) or None,
        "numberReady": sum(is_ready(pod) for pod in held),
        "numberAvailable": available or None,
        "numberUnavailable": (len(eligible) - available) or None,
        "numberMisscheduled": sum(node not in eligible for node in by_node),
    }
    return [*patch_status("DaemonSet", daemon_set, status), *([Again(min(due))] if due else [])]
