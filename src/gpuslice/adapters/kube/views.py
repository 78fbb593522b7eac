"""Kubernetes objects as core values: the one place where pods and nodes of the API turn into ours."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.slim import SlimNode, SlimPod
from gpuslice.adapters.kube.terms import comes_with_node, replica_of
from gpuslice.core.annotations import decode_unhealthy
from gpuslice.core.claim_views import unit_of
from gpuslice.core.claims import ClaimedSlice, claimed_slices
from gpuslice.core.contract import PLACEHOLDER_SCHEDULER, SYSTEM_NAMESPACE, UNHEALTHY_CONFIGMAP_PREFIX
from gpuslice.core.errors import ContractError, InvalidRequestError
from gpuslice.core.model import Card, Node, Pod
from gpuslice.core.pod_group import PodGroup, pod_group
from gpuslice.core.views import PodRequests, node_of, pod_of, pod_requests

PREFER_NO_SCHEDULE = "PreferNoSchedule"


def pod_view(pod: objects.Pod | SlimPod) -> Pod:
    """A pod as core sees it; `request` is None when it asks for nothing of ours."""
    meta, spec = pod.metadata, pod.spec
    requests = pod_requests(spec, meta.labels, bound=bool(spec.node_name))
    if spec.scheduler_name == PLACEHOLDER_SCHEDULER and not spec.node_name:
        requests = PodRequests(None, requests.host)  # it waits for nothing
    return pod_of(
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        node=sys.intern(spec.node_name),  # many pods have the same
        phase=pod.status.phase,
        terminating=meta.deletion_timestamp is not None,
        version=meta.resource_version,
        priority=spec.priority,
        nominated=pod.status.nominated_node_name,
        replica_of=replica_of(pod) if isinstance(pod, SlimPod) else "",
        comes_with_node=isinstance(pod, SlimPod) and comes_with_node(pod),
        gates=[str(gate.get("name", "")) for gate in spec.scheduling_gates or ()],
        group=group_by_labels(pod),
        requests=requests,
        annotations=meta.annotations,
    )


def group_by_labels(pod: objects.Pod | SlimPod) -> PodGroup | None:
    """The pod group that a pod's labels name, where kube-scheduler itself knows of none.

    None as well where they cannot be read: the webhook denies such a pod.
    """
    if pod.spec.scheduling_group:
        return None
    with contextlib.suppress(InvalidRequestError):
        return pod_group(pod.metadata.labels)
    return None


def held_by_claims(
    claims: Iterable[objects.ResourceClaim], cards: Mapping[str, Sequence[Card]]
) -> dict[str, list[ClaimedSlice]]:
    """What claims gave of the nodes' cards, by the pod's uid. Of pods that share a claim the first has it."""
    held: dict[str, list[ClaimedSlice]] = defaultdict(list)
    for claim in claims:
        allocation, users = claim.status.allocation, claim.status.reserved_for
        for result in (allocation.devices.results if allocation and users else None) or ():
            mine = cards.get(result.pool, ())
            with contextlib.suppress(ContractError):  # its driver says so when it is to be prepared
                held[users[0].uid] += claimed_slices([result], result.pool, mine, unit_of(mine))  # type: ignore[index]
    return dict(held)


def node_view(node: objects.Node | SlimNode, unhealthy: frozenset[int] = frozenset()) -> Node:
    """A node as core sees it; `unhealthy` comes from its ConfigMap (`unhealthy_view`)."""
    meta = node.metadata
    return node_of(
        name=meta.name,
        labels=meta.labels,
        annotations=meta.annotations,
        capacity=node.status.capacity,
        allocatable=node.status.allocatable,
        unhealthy=unhealthy,
        avoided=any(taint.effect == PREFER_NO_SCHEDULE for taint in node.spec.taints or ()),
    )


def unhealthy_view(configmap: objects.ConfigMap) -> tuple[str, frozenset[int], str] | None:
    """Node name, cards out of use and what could not be read; None when it is another kind of ConfigMap."""
    name = configmap.metadata.name
    if configmap.metadata.namespace != SYSTEM_NAMESPACE or not name.startswith(UNHEALTHY_CONFIGMAP_PREFIX):
        return None
    cards, problem = decode_unhealthy(configmap.data)
    node_name = name.removeprefix(UNHEALTHY_CONFIGMAP_PREFIX)
    return node_name, cards, problem.replace("<node>", node_name)
