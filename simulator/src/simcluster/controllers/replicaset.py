"""ReplicaSets: as many equal pods as asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simcluster.controllers.actions import Action, Again, Create, Tell, delete, patch_status
from simcluster.controllers.ownership import controller_reference, is_going, labels_of
from simcluster.controllers.pods import (
    available_in_s,
    deletion_rank,
    is_active,
    is_available,
    is_ready,
    new_pod,
)

Object = Mapping[str, Any]

_BURST = 500  # at most this many creations or deletions a look, as upstream


def reconcile(replica_set: Object, pods: Sequence[Object], now_s: float) -> list[Action]:
    """Pods to make or to delete, given those the set controls."""
    active = [pod for pod in pods if is_active(pod)]
    actions: list[Action] = []
    if not is_going(replica_set):
        metadata = replica_set["metadata"]
        reference = controller_reference(replica_set, "apps/v1", "ReplicaSet")
        missing = replica_set["spec"].get("replicas", 1) - len(active)
        for _ in range(min(missing, _BURST)):
            pod = new_pod(replica_set["spec"]["template"], reference, {}, generateName=f"{metadata['name']}-")
            actions.append(Create("Pod", pod, metadata["namespace"]))
        for surplus in sorted(active, key=deletion_rank)[: max(min(-missing, _BURST), 0)]:
            name = surplus["metadata"]["name"]
            actions += [Tell("SuccessfulDelete", f"Deleted pod: {name}"), delete("Pod", surplus)]
    return [*actions, *_status(replica_set, active, now_s)]


def _status(replica_set: Object, active: Sequence[Object], now_s: float) -> list[Action]:
    spec = replica_set["spec"]
    min_ready_s = spec.get("minReadySeconds", 0)
    wanted = ((spec["template"].get("metadata") or {}).get("labels") or {}).items()
    ready = [pod for pod in active if is_ready(pod)]
    status = {
        "replicas": len(active),
        "fullyLabeledReplicas": sum(wanted <= labels_of(pod).items() for pod in active) or None,
        "readyReplicas": len(ready) or None,
        "availableReplicas": sum(is_available(pod, min_ready_s, now_s) for pod in ready) or None,
        "observedGeneration": replica_set["metadata"]["generation"],
    }
    actions = patch_status("ReplicaSet", replica_set, status)
    waits = [w for pod in ready if (w := available_in_s(pod, min_ready_s, now_s)) > 0]
    return [*actions, Again(min(waits))] if waits else actions
