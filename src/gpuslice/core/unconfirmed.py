"""Pods that are sent to a node, of which nobody has said yet whether kubelet let them start.

A device plugin that dies, or a kubelet that rejects for another reason, is known by the first pod that fails.
All that were sent before that fail as well, and a burst sends twenty pods before one can fail. So a node gets
no more pods at a time than it has let start just now, and a few at least: further ones prefer other nodes, as
long as others have room. Nobody waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

LEAST = 4  # pods, also on a node that has let none start for a while
RECENTLY_S = 10.0
LOST_AFTER_S = 60.0  # what takes longer has started, or nobody says so any more
LOOK_AGAIN_S = 1.0


@dataclass(slots=True)
class _Node:
    since_s: dict[str, float] = field(default_factory=dict)  # by uid, the oldest first
    started_s: deque[float] = field(default_factory=deque)  # when the last ones were let start

    def is_crowded(self, now_s: float) -> bool:
        while self.started_s and self.started_s[0] < now_s - RECENTLY_S:
            self.started_s.popleft()
        return len(self.since_s) >= max(LEAST, len(self.started_s))


class Unconfirmed:
    """By node, the pods that are on their way there."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._node_of: dict[str, str] = {}  # by uid
        self._crowded: set[str] = set()
        self._look_again_s = -inf

    def put(self, uid: str, node: str, since_s: float, now_s: float) -> None:
        """A pod is sent there; known pods stay as they are."""
        if since_s > now_s - LOST_AFTER_S and self._node_of.setdefault(uid, node) == node:
            self._nodes.setdefault(node, _Node()).since_s.setdefault(uid, since_s)
            self._judge(node, now_s)

    def drop(self, uid: str, now_s: float, *, started: bool = False) -> None:
        """The pod is not on its way any more. `started`: kubelet has given it its devices."""
        name = self._node_of.pop(uid, "")
        if (node := self._nodes.get(name)) is not None:
            node.since_s.pop(uid, None)
            if started:
                node.started_s.append(now_s)
            self._judge(name, now_s)

    def crowded(self, now_s: float) -> Collection[str]:
        """The nodes that have as many on their way as they should: as a rule none."""
        if self._crowded and now_s >= self._look_again_s:
            self._look_again_s = now_s + LOOK_AGAIN_S
            for name in tuple(self._crowded):
                self._judge(name, now_s)
        return self._crowded

    def remove_node(self, name: str) -> None:
        for uid in self._nodes.pop(name, _Node()).since_s:
            del self._node_of[uid]
        self._crowded.discard(name)

    def _judge(self, name: str, now_s: float) -> None:
        node = self._nodes[name]
        while node.since_s and node.since_s[uid := next(iter(node.since_s))] < now_s - LOST_AFTER_S:
            del node.since_s[uid], self._node_of[uid]
        if node.is_crowded(now_s):
            self._crowded.add(name)
        else:
            self._crowded.discard(name)
            if not node.since_s and not node.started_s:
                del self._nodes[name]
