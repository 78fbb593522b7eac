"""What hangs below an object: status, scale, binding, eviction, logs, exec, port-forward and the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simcluster.cluster import binding, eviction, finalize, reads, scale, streams, tokens, writes
from simcluster.cluster.errors import method_not_allowed, no_such_path
from simcluster.cluster.request import Request
from simcluster.cluster.route import Target

if TYPE_CHECKING:
    from simcluster.cluster.cluster import Cluster

_SAME_OBJECT = frozenset({"status", "resize", "ephemeralcontainers"})


def handle(cluster: Cluster, target: Target, request: Request) -> writes.Steps:  # noqa: PLR0911 - one each
    if target.resource.namespaced and not target.namespace:
        raise no_such_path()
    if target.subresource in _SAME_OBJECT:
        return (yield from _object_part(cluster, target, request))
    match target.subresource, request.method:
        case "scale", _:
            return (yield from scale.handle(cluster, target, request))
        case "binding", "POST":
            return (yield from binding.bind(cluster, target, request))
        case "eviction", "POST":
            return eviction.evict(cluster, target, request)
        case (("log" | "exec" | "portforward"), ("GET" | "POST")):
            return streams.to_kubelet(cluster.store, target, request)
        case "proxy", "GET":
            return streams.to_pod(cluster.store, target)
        case "finalize", "PUT":
            return finalize.finalize(cluster, target, request)
        case "token", "POST":
            return tokens.issue(cluster.store, cluster.schema, cluster.now_s, target, request)
    raise method_not_allowed()


def _object_part(cluster: Cluster, target: Target, request: Request) -> writes.Steps:
    match request.method:
        case "GET":
            return reads.get(cluster, target, request)
        case "PUT":
            return (yield from writes.update(cluster, target, request))
        case "PATCH":
            return (yield from writes.patch(cluster, target, request))
    raise method_not_allowed()
