"""OpenAPI documents: enough for ``kubectl apply`` with validation and merge keys, and for ``explain``."""

from __future__ import annotations

import msgspec

from simcluster.cluster.errors import no_such_path
from simcluster.cluster.request import JSON, Object, Request, Response, json_response
from simcluster.cluster.resources import Resource
from simcluster.cluster.schema import Field, Message, Schema
from simcluster.cluster.state import ApiState

PROTOBUF_TWO = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
_SCALARS: dict[str, Object] = {
    "str": {"type": "string"},
    "int": {"type": "integer", "format": "int32"},
    "bool": {"type": "boolean"},
    "bytes": {"type": "string", "format": "byte"},
    "float": {"type": "number", "format": "double"},
    "Quantity": {"type": "string"},
    "IntOrString": {"oneOf": [{"type": "integer"}, {"type": "string"}], "format": "int-or-string"},
    "Time": {"type": "string", "format": "date-time"},
    "MicroTime": {"type": "string", "format": "date-time"},
    "Raw": {"type": "object"},
}
_PATCH_TYPES = (
    "application/apply-patch+yaml",
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
)


def index(api: ApiState) -> Response:
    paths = {
        path: {"serverRelativeURL": f"/openapi/v3/{path}?hash=simulated"}
        for path in (_path(group, version) for group, version in api.catalog.group_versions())
    }
    return json_response({"paths": paths})


def _path(group: str, version: str) -> str:
    return f"apis/{group}/{version}" if group else f"api/{version}"


def document(api: ApiState, path: str) -> Response:
    """The document of one group and version, built once."""
    if path not in api.documents:
        found = next((gv for gv in api.catalog.group_versions() if _path(*gv) == path), None)
        if found is None:
            raise no_such_path()
        resources = [r for r in api.catalog.of(*found) if not r.is_virtual]
        api.documents[path] = msgspec.json.encode(_document(api.schema, resources))
    return Response(200, api.documents[path], {"content-type": JSON})


def _document(schema: Schema, resources: list[Resource]) -> Object:
    roots = [resource.schema for resource in resources]
    found: dict[str, None] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = None
            fields = schema.message(name).fields.values()
            waiting += [field.type for field in fields if field.is_message]
    names = list(found)
    kinds = {resource.schema: resource for resource in resources}
    schemas = {public_name(name): _schema(schema.message(name), kinds.get(name)) for name in names}
    paths: Object = {}
    for resource in resources:
        paths |= _paths(resource)
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.36.2"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def public_name(name: str) -> str:
    if name.startswith("meta."):
        return f"io.k8s.apimachinery.pkg.apis.{name}"
    return f"io.k8s.api.{name}"


def _gvk(resource: Resource) -> Object:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _schema(message: Message, resource: Resource | None) -> Object:
    properties: Object = {}
    if resource is not None:
        properties = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
    properties |= {name: _field(field) for name, field in message.fields.items()}
    result: Object = {
        "type": "object",
        "description": message.name.rsplit(".", 1)[-1],
        "properties": properties,
    }
    if resource is not None:
        result["x-kubernetes-group-version-kind"] = [_gvk(resource)]
    if message.atomic:
        result["x-kubernetes-map-type"] = "atomic"
    return result


def _field(field: Field) -> Object:
    if field.is_message:
        inner = {"allOf": [{"$ref": f"#/components/schemas/{public_name(field.type)}"}], "default": {}}
    else:
        inner = _SCALARS[field.type]
    if field.shape == "map":
        return {"type": "object", "additionalProperties": inner}
    if field.shape == "one":
        return inner
    result: Object = {"type": "array", "items": inner}
    kind = "map" if field.map_keys else "set" if field.is_set else "atomic"
    result["x-kubernetes-list-type"] = kind
    if field.map_keys:
        result["x-kubernetes-list-map-keys"] = list(field.map_keys)
    if field.patch:
        result["x-kubernetes-patch-strategy"] = ",".join(field.patch)
        if field.key:
            result["x-kubernetes-patch-merge-key"] = field.key
    return result


def _paths(resource: Resource) -> Object:
    root = f"/{_path(resource.group, resource.version)}"
    collection = (
        f"{root}/namespaces/{{namespace}}/{resource.plural}"
        if resource.namespaced
        else f"{root}/{resource.plural}"
    )
    gvk = {"x-kubernetes-group-version-kind": _gvk(resource)}
    validated = {"parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]}
    reference = {"$ref": f"#/components/schemas/{public_name(resource.schema)}"}
    patched = {"requestBody": {"content": {kind: {"schema": reference} for kind in _PATCH_TYPES}}}
    one: Object = {
        "get": {"x-kubernetes-action": "get", **gvk},
        "put": {"x-kubernetes-action": "put", **gvk, **validated},
        "patch": {"x-kubernetes-action": "patch", **gvk, **validated, **patched},
    }
    many: Object = {
        "get": {"x-kubernetes-action": "list", **gvk},
        "post": {"x-kubernetes-action": "post", **gvk, **validated},
    }
    return {collection: many, f"{collection}/{{name}}": one}


def version_two(request: Request) -> Response:
    """An empty Swagger document: clients that still ask for it find their kinds in version 3.

    kubectl asks for it in protobuf, where nothing at all is an empty document, before it applies a List.
    """
    if "protobuf" in request.accept:
        return Response(200, b"", {"content-type": PROTOBUF_TWO})
    return json_response(
        {
            "swagger": "2.0",
            "info": {"title": "Kubernetes", "version": "v1.36.2"},
            "paths": {},
            "definitions": {},
        }
    )
