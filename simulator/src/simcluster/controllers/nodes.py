"""Nodes that stop reporting: condition Unknown, taints, and eviction of their pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simcluster.cluster.moment import format_time, parse_time
from simcluster.controllers.actions import Action, Again, Delete, Tell, patch
from simcluster.controllers.ownership import is_going
from simcluster.controllers.placement import tolerates
from simcluster.controllers.pods import condition

Object = Mapping[str, Any]

NOT_READY, UNREACHABLE = "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
PRESSURES = {
    "MemoryPressure": "node.kubernetes.io/memory-pressure",
    "DiskPressure": "node.kubernetes.io/disk-pressure",
    "PIDPressure": "node.kubernetes.io/pid-pressure",
}
_OURS = (NOT_READY, UNREACHABLE, UNSCHEDULABLE, *PRESSURES.values())


def reconcile(
    node: Object, lease: Object | None, pods: Sequence[Object], now_s: float, grace_s: float
) -> list[Action]:
    """``grace_s``: how long a kubelet that has reported before may be silent; ``pods``: those on the node."""
    if is_going(node):
        return []
    # the newest heartbeat from status or lease; None for a node that no kubelet has reported for
    texts = [
        condition(node, "Ready").get("lastHeartbeatTime"),
        ((lease or {}).get("spec") or {}).get("renewTime"),
    ]
    heard_s = max((parse_time(text) for text in texts if text), default=None)
    silent = heard_s is not None and now_s - heard_s > grace_s
    if silent and condition(node, "Ready").get("status") != "Unknown":
        now = format_time(now_s)
        words = {
            "status": "Unknown",
            "reason": "NodeStatusUnknown",
            "message": "Kubelet stopped posting node status.",
            "lastTransitionTime": now,
        }
        conditions = [{**item, **words} for item in (node.get("status") or {}).get("conditions") or []]
        name = node["metadata"]["name"]
        return [
            patch("Node", node, {"status": {"conditions": conditions}}, status=True),
            Tell("NodeNotReady", f"Node {name} status is now: NodeNotReady"),
            Again(0.0),
        ]
    actions = _taint(node, now_s) + _evict(node, pods, now_s)
    return actions if heard_s is None or silent else [*actions, Again(heard_s + grace_s - now_s + 0.1)]


def leave_lost_node(pods: Sequence[Object]) -> list[Action]:
    """Pods of a node that no longer exists: no kubelet will ever finish them."""
    metadatas = [pod["metadata"] for pod in pods]
    return [Delete("Pod", m["namespace"], m["name"], m["uid"], grace_s=0) for m in metadatas]


def _taint(node: Object, now_s: float) -> list[Action]:
    """The taints that follow from conditions and from cordoning, in addition to others."""
    held = (node.get("spec") or {}).get("taints") or []
    wanted = [item for item in held if item["key"] not in _OURS]
    needed: list[tuple[str, str]] = []
    ready = condition(node, "Ready").get("status")
    if ready in ("False", "Unknown"):
        key = NOT_READY if ready == "False" else UNREACHABLE
        needed += [(key, "NoSchedule"), (key, "NoExecute")]
    if (node.get("spec") or {}).get("unschedulable"):
        needed.append((UNSCHEDULABLE, "NoSchedule"))
    for kind, key in PRESSURES.items():
        if condition(node, kind).get("status") == "True":
            needed.append((key, "NoSchedule"))
    for key, effect in needed:
        known = next((item for item in held if item["key"] == key and item["effect"] == effect), None)
        stamp = {"timeAdded": format_time(now_s)} if effect == "NoExecute" else {}
        wanted.append(known or {"key": key, "effect": effect, **stamp})
    if _keys(wanted) == _keys(held):
        return []
    change = {
        "spec": {"taints": wanted or None},
        "metadata": {"resourceVersion": node["metadata"]["resourceVersion"]},
    }
    return [patch("Node", node, change)]


def _keys(taints: Sequence[Object]) -> set[tuple[str, str, str]]:
    return {(item["key"], item["effect"], item.get("value", "")) for item in taints}


def _evict(node: Object, pods: Sequence[Object], now_s: float) -> list[Action]:
    """Pods that do not tolerate a NoExecute taint, or no longer do."""
    taints = [t for t in (node.get("spec") or {}).get("taints") or [] if t["effect"] == "NoExecute"]
    actions: list[Action] = []
    for pod in pods if taints else ():
        left_s = _time_left_s(pod, taints, now_s)
        if left_s is None or is_going(pod):
            continue
        metadata = pod["metadata"]
        if left_s > 0:
            actions.append(Again(left_s))
        else:
            actions.append(Delete("Pod", metadata["namespace"], metadata["name"], metadata["uid"]))
    return actions


def _time_left_s(pod: Object, taints: Sequence[Object], now_s: float) -> float | None:
    """How long the pod may still stay; None: forever."""
    ends: list[float] = []
    for taint in taints:
        fitting = [t for t in pod["spec"].get("tolerations") or [] if tolerates(t, taint)]
        if not fitting:
            return 0.0
        limits = [t["tolerationSeconds"] for t in fitting if t.get("tolerationSeconds") is not None]
        if limits:
            since_s = parse_time(taint["timeAdded"]) if taint.get("timeAdded") else now_s
            ends.append(since_s + min(limits) - now_s)
    return min(ends) if ends else None
