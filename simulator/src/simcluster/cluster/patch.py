"""JSON Patch (RFC 6902) and JSON Merge Patch (RFC 7386)."""

from __future__ import annotations

from typing import Any

import jsonpatch
from jsonpointer import JsonPointerException

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
    try:
        changed = jsonpatch.apply_patch(target, operations)
        if not isinstance(changed, dict):
            raise jsonpatch.JsonPatchConflict("what is left is no object")
    except (jsonpatch.JsonPatchException, JsonPointerException, TypeError) as error:
        message = f"the server rejected our request due to an error in our request: {error}"
        raise ApiError(422, "Invalid", message) from error
    return changed
