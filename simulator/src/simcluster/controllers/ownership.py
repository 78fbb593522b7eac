"""Who owns whom, and the names and hashes that tie objects to their owner."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

Object = Mapping[str, Any]

_SAFE = "bcdfghjklmnpqrstvwxz2456789"


def controller_reference(owner: Object, api_version: str, kind: str) -> dict[str, Any]:
    """``metadata.ownerReferences`` of something that ``owner`` controls."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def controller_uid(obj: Object) -> str:
    """The uid of what controls the object, or an empty string."""
    references = obj["metadata"].get("ownerReferences") or []
    return next((str(item["uid"]) for item in references if item.get("controller")), "")


def template_hash(template: Object, collisions: int = 0) -> str:
    """A short name for a pod template, the same for equal templates."""
    text = msgspec.json.encode([template, collisions], order="sorted")
    digest = hashlib.sha256(text).digest()
    return "".join(_SAFE[byte % len(_SAFE)] for byte in digest[:10])


def labels_of(obj: Object) -> Mapping[str, str]:
    labels: Mapping[str, str] = obj["metadata"].get("labels") or {}
    return labels


def is_going(obj: Object) -> bool:
    return bool(obj["metadata"].get("deletionTimestamp"))
