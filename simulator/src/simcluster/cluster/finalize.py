"""The last step of deleting a namespace: its controller has emptied it and removes the finalizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simcluster.cluster.body import read_object
from simcluster.cluster.reads import find
from simcluster.cluster.request import Request, Response, json_response
from simcluster.cluster.route import Target

if TYPE_CHECKING:
    from simcluster.cluster.cluster import Cluster


def finalize(cluster: Cluster, target: Target, request: Request) -> Response:
    """PUT of ``spec.finalizers``; the namespace is removed with the last one."""
    body = read_object(cluster.schema, target.resource, request)
    obj = find(cluster.store, target).copy()
    obj["spec"] = {"finalizers": (body.obj.get("spec") or {}).get("finalizers") or []}
    if not obj["spec"]["finalizers"]:
        del obj["spec"]["finalizers"]
    entry = cluster.store.put("namespaces", obj)
    metadata = obj["metadata"]
    if metadata.get("deletionTimestamp") and not obj["spec"] and not metadata.get("finalizers"):
        entry = cluster.store.remove("namespaces", entry.key)
    head = {"kind": target.resource.kind, "apiVersion": target.resource.api_version}
    return json_response(head | entry.obj)
