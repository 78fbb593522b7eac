"""Kubernetes' protobuf envelope, which kubectl's generators post without a JSON fallback."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import Any

from simcluster.cluster.errors import bad_request
from simcluster.cluster.moment import format_time
from simcluster.cluster.request import Object
from simcluster.cluster.schema import Field, Message, Schema

PREFIX = b"k8s\x00"

_GROUP_PACKAGES = {
    "": "core",
    "rbac.authorization.k8s.io": "rbac",
    "events.k8s.io": "events",
    "coordination.k8s.io": "coordination",
    "scheduling.k8s.io": "scheduling",
    "networking.k8s.io": "networking",
    "storage.k8s.io": "storage",
    "authorization.k8s.io": "authorization",
    "authentication.k8s.io": "authentication",
    "admissionregistration.k8s.io": "admissionregistration",
    "discovery.k8s.io": "discovery",
    "node.k8s.io": "node",
    "resource.k8s.io": "resource",
}
Wire = int | bytes


def schema_name(api_version: str, kind: str) -> str:
    """The message of a kind, such as ``apps.v1.Deployment``; DeleteOptions belong to every group."""
    if kind == "DeleteOptions":
        return "meta.v1.DeleteOptions"
    group, _, version = api_version.rpartition("/")
    return f"{_GROUP_PACKAGES.get(group, group)}.{version}.{kind}"


def decode_envelope(schema: Schema, data: bytes) -> Object:
    """The object in ``k8s\\0`` + runtime.Unknown, as its JSON form; ApiError 400 for unknown kinds."""
    unknown = dict(_fields(data[len(PREFIX) :]))
    type_meta = dict(_fields(_bytes(unknown.get(1, b""))))
    api_version, kind = _bytes(type_meta.get(1, b"")).decode(), _bytes(type_meta.get(2, b"")).decode()
    message = schema.get(schema_name(api_version, kind))
    if message is None:
        raise bad_request(f"no kind {kind!r} is registered for version {api_version!r}")
    decoded = _message(schema, message, _bytes(unknown.get(2, b"")))
    return {"apiVersion": api_version, "kind": kind, **decoded}


def _fields(data: bytes) -> Iterator[tuple[int, Wire]]:
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        match tag & 7:
            case 0:
                value, position = _varint(data, position)
                yield tag >> 3, value
            case 1:
                yield tag >> 3, data[position : position + 8]
                position += 8
            case 2:
                length, position = _varint(data, position)
                yield tag >> 3, data[position : position + length]
                position += length
            case 5:
                yield tag >> 3, data[position : position + 4]
                position += 4
            case wire_type:
                raise bad_request(f"protobuf wire type {wire_type} is not supported")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data):
            raise bad_request("the protobuf body is cut short")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, position


def _bytes(value: Wire) -> bytes:
    if isinstance(value, int):
        raise bad_request("the protobuf body holds a number where bytes were expected")
    return value


def _message(schema: Schema, message: Message, data: bytes) -> Object:
    result: Object = {}
    for number, value in _fields(data):
        field = message.numbered.get(number)
        if field is None:
            continue
        if field.shape == "map":
            parts = dict(_fields(_bytes(value)))
            key, item = _bytes(parts.get(1, b"")).decode(), _single(schema, field, parts.get(2, b""))
            result.setdefault(field.name, {})[key] = item
        elif field.shape == "list":
            result.setdefault(field.name, []).append(_single(schema, field, value))
        elif field.inline:
            result.update(_single(schema, field, value))
        else:
            result[field.name] = _single(schema, field, value)
    return result


def _single(schema: Schema, field: Field, value: Wire) -> Any:
    if field.is_message:
        return _message(schema, schema.message(field.type), _bytes(value))
    return _scalar(field.type, value)


def _scalar(type_name: str, value: Wire) -> Any:
    match type_name:
        case "int":
            number = int(value) if isinstance(value, int) else 0
            return number - (1 << 64) if number >> 63 else number
        case "bool":
            return bool(value)
        case "str":
            return _bytes(value).decode()
        case "bytes":
            return base64.b64encode(_bytes(value)).decode()
        case "float":
            return struct.unpack("<d", _bytes(value))[0]
    return _special(type_name, dict(_fields(_bytes(value))))


def _special(type_name: str, parts: dict[int, Wire]) -> Any:
    match type_name:
        case "Quantity":
            return _bytes(parts.get(1, b"")).decode()
        case "Time" | "MicroTime":
            seconds = _scalar("int", parts.get(1, 0))
            return format_time(seconds) if 0 < seconds < 1 << 40 else None
        case "IntOrString":
            return _bytes(parts.get(3, b"")).decode() if parts.get(1) else _scalar("int", parts.get(2, 0))
    raise bad_request(f"a protobuf body with a {type_name} field is not supported")
