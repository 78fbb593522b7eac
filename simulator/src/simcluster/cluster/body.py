"""Request bodies into objects of the resource addressed, as strictly as the client asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from simcluster.cluster.decode import Decoder, parse_json
from simcluster.cluster.errors import ApiError, bad_request, unsupported_media_type
from simcluster.cluster.events_view import to_core
from simcluster.cluster.protobuf import PREFIX, decode_envelope
from simcluster.cluster.request import Object, Request, Response
from simcluster.cluster.resources import Resource
from simcluster.cluster.schema import Schema

_YAML = ("application/yaml", "text/yaml", "application/apply-patch+yaml")
PROTOBUF = "application/vnd.kubernetes.protobuf"


@dataclass(frozen=True, slots=True)
class Body:
    """A decoded object without apiVersion and kind, and what to warn the client of."""

    obj: Object
    warnings: tuple[str, ...] = ()


def parse_body(schema: Schema, request: Request) -> Object:
    """JSON, YAML or protobuf as a plain object, unchecked."""
    if request.body.startswith(PREFIX):
        return decode_envelope(schema, request.body)
    if request.content_type in _YAML and not request.body.lstrip().startswith(b"{"):
        return parse_yaml(request.body)
    if request.content_type == PROTOBUF:
        raise unsupported_media_type(request.content_type)
    return parse_json(request.body)


def parse_yaml(body: bytes) -> Object:
    try:
        value: Any = yaml.safe_load(body)
    except yaml.YAMLError as error:
        raise bad_request(f"error parsing YAML: {error}") from error
    if not isinstance(value, dict):
        raise bad_request("the body of the request is not an object")
    return value


def read_object(schema: Schema, resource: Resource, request: Request) -> Body:
    """The object in the body, which must be of the resource's kind."""
    raw = parse_body(schema, request)
    check_type(resource, raw)
    return decode_object(schema, resource, raw, request.query.get("fieldValidation", "Warn"))


def check_type(resource: Resource, raw: Object) -> None:
    kind, version = raw.get("kind") or resource.kind, raw.get("apiVersion") or resource.api_version
    if (kind, version) != (resource.kind, resource.api_version):
        raise bad_request(
            f"the API version in the data ({version}, kind {kind}) does not match the expected API version"
            f" ({resource.api_version}, kind {resource.kind})"
        )


def decode_object(schema: Schema, resource: Resource, raw: Object, validation: str) -> Body:
    """Known fields only; unknown ones are an error (Strict), a warning (Warn) or ignored (Ignore)."""
    decoder = Decoder(schema)
    typed = {key: value for key, value in raw.items() if key not in ("apiVersion", "kind")}
    try:
        obj = decoder.object(resource.schema, typed)
    except ApiError as error:
        why = f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}'
        raise bad_request(f"{why}: {error.message}") from error
    if resource.group == "events.k8s.io":
        obj = to_core(obj)
    if decoder.unknown and validation == "Strict":
        listed = ", ".join(decoder.unknown)
        raise bad_request(
            f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}:'
            f" strict decoding error: {listed}"
        )
    obj.setdefault("metadata", {})
    return Body(obj, tuple(decoder.unknown) if validation == "Warn" else ())


def with_warnings(response: Response, warnings: Sequence[str]) -> Response:
    """The response with these besides the warnings that it has: kubectl prints them."""
    if not warnings:
        return response
    quoted = (warning.replace("\\", "\\\\").replace('"', '\\"') for warning in warnings)
    said = [*filter(None, [response.headers.get("warning")]), *(f'299 - "{text}"' for text in quoted)]
    return replace(response, headers={**response.headers, "warning": ", ".join(said)})
