"""Garbage collection by owner references: an object without any remaining owner is deleted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simcluster.controllers.actions import Action, Delete, Patch
from simcluster.controllers.ownership import is_going

Object = Mapping[str, Any]

FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"


@dataclass(frozen=True, slots=True)
class Node:
    """One object in the graph of ownership; ``kind`` names its resource."""

    kind: str
    obj: Object

    @property
    def uid(self) -> str:
        return str(self.obj["metadata"]["uid"])

    @property
    def owners(self) -> Sequence[Object]:
        references: Sequence[Object] = self.obj["metadata"].get("ownerReferences") or []
        return references

    @property
    def finalizers(self) -> Sequence[str]:
        finalizers: Sequence[str] = self.obj["metadata"].get("finalizers") or []
        return finalizers


class Graph:
    """All objects by uid, and their dependents."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._dependents: dict[str, set[str]] = {}

    def put(self, node: Node) -> None:
        self.discard(node.uid)
        self.nodes[node.uid] = node
        for reference in node.owners:
            self._dependents.setdefault(reference["uid"], set()).add(node.uid)

    def discard(self, uid: str) -> None:
        node = self.nodes.pop(uid, None)
        for reference in node.owners if node else ():
            held = self._dependents.get(reference["uid"], set())
            held.discard(uid)
            if not held:
                self._dependents.pop(reference["uid"], None)

    def dependents(self, uid: str) -> list[Node]:
        return [self.nodes[child] for child in sorted(self._dependents.get(uid, ()))]


def collect(graph: Graph, uid: str, gone: Iterable[str]) -> list[Action]:
    """What to do about one object, given that the owners in ``gone`` do not exist."""
    node = graph.nodes.get(uid)
    if node is None:
        return []
    if is_going(node.obj) and FOREGROUND in node.finalizers:
        return _finish_foreground(graph, node)
    if is_going(node.obj) and ORPHAN in node.finalizers:
        # dependents are orphaned, then the owner is deleted
        children = graph.dependents(node.uid)
        if not children:
            return [_without_finalizer(node, ORPHAN)]
        return [
            _patch(child, {"ownerReferences": [r for r in child.owners if r["uid"] != node.uid]})
            for child in children
        ]
    return _without_owners(graph, node, set(gone))


def _without_owners(graph: Graph, node: Node, gone: set[str]) -> list[Action]:
    if not node.owners or is_going(node.obj):
        return []
    live = [item for item in node.owners if item["uid"] not in gone]
    waiting = [item for item in live if _is_foreground(graph, item["uid"])]
    if live and len(live) > len(waiting):
        return []
    return [_delete(node, "Foreground" if waiting and graph.dependents(node.uid) else "Background")]


def _is_foreground(graph: Graph, uid: str) -> bool:
    owner = graph.nodes.get(uid)
    return owner is not None and is_going(owner.obj) and FOREGROUND in owner.finalizers


def _delete(node: Node, propagation: str) -> Delete:
    metadata = node.obj["metadata"]
    return Delete(node.kind, metadata.get("namespace", ""), metadata["name"], node.uid, propagation)


def _finish_foreground(graph: Graph, node: Node) -> list[Action]:
    """Dependents first, then the owner."""
    children = graph.dependents(node.uid)
    blocking = [
        c for c in children if any(r["uid"] == node.uid and r.get("blockOwnerDeletion") for r in c.owners)
    ]
    if not blocking:
        return [_without_finalizer(node, FOREGROUND)]
    return [
        _delete(child, "Foreground" if graph.dependents(child.uid) else "Background")
        for child in children
        if not is_going(child.obj)
    ]


def _without_finalizer(node: Node, finalizer: str) -> Patch:
    return _patch(node, {"finalizers": [item for item in node.finalizers if item != finalizer]})


def _patch(node: Node, metadata: Object) -> Patch:
    own = node.obj["metadata"]
    change = {"metadata": {**metadata, "resourceVersion": own["resourceVersion"]}}
    return Patch(node.kind, own.get("namespace", ""), own["name"], node.uid, change)
