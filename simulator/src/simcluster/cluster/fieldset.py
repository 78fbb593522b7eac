"""Sets of field paths: which fields an object has, as managedFields write them down.

A path is a tuple of elements: ``f:name`` (a field or map key), ``k:{…}`` (a list item by its keys), ``v:…``
(an item of a set). A list item itself is the path that ends with its ``k:`` element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from simcluster.cluster.request import Object
from simcluster.cluster.schema import Field, Message, Schema

Path = tuple[str, ...]
Leaves = dict[Path, Any]

_UNTRACKED = frozenset(
    {
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "managedFields",
        "selfLink",
    }
)
_KEY_DEFAULTS = {"protocol": "TCP"}
_ITEM = object()


def leaves(schema: Schema, schema_name: str, obj: Object) -> Leaves:
    """Every path that somebody can own, with its value."""
    message = schema.message(schema_name)
    tracked = {key: value for key, value in obj.items() if key in message.fields}
    metadata = tracked.pop("metadata", {})
    own = {key: value for key, value in metadata.items() if key not in _UNTRACKED}
    found = dict(_message(schema, schema.message("meta.v1.ObjectMeta"), own, ("f:metadata",)))
    found |= dict(_message(schema, message, tracked, ()))
    return found


def _message(schema: Schema, message: Message, obj: Object, path: Path) -> Iterator[tuple[Path, Any]]:
    for name, value in obj.items():
        if field := message.fields.get(name):
            yield from _field(schema, field, value, (*path, f"f:{name}"))


def _field(schema: Schema, field: Field, value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if field.atomic or not value:
        yield path, value
    elif field.shape == "map":
        for key, item in value.items():
            yield (*path, f"f:{key}"), item
    elif field.shape == "list":
        if field.is_set:
            for item in value:
                yield (*path, set_element(item)), item
        elif field.map_keys:
            message = schema.message(field.type)
            for item in value:
                inner = (*path, item_key(field, item))
                yield inner, _ITEM
                yield from _message(schema, message, item, inner)
        else:
            yield path, value
    elif field.is_message and not schema.message(field.type).atomic:
        yield from _message(schema, schema.message(field.type), value, path)
    else:
        yield path, value


def item_key(field: Field, item: Object) -> str:
    """The element of a list item: ``k:{"name":"c"}``."""
    keys = {key: item.get(key, _KEY_DEFAULTS.get(key)) for key in sorted(field.map_keys)}
    return f"k:{_text({key: value for key, value in keys.items() if value is not None})}"


def set_element(item: Any) -> str:
    """The element of a set's item: ``v:"x"``."""
    return f"v:{_text(item)}"


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def encode(paths: Iterable[Path]) -> Object:
    """FieldsV1: a tree of elements; ``.`` marks a path that has others below it."""
    root: Object = {}
    for path in sorted(paths):
        node = root
        for element in path:
            node = node.setdefault(element, {})
        if path[-1].startswith("k:"):
            node["."] = {}
    return root


def decode(tree: Object, path: Path = ()) -> set[Path]:
    """The set that a FieldsV1 tree means."""
    found: set[Path] = set()
    for element, below in tree.items():
        if element == ".":
            found.add(path)
        elif below:
            found |= decode(below, (*path, element))
        else:
            found.add((*path, element))
    return found


def path_text(path: Path) -> str:
    """A path as messages show it: ``.spec.containers[name="c"].image``."""
    return "".join(_element_text(element) for element in path)


def _element_text(element: str) -> str:
    kind, text = element[:2], element[2:]
    if kind == "f:":
        return f".{text}"
    if kind == "v:":
        return f"[={text}]"
    keys = msgspec.json.decode(text)
    return "[" + ",".join(f"{key}={_text(value)}" for key, value in keys.items()) + "]"
