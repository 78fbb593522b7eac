"""Admission built into the API server: namespaces must live, pods get account, priority and tolerations."""

from __future__ import annotations

from simcluster.cluster.errors import ApiError, Cause, forbidden, not_found
from simcluster.cluster.limit_range import give_defaults
from simcluster.cluster.request import Object
from simcluster.cluster.resources import Resource
from simcluster.cluster.state import ApiState

_TOLERATED = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_SYSTEM_PRIORITIES = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}


def admit_builtin(api: ApiState, resource: Resource, obj: Object) -> None:
    """Refuses or completes a new object, in place."""
    if resource.namespaced:
        _check_namespace(api, resource, obj)
    if resource.store == "pods":
        give_defaults(api.store, obj)
        spec = obj["spec"]
        name = spec.setdefault("serviceAccountName", "default")
        spec["serviceAccount"] = name
        classes = api.store.shelf("priorityclasses.scheduling.k8s.io").items.values()
        default_class = next((entry.key[1] for entry in classes if entry.obj.get("globalDefault")), "")
        class_name = spec.get("priorityClassName") or default_class
        if class_name in _SYSTEM_PRIORITIES:
            value, preemption = _SYSTEM_PRIORITIES[class_name], "PreemptLowerPriority"
        elif class_name:
            entry = api.store.get("priorityclasses.scheduling.k8s.io", ("", class_name))
            if entry is None:
                why = f"no PriorityClass with name {class_name} was found"
                raise forbidden("pods", "", obj["metadata"]["name"], why)
            value, preemption = entry.obj["value"], entry.obj["preemptionPolicy"]
        else:
            value, preemption = 0, "PreemptLowerPriority"
        if class_name:
            spec["priorityClassName"] = class_name
        spec["priority"] = value
        spec.setdefault("preemptionPolicy", preemption)
        _tolerate(spec)
    if resource.store == "services":
        _addresses(api, obj["spec"])


def _check_namespace(api: ApiState, resource: Resource, obj: Object) -> None:
    name = obj["metadata"]["namespace"]
    namespace = api.store.get("namespaces", ("", name))
    if namespace is None:
        raise not_found("namespaces", "", name)
    if namespace.obj["metadata"].get("deletionTimestamp") and resource.store != "events":
        why = f"unable to create new content in namespace {name} because it is being terminated"
        error = forbidden(resource.plural, resource.group, obj["metadata"]["name"], why)
        cause = Cause("metadata.namespace", "NamespaceTerminating", f"namespace {name} is being terminated")
        details = {**(error.details or {}), "causes": [cause.to_dict()]}
        raise ApiError(403, "Forbidden", error.message, details)


def _tolerate(spec: Object) -> None:
    """Five minutes on a node that stops answering, as the cluster's default."""
    tolerations = spec.setdefault("tolerations", [])
    for key in _TOLERATED:
        if not any(
            item.get("key") in (key, None, "") and item.get("effect") in ("NoExecute", None, "")
            for item in tolerations
        ):
            tolerations.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
            )


def _addresses(api: ApiState, spec: Object) -> None:
    """A cluster IP, and node ports where the type wants them."""
    if spec["type"] == "ExternalName":
        return
    if not spec.get("clusterIP"):
        spec["clusterIP"] = api.identities.new_service_ip()
    spec.setdefault("clusterIPs", [spec["clusterIP"]])
    if spec["type"] in ("NodePort", "LoadBalancer"):
        for port in spec.get("ports") or []:
            if not port.get("nodePort"):
                port["nodePort"] = api.identities.new_node_port()
