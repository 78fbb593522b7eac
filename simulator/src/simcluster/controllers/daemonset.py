"""DaemonSets: one pod on each eligible node."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from simcluster.controllers.actions import Action, Create, Tell, delete, patch_status
from simcluster.controllers.ownership import controller_reference, is_going, labels_of, template_hash
from simcluster.controllers.placement import node_takes, pinned_node
from simcluster.controllers.pods import is_available, is_finished, is_ready, new_pod
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
            surplus = _surplus(there, node in eligible)
            actions += [step for pod in surplus if not is_going(pod) for step in _delete(pod)]
        actions = past + (actions or _roll(daemon_set, by_node, eligible, now_s))
    return [*actions, *_status(daemon_set, by_node, eligible, now_s)]


def _surplus(pods: Sequence[Object], eligible: bool) -> Sequence[Object]:
    """All pods if none may run here; otherwise finished ones, and all but the oldest."""
    if not eligible:
        return pods
    finished = [pod for pod in pods if is_finished(pod)]
    running = sorted(
        (pod for pod in pods if not is_finished(pod)), key=lambda p: str(p["metadata"]["creationTimestamp"])
    )
    return [*finished, *running[1:]]


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
    allowed = (strategy.get("rollingUpdate") or {}).get("maxUnavailable", 1)
    if isinstance(allowed, str):  # "25%"
        allowed = max(math.ceil(int(allowed.rstrip("%")) * len(eligible) / 100), 1)
    held = [pods[0] for node, pods in by_node.items() if node in eligible and pods]
    min_ready_s = daemon_set["spec"].get("minReadySeconds", 0)
    away = len(eligible) - sum(is_available(pod, min_ready_s, now_s) and not is_going(pod) for pod in held)
    old = [pod for pod in held if not _is_current(daemon_set, pod) and not is_going(pod)]
    unavailable = [pod for pod in old if not is_available(pod, min_ready_s, now_s)]
    available = [pod for pod in old if pod not in unavailable]
    chosen = [*unavailable, *available[: max(allowed - away, 0)]]
    return [step for pod in chosen for step in _delete(pod)]


def _status(
    daemon_set: Object, by_node: Mapping[str, Sequence[Object]], eligible: set[str], now_s: float
) -> list[Action]:
    held = [pods[0] for node, pods in by_node.items() if node in eligible and pods]
    min_ready_s = daemon_set["spec"].get("minReadySeconds", 0)
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
    return patch_status("DaemonSet", daemon_set, status)
