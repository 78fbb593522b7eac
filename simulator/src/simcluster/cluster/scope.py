"""Which part of an object a write may touch: the whole, or its status."""

from __future__ import annotations

from simcluster.cluster.request import Object
from simcluster.cluster.resources import Resource

_EMPTY_STATUS: dict[str, Object] = {
    "replicasets.apps": {"replicas": 0},
    "statefulsets.apps": {"replicas": 0, "availableReplicas": 0},
    "daemonsets.apps": {
        "currentNumberScheduled": 0,
        "numberMisscheduled": 0,
        "desiredNumberScheduled": 0,
        "numberReady": 0,
    },
}


def without_client_status(resource: Resource, obj: Object) -> None:
    """The client that creates an object cannot set its status; nodes are the exception."""
    if "status" in resource.subresources and resource.store != "nodes":
        obj.pop("status", None)
        obj["status"] = dict(_EMPTY_STATUS.get(resource.store, {}))


def keep_other_parts(resource: Resource, subresource: str, old: Object, new: Object) -> None:
    """Puts back what this write does not reach, in place."""
    if subresource == "status":
        for key in set(old) | set(new):
            if key not in ("metadata", "status"):
                _restore(old, new, key)
        for key in ("ownerReferences", "finalizers"):
            _restore(old["metadata"], new["metadata"], key)
    elif "status" in resource.subresources:
        _restore(old, new, "status")


def _restore(old: Object, new: Object, key: str) -> None:
    new.pop(key, None)
    if key in old:
        new[key] = old[key]
