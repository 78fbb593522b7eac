"""The part of an object that belongs to the API server: identity, versions, deletion."""

from __future__ import annotations

from simcluster.cluster.errors import MODIFIED, Cause, bad_request, conflict, invalid
from simcluster.cluster.moment import format_time
from simcluster.cluster.request import Object
from simcluster.cluster.resources import Resource
from simcluster.cluster.state import ApiState
from simcluster.cluster.store import Entry

_SERVER_OWNED = ("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "uid", "generation")


def begin_metadata(api: ApiState, resource: Resource, namespace: str, obj: Object) -> None:
    """Names and identity of a new object, in place."""
    metadata = obj["metadata"]
    given = metadata.get("namespace", "")
    if resource.namespaced and given and given != namespace:
        raise bad_request(
            "the namespace of the provided object does not match the namespace sent on the request:"
            f" {given!r}, {namespace!r}"
        )
    if not metadata.get("name"):
        if not metadata.get("generateName"):
            cause = Cause(
                "metadata.name", "FieldValueRequired", "Required value: name or generateName is required"
            )
            raise invalid(resource.kind, resource.group, "", [cause])
        metadata["name"] = metadata["generateName"] + api.identities.new_suffix()
    for key in ("resourceVersion", "selfLink", *_SERVER_OWNED):
        metadata.pop(key, None)
    if resource.namespaced:
        metadata["namespace"] = namespace
    else:
        metadata.pop("namespace", None)
    metadata["uid"] = api.identities.new_uid()
    metadata["creationTimestamp"] = format_time(api.now_s())
    if resource.has_generation:
        metadata["generation"] = 1


def carry_metadata(resource: Resource, current: Entry, obj: Object) -> None:
    """Checks preconditions of an update and keeps what a client may not change, in place."""
    old, new = current.obj["metadata"], obj["metadata"]
    name = old["name"]
    if new.get("uid") and new["uid"] != old["uid"]:
        why = f"Precondition failed: UID in precondition: {new['uid']}, UID in object meta: {old['uid']}"
        raise conflict(resource.plural, resource.group, name, why)
    if new.get("resourceVersion") and new["resourceVersion"] != old["resourceVersion"]:
        raise conflict(resource.plural, resource.group, name, MODIFIED)
    new.pop("selfLink", None)
    for key in _SERVER_OWNED:
        new.pop(key, None)
        if key in old:
            new[key] = old[key]
    new["name"], new["resourceVersion"] = name, old["resourceVersion"]
    if "namespace" in old:
        new["namespace"] = old["namespace"]
    if "generateName" in old:
        new["generateName"] = old["generateName"]


def same_content(one: Object, other: Object) -> bool:
    """Equal apart from who owns which field since when."""
    return _without_managers(one) == _without_managers(other)


def _without_managers(obj: Object) -> Object:
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    return obj | {"metadata": metadata}


def count_generation(resource: Resource, old: Object, new: Object) -> None:
    """A change of anything but metadata and status is a new generation."""
    if not resource.has_generation:
        return
    ignored = ("metadata", "status")
    before = {key: value for key, value in old.items() if key not in ignored}
    after = {key: value for key, value in new.items() if key not in ignored}
    if before != after:
        new["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
