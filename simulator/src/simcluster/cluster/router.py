"""Which function answers a request."""

from __future__ import annotations

from simcluster.cluster import binding, deletes, discovery, openapi, reads, reviews, subresources, writes
from simcluster.cluster.errors import method_not_allowed, no_such_path
from simcluster.cluster.request import Request, Response, json_response
from simcluster.cluster.route import Target, parse_target
from simcluster.cluster.state import ApiState

_HEALTH = ("/healthz", "/livez", "/readyz")


def route(api: ApiState, request: Request) -> writes.Steps:
    """Answers everything below ``/``; ApiError where there is nothing."""
    path = "/" + request.path.strip("/")
    if response := _fixed(api, request, path):
        return response
    target = parse_target(api.catalog, path)
    if target.subresource:
        return (yield from subresources.handle(api, target, request))
    if target.resource.is_virtual:
        if request.method != "POST":
            raise method_not_allowed()
        if target.resource.store == "bindings":
            return (yield from binding.bind(api, target, request))
        return reviews.answer(api.schema, target, request)
    if target.name:
        return (yield from _object(api, target, request))
    return (yield from _collection(api, target, request))


def _fixed(api: ApiState, request: Request, path: str) -> Response | None:  # noqa: PLR0911 - one answer a path
    """The paths that do not depend on what is stored."""
    if path.startswith(_HEALTH):
        return Response(200, b"ok", {"content-type": "text/plain; charset=utf-8"})
    match path:
        case "/":
            return json_response({"paths": ["/api", "/apis", "/healthz", "/openapi/v3", "/version"]})
        case "/version":
            return json_response(discovery.VERSION)
        case "/openapi/v2":
            return openapi.version_two(request)
        case "/openapi/v3":
            return openapi.index(api)
    if path.startswith("/openapi/v3/"):
        return openapi.document(api, path.removeprefix("/openapi/v3/"))
    return _discovery(api, request, path.split("/")[1:])


def _discovery(api: ApiState, request: Request, parts: list[str]) -> Response | None:  # noqa: PLR0911 - one answer a path
    aggregated = discovery.wants_aggregated(request)
    match parts:
        case [("api" | "apis") as root] if aggregated:
            return discovery.aggregated(api.catalog, root == "api", aggregated)
        case ["api"]:
            return discovery.api_versions()
        case ["apis"]:
            return discovery.group_list(api.catalog)
        case ["api", version]:
            return discovery.resource_list(api.catalog, "", version)
        case ["apis", group]:
            return discovery.one_group(api.catalog, group)
        case ["apis", group, version]:
            return discovery.resource_list(api.catalog, group, version)
    return None


def _object(api: ApiState, target: Target, request: Request) -> writes.Steps:
    _check_namespace(target)
    match request.method:
        case "GET" if request.flag("watch"):
            return reads.watch(api, target, request)
        case "GET":
            return reads.get(api, target, request)
        case "PUT":
            return (yield from writes.update(api, target, request))
        case "PATCH":
            return (yield from writes.patch(api, target, request))
        case "DELETE":
            return deletes.delete(api, target, request)
    raise method_not_allowed()


def _check_namespace(target: Target) -> None:
    """A namespaced object has no address without its namespace."""
    if target.resource.namespaced and not target.namespace:
        raise no_such_path()


def _collection(api: ApiState, target: Target, request: Request) -> writes.Steps:
    match request.method:
        case "GET" if request.flag("watch"):
            return reads.watch(api, target, request)
        case "GET":
            return reads.list_objects(api, target, request)
        case "POST":
            _check_namespace(target)
            return (yield from writes.create(api, target, request))
        case "DELETE":
            return deletes.delete_collection(api, target, request)
    raise method_not_allowed()
