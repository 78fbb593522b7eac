"""Pods as controllers see them: their state, and creation from a template."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from simcluster.cluster.moment import parse_time
from simcluster.controllers.ownership import is_going

Object = Mapping[str, Any]

_FINISHED = ("Succeeded", "Failed")


def phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase", ""))


def condition(obj: Object, kind: str) -> Object:
    conditions = (obj.get("status") or {}).get("conditions") or []
    found: Object = next((item for item in conditions if item["type"] == kind), {})
    return found


def is_ready(pod: Object) -> bool:
    return condition(pod, "Ready").get("status") == "True"


def is_active(pod: Object) -> bool:
    """Counts as a replica: neither finished nor being deleted."""
    return phase(pod) not in _FINISHED and not is_going(pod)


def is_finished(pod: Object) -> bool:
    return phase(pod) in _FINISHED


def is_available(pod: Object, min_ready_s: float, now_s: float) -> bool:
    """Ready for at least ``min_ready_s``."""
    return is_ready(pod) and available_in_s(pod, min_ready_s, now_s) <= 0


def available_in_s(pod: Object, min_ready_s: float, now_s: float) -> float:
    """How long until a ready pod counts as available."""
    since = condition(pod, "Ready").get("lastTransitionTime")
    return parse_time(since) + min_ready_s - now_s if since and min_ready_s else 0.0


def new_pod(
    template: Object, reference: Object, extra_labels: Mapping[str, str], **metadata: Any
) -> dict[str, Any]:
    """A pod of a template, controlled by ``reference``; ``metadata`` has its name or generateName."""
    made: dict[str, Any] = copy.deepcopy(dict(template))
    own = made.setdefault("metadata", {})
    own["labels"] = {**(own.get("labels") or {}), **extra_labels}
    own["ownerReferences"] = [dict(reference)]
    own |= metadata
    return {"apiVersion": "v1", "kind": "Pod", **made}


def deletion_rank(pod: Object) -> tuple[Any, ...]:
    """Order of deletion: unplaced, then pending, then not ready, then the youngest."""
    order = {"Pending": 0, "Unknown": 1, "Running": 2}
    age_s = parse_time(pod["metadata"]["creationTimestamp"])
    restarts = sum(c.get("restartCount", 0) for c in (pod.get("status") or {}).get("containerStatuses") or [])
    return (
        bool(pod["spec"].get("nodeName")),
        order.get(phase(pod), 2),
        is_ready(pod),
        -restarts,
        -age_s,
        pod["metadata"]["name"],
    )
