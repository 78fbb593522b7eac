"""Namespaces: a default account in each, and deletion of everything in one that is being deleted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simcluster.controllers.actions import Action, Create, Delete
from simcluster.controllers.garbage import Node
from simcluster.controllers.ownership import is_going

Object = Mapping[str, Any]


def reconcile(namespace: Object, held: Sequence[Node]) -> list[Action]:
    """``held`` is everything in the namespace."""
    name = namespace["metadata"]["name"]
    if not is_going(namespace):
        if any(node.kind == "ServiceAccount" and node.obj["metadata"]["name"] == "default" for node in held):
            return []
        return [Create("ServiceAccount", {"metadata": {"name": "default"}}, name)]
    return [
        Delete(node.kind, name, node.obj["metadata"]["name"], node.uid)
        for node in held
        if not is_going(node.obj)
    ]


def is_empty(namespace: Object, held: Sequence[Node]) -> bool:
    """Whether a namespace that is being deleted may be finalized."""
    waits = (namespace.get("spec") or {}).get("finalizers")
    return is_going(namespace) and bool(waits) and not held
