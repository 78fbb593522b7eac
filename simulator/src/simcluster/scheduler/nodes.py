"""The scheduler's cache: nodes, the pods on them, and those assumed there until the API server confirms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from simcluster.cluster.amounts import Amounts, Object, add, amounts_of, pod_requests

FINISHED = ("Succeeded", "Failed")


@dataclass(slots=True)
class NodeInfo:
    """One node as the filters see it. `ports` are the host ports in use, as (protocol, port)."""

    name: str
    node: Object
    allocatable: Amounts
    used: Amounts = field(default_factory=dict)
    pods: dict[str, Object] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        return self.node.get("metadata", {}).get("labels") or {}

    @property
    def taints(self) -> list[dict[str, str]]:
        return self.node.get("spec", {}).get("taints") or []

    @property
    def unschedulable(self) -> bool:
        return bool(self.node.get("spec", {}).get("unschedulable"))

    def with_pods(self, more: Sequence[Object]) -> NodeInfo:
        """The node as if these pods ran there as well."""
        used = self.used
        for pod in more:
            used = add(used, pod_requests(pod))
        pods = {**self.pods, **{pod["metadata"]["uid"]: pod for pod in more}}
        return NodeInfo(self.name, self.node, self.allocatable, used, pods)

    def ports(self) -> set[tuple[str, int]]:
        return {port for pod in self.pods.values() for port in host_ports(pod)}


class NodeCache:
    """Nodes and their usage. The cost of a change is proportional to the pods of one node."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeInfo] = {}
        self._pods: dict[str, dict[str, Object]] = {}  # node name → pod uid → pod
        self._node_of: dict[str, str] = {}
        self._assumed: set[str] = set()
        self._nominated: dict[str, Object] = {}  # pod uid → waiting pod that names a node

    def __iter__(self) -> Iterator[NodeInfo]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, name: str) -> NodeInfo | None:
        return self._nodes.get(name)

    def set_node(self, node: Object) -> None:
        name = node["metadata"]["name"]
        self._nodes[name] = NodeInfo(name, node, amounts_of(node.get("status", {}).get("allocatable")))
        self._recount(name)

    def remove_node(self, name: str) -> None:
        self._nodes.pop(name, None)

    def nominate(self, pod: Object) -> None:
        """Remember which node a waiting pod has in its status, if any."""
        self._nominated.pop(pod["metadata"]["uid"], None)
        if pod.get("status", {}).get("nominatedNodeName"):
            self._nominated[pod["metadata"]["uid"]] = pod

    def nominated_before(self, pod: Object, name: str) -> list[Object]:
        """Other pods of equal or higher priority nominated to a node: resources are kept for them."""
        return [
            other
            for uid, other in self._nominated.items()
            if other["status"]["nominatedNodeName"] == name
            and uid != pod["metadata"]["uid"]
            and priority_of(other) >= priority_of(pod)
        ]

    def leaves_for(self, pod: Object) -> bool:
        """Whether a pod of lower priority is currently leaving the node to which this one is nominated."""
        node = self._nodes.get(pod.get("status", {}).get("nominatedNodeName", ""))
        return node is not None and any(
            each["metadata"].get("deletionTimestamp") and priority_of(each) < priority_of(pod)
            for each in node.pods.values()
        )

    def assume(self, pod: Object, node_name: str) -> None:
        """Count the pod on the node from now on, before its binding is written."""
        placed: dict[str, Any] = {**pod, "spec": {**pod["spec"], "nodeName": node_name}}
        self._nominated.pop(pod["metadata"]["uid"], None)
        self._put(placed)
        self._assumed.add(pod["metadata"]["uid"])

    def forget(self, uid: str) -> None:
        """The binding failed: the pod is not there."""
        if uid in self._assumed:
            self.remove_pod(uid)

    def is_assumed(self, uid: str) -> bool:
        return uid in self._assumed

    def set_pod(self, pod: Object) -> None:
        """What the API server reports about a pod with a node; a finished one uses nothing."""
        uid = pod["metadata"]["uid"]
        self._nominated.pop(uid, None)
        if pod.get("status", {}).get("phase") in FINISHED:
            self.remove_pod(uid)
        else:
            self._put(pod)
        self._assumed.discard(uid)

    def remove_pod(self, uid: str) -> None:
        self._assumed.discard(uid)
        self._nominated.pop(uid, None)
        name = self._node_of.pop(uid, None)
        if name is not None:
            self._pods.get(name, {}).pop(uid, None)
            self._recount(name)

    def _put(self, pod: Object) -> None:
        uid, name = pod["metadata"]["uid"], pod["spec"]["nodeName"]
        if self._node_of.get(uid, name) != name:
            self.remove_pod(uid)
        self._node_of[uid] = name
        self._pods.setdefault(name, {})[uid] = pod
        self._recount(name)

    def _recount(self, name: str) -> None:
        info = self._nodes.get(name)
        if info is None:
            return
        info.pods = self._pods.setdefault(name, {})
        used: Amounts = {}
        for pod in info.pods.values():
            used = add(used, pod_requests(pod))
        info.used = used


def priority_of(pod: Object) -> int:
    priority: int = pod["spec"].get("priority") or 0
    return priority


def host_ports(pod: Object) -> set[tuple[str, int]]:
    return {
        (port.get("protocol", "TCP"), port["hostPort"])
        for container in pod.get("spec", {}).get("containers") or ()
        for port in container.get("ports") or ()
        if port.get("hostPort")
    }
