"""The sentences about a wrong field."""

from __future__ import annotations

from typing import Any

import msgspec

from simcluster.cluster.errors import Cause


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return msgspec.json.encode(value).decode()


def required(field: str, why: str = "") -> Cause:
    return Cause(field, "FieldValueRequired", f"Required value: {why}" if why else "Required value")


def invalid_value(field: str, value: Any, why: str) -> Cause:
    return Cause(field, "FieldValueInvalid", f"Invalid value: {_shown(value)}: {why}")


def unsupported(field: str, value: Any, supported: tuple[str, ...]) -> Cause:
    listed = ", ".join(f'"{item}"' for item in supported)
    text = f"Unsupported value: {_shown(value)}: supported values: {listed}"
    return Cause(field, "FieldValueNotSupported", text)


def too_long(field: str, most_bytes: int) -> Cause:
    return Cause(field, "FieldValueTooLong", f"Too long: may not be more than {most_bytes} bytes")


def duplicate(field: str, value: Any) -> Cause:
    return Cause(field, "FieldValueDuplicate", f"Duplicate value: {_shown(value)}")


def forbidden_value(field: str, why: str) -> Cause:
    return Cause(field, "FieldValueForbidden", f"Forbidden: {why}")


def immutable(field: str, value: Any) -> Cause:
    return invalid_value(field, value, "field is immutable")


def not_found_value(field: str, value: Any) -> Cause:
    return Cause(field, "FieldValueNotFound", f"Not found: {_shown(value)}")
