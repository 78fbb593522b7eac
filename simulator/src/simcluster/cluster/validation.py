"""What the API server refuses, in its words: metadata of every kind here, the rest by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simcluster.cluster import validation_pods, validation_services, validation_workloads
from simcluster.cluster.errors import Cause, invalid
from simcluster.cluster.names import (
    key_problems,
    label_problems,
    path_problems,
    service_problems,
    subdomain_problems,
    value_problems,
)
from simcluster.cluster.problem import forbidden_value, immutable, invalid_value, too_long
from simcluster.cluster.request import Object
from simcluster.cluster.resources import Resource

Causes = Iterator[Cause]
LARGEST_ANNOTATIONS_BYTES = 256 << 10
"""Names and values of all annotations of an object. Checked at every write but a Binding, which may pass it:
from then on kubelet can write no status (``TotalAnnotationSizeLimitB``)."""
_CREATE: dict[str, Callable[[Object], Causes]] = {
    "pods": validation_pods.check_pod,
    "services": validation_services.check_service,
    **validation_workloads.CHECKS,
}
_UPDATE: dict[str, Callable[[Object, Object], Causes]] = {
    "pods": validation_pods.check_pod_update,
    "pods/resize": validation_pods.check_pod_resize,
    "pods/ephemeralcontainers": validation_pods.check_ephemeral_update,
    "services": validation_services.check_service_update,
    **validation_workloads.UPDATE_CHECKS,
}
_FIXED: dict[str, tuple[str, ...]] = {
    "priorityclasses.scheduling.k8s.io": ("value", "preemptionPolicy"),
    "secrets": ("type",),
    "rolebindings.rbac.authorization.k8s.io": ("roleRef",),
    "clusterrolebindings.rbac.authorization.k8s.io": ("roleRef",),
}


def validate_create(resource: Resource, obj: Object) -> None:
    """ApiError 422 with every cause at once."""
    causes = [*_metadata(resource, obj["metadata"])]
    if resource.store == "pods" and obj["spec"].get("ephemeralContainers"):
        causes.append(forbidden_value("spec.ephemeralContainers", "cannot be set on create"))
    if resource.store == "pods" and obj["spec"].get("nodeName") and obj["spec"].get("schedulingGates"):
        why = "cannot be set until all schedulingGates have been cleared"
        causes.append(forbidden_value("spec.nodeName", why))
    if check := _CREATE.get(resource.store):
        causes += check(obj)
    _refuse(resource, obj, causes)


def validate_update(resource: Resource, old: Object, new: Object, subresource: str) -> None:
    """The same for a change; a status may say what it likes."""
    causes = [*_metadata(resource, new["metadata"]), *_finalizers(old["metadata"], new["metadata"])]
    part = f"/{subresource}" if f"{resource.store}/{subresource}" in _UPDATE else ""
    if part or not subresource or subresource == "scale":
        if check := _CREATE.get(resource.store):
            causes += check(new)
        if update_check := _UPDATE.get(resource.store + part):
            causes += update_check(old, new)
        causes += _fixed_fields(resource, old, new)
    _refuse(resource, new, causes)


def _refuse(resource: Resource, obj: Object, causes: list[Cause]) -> None:
    if causes:
        unique = list(dict.fromkeys(causes))
        raise invalid(resource.kind, resource.group, obj["metadata"]["name"], unique)


def _metadata(resource: Resource, metadata: Object) -> Causes:
    for problem in _name_rule(resource)(metadata["name"]):
        yield invalid_value("metadata.name", metadata["name"], problem)
    for key, value in (metadata.get("labels") or {}).items():
        for problem in key_problems(key):
            yield invalid_value("metadata.labels", key, problem)
        for problem in value_problems(value):
            yield invalid_value("metadata.labels", value, problem)
    for key in metadata.get("annotations") or {}:
        for problem in key_problems(key.lower()):
            yield invalid_value("metadata.annotations", key, problem)
    texts = (text for pair in (metadata.get("annotations") or {}).items() for text in pair)
    if sum(len(text.encode()) for text in texts) > LARGEST_ANNOTATIONS_BYTES:
        yield too_long("metadata.annotations", LARGEST_ANNOTATIONS_BYTES)
    references = metadata.get("ownerReferences") or []
    if sum(bool(item.get("controller")) for item in references) > 1:
        text = "Only one reference can have Controller set to true."
        yield invalid_value("metadata.ownerReferences", "more than one controller", text)
    for item in references:
        for field in ("apiVersion", "kind", "name", "uid"):
            if not item.get(field):
                yield invalid_value(f"metadata.ownerReferences.{field}", "", f"{field} must not be empty")


def _name_rule(resource: Resource) -> Callable[[str], list[str]]:
    if resource.group == "rbac.authorization.k8s.io":
        return path_problems
    if resource.store == "services":
        return service_problems
    return label_problems if resource.store == "namespaces" else subdomain_problems


def _finalizers(old: Object, new: Object) -> Causes:
    added = [item for item in new.get("finalizers") or [] if item not in (old.get("finalizers") or [])]
    if old.get("deletionTimestamp") and added:
        text = "no new finalizers can be added if the object is being deleted, found new finalizers"
        listed = ", ".join(f'"{item}"' for item in added)
        yield forbidden_value("metadata.finalizers", f"{text} []string{{{listed}}}")


def _fixed_fields(resource: Resource, old: Object, new: Object) -> Causes:
    for field in _FIXED.get(resource.store, ()):
        if old.get(field) != new.get(field):
            yield immutable(field, new.get(field))
    if old.get("immutable") and resource.store in ("configmaps", "secrets"):
        for field in ("data", "binaryData", "immutable"):
            if old.get(field) != new.get(field):
                yield forbidden_value(field, "field is immutable when `immutable` is set")
