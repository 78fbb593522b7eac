"""The last step of deleting a namespace: its controller has emptied it and removes the finalizer."""

from __future__ import annotations

from simcluster.cluster.body import read_object
from simcluster.cluster.reads import find
from simcluster.cluster.request import Request, Response, json_response
from simcluster.cluster.route import Target
from simcluster.cluster.state import ApiState


def finalize(api: ApiState, target: Target, request: Request) -> Response:
    """PUT of ``spec.finalizers``; the namespace is removed with the last one."""
    body = read_object(api.schema, target.resource, request)
    obj = find(api.store, target).copy()
    obj["spec"] = {"finalizers": (body.obj.get("spec") or {}).get("finalizers") or []}
    if not obj["spec"]["finalizers"]:
        del obj["spec"]["finalizers"]
    entry = api.store.put("namespaces", obj)
    metadata = obj["metadata"]
    if metadata.get("deletionTimestamp") and not obj["spec"] and not metadata.get("finalizers"):
        entry = api.store.remove("namespaces", entry.key)
    head = {"kind": target.resource.kind, "apiVersion": target.resource.api_version}
    return json_response(head | entry.obj)
