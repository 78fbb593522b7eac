"""Objects with versions and a bounded history of changes, for watches and consistent lists."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import msgspec

from simcluster.cluster.errors import expired
from simcluster.cluster.request import Object

Key = tuple[str, str]
"""Namespace (empty for cluster scope) and name."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored object, never changed: ``obj`` without apiVersion and kind, ``raw`` the same as JSON."""

    obj: Object
    raw: bytes
    version: int

    @property
    def key(self) -> Key:
        metadata = self.obj["metadata"]
        return metadata.get("namespace", ""), metadata["name"]

    def copy(self) -> Object:
        """An object of one's own to change."""
        copied: Object = msgspec.json.decode(self.raw)
        return copied


@dataclass(frozen=True, slots=True)
class Change:
    """``before`` is None for a creation; ``after`` is None for a deletion."""

    version: int
    key: Key
    before: Entry | None
    after: Entry | None


class Listener(Protocol):
    def offer(self, change: Change) -> None: ...


@dataclass(slots=True)
class Shelf:
    """The objects of one kind. ``forgotten`` is the newest version that history can no longer explain."""

    items: dict[Key, Entry] = field(default_factory=dict)
    history: deque[Change] = field(default_factory=deque)
    listeners: list[Listener] = field(default_factory=list)
    forgotten: int = 0


def with_version(obj: Object, version: int) -> Entry:
    obj = obj | {"metadata": obj["metadata"] | {"resourceVersion": str(version)}}
    return Entry(obj, msgspec.json.encode(obj), version)


class Store:
    """All shelves and the one version counter they share; ``history_limit`` changes are kept a shelf."""

    def __init__(self, history_limit: int = 10_000) -> None:
        self.version = 1
        self._history_limit = history_limit
        self._shelves: dict[str, Shelf] = {}

    def shelf(self, name: str) -> Shelf:
        return self._shelves.setdefault(name, Shelf())

    def names(self) -> list[str]:
        return list(self._shelves)

    def get(self, name: str, key: Key) -> Entry | None:
        return self.shelf(name).items.get(key)

    def put(self, name: str, obj: Object) -> Entry:
        """Stores ``obj``, which the caller gives away, under its own name."""
        self.version += 1
        entry = with_version(obj, self.version)
        shelf = self.shelf(name)
        before = shelf.items.get(entry.key)
        shelf.items[entry.key] = entry
        self._record(shelf, Change(self.version, entry.key, before, entry))
        return entry

    def remove(self, name: str, key: Key) -> Entry:
        """Takes the object away; answers its last state with the version of the removal."""
        self.version += 1
        shelf = self.shelf(name)
        before = shelf.items.pop(key)
        self._record(shelf, Change(self.version, key, before, None))
        return with_version(before.obj, self.version)

    def _record(self, shelf: Shelf, change: Change) -> None:
        shelf.history.append(change)
        while len(shelf.history) > self._history_limit:
            shelf.forgotten = shelf.history.popleft().version
        for listener in tuple(shelf.listeners):
            listener.offer(change)

    def since(self, name: str, version: int) -> list[Change]:
        """Changes after ``version``; ApiError 410 if they are partly forgotten."""
        shelf = self.shelf(name)
        if version < shelf.forgotten:
            raise expired(f"too old resource version: {version} ({shelf.forgotten})")
        later = takewhile(lambda change: change.version > version, reversed(shelf.history))
        return list(later)[::-1]

    def items_at(self, name: str, version: int) -> dict[Key, Entry]:
        """The objects as they were at ``version``: the present with later changes undone."""
        later = self.since(name, version)
        items = self.shelf(name).items
        if not later:
            return items
        past = dict(items)
        for change in reversed(later):
            if change.before is None:
                past.pop(change.key, None)
            else:
                past[change.key] = change.before
        return past

    def compact(self) -> None:
        """Forgets all history, as etcd's compaction does; older versions are answered with 410."""
        for shelf in self._shelves.values():
            shelf.history.clear()
            shelf.forgotten = self.version
