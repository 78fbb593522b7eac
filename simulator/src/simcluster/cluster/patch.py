"""JSON Patch (RFC 6902) and JSON Merge Patch (RFC 7386)."""

from __future__ import annotations

import copy
from typing import Any

from simcluster.cluster.errors import ApiError, bad_request


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386: null removes, objects merge, all else replaces. Changes neither argument."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def json_patch(target: Any, operations: Any) -> Any:
    """RFC 6902 on a copy of ``target``; ApiError 422 when a test or a path fails."""
    if not isinstance(operations, list):
        raise bad_request("json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    holder = {"": copy.deepcopy(target)}
    for operation in operations:
        try:
            path = _split(operation["path"])
            match operation["op"]:
                case "add":
                    _add(holder, path, operation["value"])
                case "remove":
                    _remove(holder, path)
                case "replace":
                    _remove(holder, path)
                    _add(holder, path, operation["value"])
                case "move":
                    _add(holder, path, _remove(holder, _split(operation["from"])))
                case "copy":
                    _add(holder, path, copy.deepcopy(_get(holder, _split(operation["from"]))))
                case "test":
                    if _get(holder, path) != operation["value"]:
                        raise ValueError(f"testing value {operation['path']} failed")
                case unknown:
                    raise ValueError(f"unexpected kind: {unknown}")
        except (KeyError, IndexError, ValueError, TypeError) as error:
            why = str(error)
            message = f"the server rejected our request due to an error in our request: {operation!r}: {why}"
            raise ApiError(422, "Invalid", message) from error
    return holder[""]


def _split(pointer: str) -> list[str]:
    if pointer and not pointer.startswith("/"):
        raise ValueError(f"path {pointer!r} does not start with /")
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")]


def _get(holder: Any, path: list[str]) -> Any:
    for part in path:
        holder = holder[_index(holder, part)] if isinstance(holder, list) else holder[part]
    return holder


def _add(holder: Any, path: list[str], value: Any) -> None:
    parent, last = _get(holder, path[:-1]), path[-1]
    if isinstance(parent, list):
        position = len(parent) if last == "-" else int(last)
        if not 0 <= position <= len(parent):
            raise IndexError(f"index {last} is outside the list")
        parent.insert(position, value)
    else:
        parent[last] = value


def _remove(holder: Any, path: list[str]) -> Any:
    parent, last = _get(holder, path[:-1]), path[-1]
    return parent.pop(_index(parent, last) if isinstance(parent, list) else last)


def _index(items: list[Any], part: str) -> int:
    position = int(part)
    if not 0 <= position < len(items):
        raise IndexError(f"index {part} is outside the list")
    return position
