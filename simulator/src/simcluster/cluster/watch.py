"""A subscription to the changes of one kind, filtered and rendered for one client."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from simcluster.cluster.errors import ApiError
from simcluster.cluster.request import Object
from simcluster.cluster.selector import Matcher
from simcluster.cluster.store import Change, Entry, Store, with_version

Render = Callable[[Entry], bytes]

_MOST_WAITING = 50_000
INITIAL_EVENTS_END = "k8s.io/initial-events-end"
_HOLLOW: dict[str, Object] = {"Pod": {"spec": {"containers": None}, "status": {}}}
"""What bookmarks carry beside metadata, which no pod of the API may: Go's empty value of their kind."""


class Watch:
    """Lines are queued here until the server takes them; ``on_ready`` is called if there are some, or at the
    end.

    ``timeout_s`` is how long the client wants it to last, ``None`` if it did not say.
    """

    def __init__(
        self,
        store: Store,
        shelf: str,
        *,
        namespace: str,
        matches: Matcher | None,
        render: Render,
        bookmark_type: Object,
        wants_bookmarks: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self.wants_bookmarks = wants_bookmarks
        self.timeout_s = timeout_s
        self.ended = False
        self.shelf = shelf
        self.on_ready: Callable[[], None] = _nothing
        self._store = store
        self._namespace = namespace
        self._matches = matches
        self._render = render
        self._bookmark_type = bookmark_type
        self._lines: list[bytes] = []

    def start(self) -> None:
        self._store.shelf(self.shelf).listeners.append(self)

    def end(self) -> None:
        """No more lines will come; also called when the client has gone."""
        listeners = self._store.shelf(self.shelf).listeners
        if self in listeners:
            listeners.remove(self)
        self.ended = True
        self.on_ready()

    def take(self) -> bytes:
        """All waiting lines, each ended by a newline."""
        lines, self._lines = self._lines, []
        return b"".join(lines)

    def offer(self, change: Change) -> None:
        """One change, as far as this client may see it."""
        if self._namespace and change.key[0] != self._namespace:
            return
        before = change.before is not None and self._selects(change.before)
        after = change.after is not None and self._selects(change.after)
        if after and change.after is not None:
            self._push("MODIFIED" if before else "ADDED", self._render(change.after))
        elif before and change.before is not None:
            self._push("DELETED", self._render(with_version(change.before.obj, change.version)))
        # A client that reads too slowly loses its watch, not our memory; it resumes where it was
        if len(self._lines) > _MOST_WAITING:
            self.end()

    def show(self, entries: list[Entry]) -> None:
        """The state before the first change."""
        for entry in entries:
            self._push("ADDED", self._render(entry))

    def bookmark(self, initial_end: bool = False) -> None:
        """Tells the client how far it has got."""
        metadata: Object = {"resourceVersion": str(self._store.version), "creationTimestamp": None}
        if initial_end:
            metadata["annotations"] = {INITIAL_EVENTS_END: "true"}
        hollow = _HOLLOW.get(self._bookmark_type["kind"], {})
        self._push("BOOKMARK", msgspec.json.encode(self._bookmark_type | hollow | {"metadata": metadata}))

    def fail(self, error: ApiError) -> None:
        self._push("ERROR", msgspec.json.encode(error.status()))
        self.end()

    def _selects(self, entry: Entry) -> bool:
        return self._matches is None or self._matches(entry.obj)

    def _push(self, kind: str, rendered: bytes) -> None:
        self._lines.append(b'{"type":"%s","object":%s}\n' % (kind.encode(), rendered))
        self.on_ready()


def _nothing() -> None:
    """Until a face listens."""
