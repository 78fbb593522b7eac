"""Nodes that an autoscaler makes alike, by the labels that providers give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuslice.core.node_filters import Taint

GROUP_LABELS = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "kubernetes.azure.com/agentpool",
    "alibabacloud.com/nodepool-id",
    "karpenter.sh/nodepool",
    "node.kubernetes.io/instance-type",
)
PASSING_TAINTS = (
    "node.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
    "karpenter.sh/",
    "startup-taint.cluster-autoscaler.kubernetes.io/",
    "ToBeDeletedByClusterAutoscaler",
    "DeletionCandidateOfClusterAutoscaler",
)
"""How the keys begin of taints that say how a node is at present, and not what its group is for."""
LEAVING_TAINTS = (
    "node.kubernetes.io/unschedulable",
    "node.kubernetes.io/unreachable",
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupt",
)
"""The same of those of a node that nothing will start on any more."""


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """`selector`: the labels by which its nodes are chosen; no autoscaler's group has none."""

    selector: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return " ".join(value for _, value in self.selector)


def group_of(labels: Mapping[str, str]) -> NodeGroup | None:
    """The group of a node; None where no label tells it."""
    found = tuple((label, labels[label]) for label in GROUP_LABELS if labels.get(label))
    return NodeGroup(found) if found else None


def lasting(taints: Iterable[Taint]) -> tuple[Taint, ...]:
    """Those that a new node of the group will have as well."""
    return tuple(taint for taint in taints if not taint.key.startswith(PASSING_TAINTS))


def is_leaving(taints: Iterable[Taint]) -> bool:
    """Whether a node has no room for anybody, whatever is free on it."""
    return any(taint.key.startswith(LEAVING_TAINTS) for taint in taints)
