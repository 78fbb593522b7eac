"""The scale subresource: replicas of a workload as autoscaling/v1 Scale."""

from __future__ import annotations

from simcluster.cluster import writes
from simcluster.cluster.body import parse_body
from simcluster.cluster.errors import Cause, invalid, method_not_allowed
from simcluster.cluster.managed import options_of
from simcluster.cluster.reads import find
from simcluster.cluster.request import Object, Request, json_response
from simcluster.cluster.route import Target
from simcluster.cluster.selector import selector_text
from simcluster.cluster.state import ApiState
from simcluster.cluster.store import Entry


def handle(api: ApiState, target: Target, request: Request) -> writes.Steps:
    entry = find(api.store, target)
    match request.method:
        case "GET":
            return json_response(scale_of(entry))
        case "PUT":
            return (yield from _write(api, target, request, entry, parse_body(api.schema, request)))
        case "PATCH":
            changed = writes.patch_function(api, "autoscaling.v1.Scale", request)(scale_of(entry))
            return (yield from _write(api, target, request, entry, changed))
    raise method_not_allowed()


def scale_of(entry: Entry) -> Object:
    obj = entry.obj
    metadata = {
        key: obj["metadata"][key]
        for key in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        if key in obj["metadata"]
    }
    status: Object = {"replicas": (obj.get("status") or {}).get("replicas", 0)}
    if obj["spec"].get("selector"):
        status["selector"] = selector_text(obj["spec"]["selector"])
    spec = {"replicas": obj["spec"].get("replicas", 1)}
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": metadata,
        "spec": spec,
        "status": status,
    }


def _write(api: ApiState, target: Target, request: Request, entry: Entry, scale: Object) -> writes.Steps:
    replicas = (scale.get("spec") or {}).get("replicas", 0)
    if not isinstance(replicas, int) or replicas < 0:
        message = f"Invalid value: {replicas}: must be greater than or equal to 0"
        cause = Cause("spec.replicas", "FieldValueInvalid", message)
        raise invalid("Scale", "autoscaling", target.name, [cause])
    obj = entry.copy()
    obj["spec"]["replicas"] = replicas
    wanted = scale.get("metadata") or {}
    obj["metadata"] |= {key: wanted[key] for key in ("uid", "resourceVersion") if wanted.get(key)}
    options = options_of(request, "scale")
    stored = yield from writes.update_object(api, target, entry, obj, options)
    return json_response(scale_of(stored))
