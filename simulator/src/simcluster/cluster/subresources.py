"""What hangs below an object: status, scale, binding, eviction, logs, exec, port-forward and the rest."""

from __future__ import annotations

from simcluster.cluster import binding, eviction, finalize, reads, scale, streams, tokens, writes
from simcluster.cluster.errors import method_not_allowed, no_such_path
from simcluster.cluster.request import Request
from simcluster.cluster.route import Target
from simcluster.cluster.state import ApiState

_SAME_OBJECT = frozenset({"status", "resize", "ephemeralcontainers"})


def handle(api: ApiState, target: Target, request: Request) -> writes.Steps:  # noqa: PLR0911 - one each
    if target.resource.namespaced and not target.namespace:
        raise no_such_path()
    if target.subresource in _SAME_OBJECT:
        return (yield from _object_part(api, target, request))
    match target.subresource, request.method:
        case "scale", _:
            return (yield from scale.handle(api, target, request))
        case "binding", "POST":
            return (yield from binding.bind(api, target, request))
        case "eviction", "POST":
            return eviction.evict(api, target, request)
        case (("log" | "exec" | "portforward"), ("GET" | "POST")):
            return streams.to_kubelet(api.store, target, request)
        case "proxy", "GET":
            return streams.to_pod(api.store, target)
        case "finalize", "PUT":
            return finalize.finalize(api, target, request)
        case "token", "POST":
            return tokens.issue(api.store, api.schema, api.now_s, target, request)
    raise method_not_allowed()


def _object_part(api: ApiState, target: Target, request: Request) -> writes.Steps:
    match request.method:
        case "GET":
            return reads.get(api, target, request)
        case "PUT":
            return (yield from writes.update(api, target, request))
        case "PATCH":
            return (yield from writes.patch(api, target, request))
    raise method_not_allowed()
