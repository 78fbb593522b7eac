"""What a pod says about where it may run, beside amounts: pods with equal terms may run on the same nodes."""

from __future__ import annotations

import sys
from typing import NamedTuple

import msgspec

from gpuslice.adapters.kube.slim import SlimAffinity, SlimNodeAffinity, SlimOwner, SlimPod, SlimToleration

SPREAD_BY_DEFAULT = frozenset({"ReplicaSet", "StatefulSet", "ReplicationController"})
"""Owners whose pods kube-scheduler spreads over nodes and zones unless told otherwise (system defaults)."""


OF_THE_NODE = frozenset({"DaemonSet", "Node"})
"""Owners whose pods come with each node: those of a DaemonSet, and what kubelet runs from files."""


class Terms(NamedTuple):
    """All that kube-scheduler's filters read of a pod to say yes or no to a node, without amounts."""

    scheduler: str
    node_selector: frozenset[tuple[str, str]]
    node_affinity: bytes
    tolerations: frozenset[SlimToleration]


def terms_of(pod: SlimPod) -> Terms:
    """What it says, its preferences aside."""
    spec = pod.spec
    by_node = (spec.affinity or _NO_AFFINITY).node_affinity or _NO_NODE_AFFINITY
    return Terms(
        spec.scheduler_name,
        frozenset((spec.node_selector or {}).items()),
        msgspec.json.encode(by_node.required) if by_node.required else b"",
        frozenset(spec.tolerations or ()),
    )


def has_only_terms(pod: SlimPod) -> bool:
    """False where a pod prefers some nodes, or where others run matters to it, or it may not run yet."""
    spec = pod.spec
    affinity = spec.affinity or _NO_AFFINITY
    by_node = affinity.node_affinity or _NO_NODE_AFFINITY
    if spec.topology_spread_constraints or spec.scheduling_gates or by_node.preferred:
        return False
    if spec.scheduling_group:
        return False  # its cards are held another way
    return not (affinity.pod_affinity or affinity.pod_anti_affinity)


def controller_of(pod: SlimPod) -> SlimOwner | None:
    """What made the pod and makes another in its place."""
    return next((owner for owner in pod.metadata.owner_references or () if owner.controller), None)


def replica_of(pod: SlimPod) -> str:
    """The uid of the owner whose pods kube-scheduler spreads over nodes and zones, "" where it does not."""
    for owner in pod.metadata.owner_references or ():
        if owner.controller and owner.kind in SPREAD_BY_DEFAULT:
            return sys.intern(owner.uid)  # many pods have the same
    return ""


def comes_with_node(pod: SlimPod) -> bool:
    """Whether it runs where it does because the node is there."""
    owners = pod.metadata.owner_references or ()
    return any(owner.controller and owner.kind in OF_THE_NODE for owner in owners)


_NO_AFFINITY, _NO_NODE_AFFINITY = SlimAffinity(), SlimNodeAffinity()
