"""What a controller decides: a list of actions, which the runner carries out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Create:
    """A new object of ``kind``; an existing name is not an error."""

    kind: str
    obj: Object
    namespace: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes this very object (by uid) and no later one of its name."""

    kind: str
    namespace: str
    name: str
    uid: str
    propagation: str = "Background"
    grace_s: int | None = None


@dataclass(frozen=True, slots=True)
class Patch:
    """A merge patch of this very object, or of its status."""

    kind: str
    namespace: str
    name: str
    uid: str
    change: Object
    status: bool = False


@dataclass(frozen=True, slots=True)
class Tell:
    """An event on the object being reconciled."""

    reason: str
    message: str
    type: str = "Normal"


@dataclass(frozen=True, slots=True)
class Again:
    """Look at the object again after this time, whatever happens until then."""

    after_s: float


Action = Create | Delete | Patch | Tell | Again


def delete(kind: str, obj: Object) -> Delete:
    metadata = obj["metadata"]
    return Delete(kind, metadata.get("namespace", ""), metadata["name"], metadata["uid"])


def patch(kind: str, obj: Object, change: Object, status: bool = False) -> Patch:
    metadata = obj["metadata"]
    return Patch(kind, metadata.get("namespace", ""), metadata["name"], metadata["uid"], change, status)


def patch_status(kind: str, obj: Object, status: Mapping[str, Any]) -> list[Action]:
    """Writes the status if it changes anything; a value of None removes a field."""
    held = obj.get("status") or {}
    changed = {key: value for key, value in status.items() if held.get(key) != value}
    return [patch(kind, obj, {"status": changed}, status=True)] if changed else []
