"""Which part of an object a write may touch: the whole, its status, or what a subresource of a pod is for."""

from __future__ import annotations

from simcluster.cluster.request import Object
from simcluster.cluster.resources import Resource

_OF_A_POD = {"resize": ("containers", "initContainers"), "ephemeralcontainers": ("ephemeralContainers",)}
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
    elif subresource in _OF_A_POD:
        for key in ("labels", "annotations", "ownerReferences", "finalizers"):
            _restore(old["metadata"], new["metadata"], key)
        _restore(old, new, "status")
        _keep_spec(old["spec"], new["spec"], subresource)
    elif "status" in resource.subresources:
        _restore(old, new, "status")


def _keep_spec(old: Object, new: Object, subresource: str) -> None:
    """A container that is renamed or moved is left for validation to refuse."""
    changed = {part: new.get(part) or [] for part in _OF_A_POD[subresource]}
    for key in set(old) | set(new):
        _restore(old, new, key)
    for part, wanted in changed.items():
        held = {each["name"]: each for each in old.get(part) or []}
        same = subresource == "resize" and list(held) == [each["name"] for each in wanted]
        new.pop(part, None)
        if wanted:
            new[part] = [_resized(held[each["name"]], each) for each in wanted] if same else wanted


def _resized(before: Object, after: Object) -> Object:
    return {**before, **{key: after[key] for key in ("resources", "resizePolicy") if key in after}}


def _restore(old: Object, new: Object, key: str) -> None:
    new.pop(key, None)
    if key in old:
        new[key] = old[key]
