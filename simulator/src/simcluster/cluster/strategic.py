"""Strategic merge patch: merges lists by the key that the schema names for them."""

from __future__ import annotations

from typing import Any

from simcluster.cluster.errors import bad_request
from simcluster.cluster.request import Object
from simcluster.cluster.schema import Field, Message, Schema

_ORDER = "$setElementOrder/"
_DELETE = "$deleteFromPrimitiveList/"
_RETAIN = "$retainKeys"
_DIRECTIVE = "$patch"


class StrategicMerge:
    """Merges patches of one kind; changes neither argument."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def merge(self, schema_name: str, target: Object, patch: Object) -> Object:
        result = self._object(self._schema.message(schema_name), target, patch)
        return result if result is not None else {}

    def _object(self, message: Message | None, target: Object, patch: Object) -> Object | None:
        directive = patch.get(_DIRECTIVE)
        if directive == "delete":
            return None
        body = {key: value for key, value in patch.items() if not key.startswith("$")}
        if directive == "replace":
            return body
        retained = patch.get(_RETAIN, target)
        result = {key: value for key, value in target.items() if key in retained}
        for key, value in body.items():
            self._member(message.fields.get(key) if message else None, result, key, value)
        # the directives that stand beside a list: removal from sets of scalars, and the wanted order
        for key, value in patch.items():
            if key.startswith(_DELETE):
                name = key.removeprefix(_DELETE)
                result[name] = [item for item in result.get(name) or [] if item not in value]
        for key, value in patch.items():
            if key.startswith(_ORDER):
                name = key.removeprefix(_ORDER)
                field = message.fields.get(name) if message else None
                if isinstance(result.get(name), list):
                    result[name] = _ordered(result[name], value, field.key if field else "")
        return result

    def _member(self, field: Field | None, result: Object, key: str, value: Any) -> None:
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            before = result.get(key)
            merged = self._object(self._inner(field), before if isinstance(before, dict) else {}, value)
            if merged is None:
                result.pop(key, None)
            else:
                result[key] = merged
        elif isinstance(value, list) and field and "merge" in field.patch:
            result[key] = self._list(field, result.get(key) or [], value)
        else:
            result[key] = value

    def _inner(self, field: Field | None) -> Message | None:
        """The message below a field, or None for scalars and maps of scalars."""
        return self._schema.message(field.type) if field and field.is_message else None

    def _list(self, field: Field, target: list[Any], patch: list[Any]) -> list[Any]:
        if not field.is_message:
            return [*target, *(item for item in patch if item not in target)]
        if any(item.get(_DIRECTIVE) == "replace" for item in patch):
            return [item for item in patch if _DIRECTIVE not in item]
        result = list(target)
        for item in patch:
            if field.key not in item:
                raise bad_request(f"map: {item} does not contain declared merge key: {field.key}")
            names = [each.get(field.key) for each in result]
            position = names.index(item[field.key]) if item[field.key] in names else None
            if item.get(_DIRECTIVE) == "delete":
                if position is not None:
                    del result[position]
                continue
            merged = self._object(self._inner(field), {} if position is None else result[position], item)
            if position is None:
                result.append(merged)
            else:
                result[position] = merged
        return result


def _ordered(items: list[Any], order: list[Any], key: str) -> list[Any]:
    """Named items in the order given; the others keep their place relative to what stood before them."""
    identity = [item.get(key) if isinstance(item, dict) else item for item in items]
    wanted = [item.get(key) if isinstance(item, dict) else item for item in order]
    slots = iter(
        sorted(
            (i for i, name in enumerate(identity) if name in wanted), key=lambda i: wanted.index(identity[i])
        )
    )
    return [
        items[next(slots)] if name in wanted else item for name, item in zip(identity, items, strict=True)
    ]
