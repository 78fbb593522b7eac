"""Bodies into objects: known fields only, values of the right type, quantities canonical.

What Go's decoder does is imitated where clients notice: unknown fields are reported, ``null`` and empty lists
vanish, a wrong type is an error that names the path.
"""

from __future__ import annotations

from typing import Any

import msgspec

from simcluster.cluster.errors import bad_request
from simcluster.cluster.quantity import canonical_quantity
from simcluster.cluster.request import Object
from simcluster.cluster.schema import Field, Message, Schema


class Decoder:
    """Decodes one body; collects what a strict reader would complain about in ``unknown``."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self.unknown: list[str] = []

    def object(self, schema_name: str, body: Object) -> Object:
        """``body`` without unknown fields; ApiError 400 where a value has the wrong type."""
        message = self._schema.message(schema_name)
        head = {key: body[key] for key in ("apiVersion", "kind") if key in body}
        rest = {key: value for key, value in body.items() if key not in head}
        return head | self._message(message, rest, "")

    def _message(self, message: Message, value: Any, path: str) -> Object:
        if not isinstance(value, dict):
            raise _wrong_type(value, message.name.rsplit(".", 1)[-1], path)
        result: Object = {}
        for name, item in value.items():
            known = message.fields.get(name)
            if known is None:
                self.unknown.append(f'unknown field "{_join(path, name)}"')
            elif (decoded := self._field(known, item, _join(path, name))) is not None:
                result[name] = decoded
        return result

    def _field(self, field: Field, value: Any, path: str) -> Any:
        if value is None:
            return None
        if field.shape == "list":
            if not isinstance(value, list):
                raise _wrong_type(value, f"[]{field.type}", path)
            return [self._single(field, item, f"{path}[{index}]") for index, item in enumerate(value)] or None
        if field.shape == "map":
            if not isinstance(value, dict):
                raise _wrong_type(value, f"map[string]{field.type}", path)
            return {key: self._single(field, item, f"{path}.{key}") for key, item in value.items()} or None
        decoded = self._single(field, value, path)
        return None if field.omits_zero and not decoded else decoded

    def _single(self, field: Field, value: Any, path: str) -> Any:
        if field.is_message:
            return self._message(self._schema.message(field.type), {} if value is None else value, path)
        return decode_scalar(field.type, value, path)


def decode_scalar(type_name: str, value: Any, path: str) -> Any:  # noqa: PLR0911 - one case a type
    match type_name, value:
        case "Raw", _:
            return value
        case "Quantity", str() | int() | float() if not isinstance(value, bool):
            text = value if isinstance(value, str) else repr(value)
            try:
                return canonical_quantity(text.strip())
            except ValueError as error:
                raise bad_request(f"{path}: {error}") from error
        case (("str" | "Time" | "MicroTime" | "bytes" | "IntOrString"), str()):
            return value
        case "Quantity", None:  # in a map, as in Go
            return "0"
        case "bool", bool():
            return value
        case (("int" | "float" | "IntOrString"), int()) if not isinstance(value, bool):
            return value
        case (("int" | "IntOrString"), float()) if value.is_integer():
            return int(value)
        case "float", float():
            return value
        case (("str" | "Time" | "MicroTime"), None):
            return ""
    raise _wrong_type(value, {"str": "string", "int": "int32"}.get(type_name, type_name), path)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _wrong_type(value: Any, wanted: str, path: str) -> Exception:
    names: dict[type, str] = {str: "string", bool: "bool", int: "number", float: "number", list: "array"}
    got = names.get(type(value), "object" if isinstance(value, dict) else "null")
    return bad_request(f"json: cannot unmarshal {got} into Go struct field {path} of type {wanted}")


def parse_json(body: bytes) -> Object:
    """The body as a JSON object, or ApiError 400."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise bad_request(f"the body of the request is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad_request("the body of the request is not a JSON object")
    return value
