"""The pods that wait, in the order in which kube-scheduler takes them up.

By priority, then as they came. A kube-scheduler that has just started found them all at once, by namespace
and name, which shows in the order in which it takes them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gpuslice.adapters.kube.terms import Terms
from gpuslice.core.model import Pod

OF_LAST, SURPRISES = 16, 4  # so many of them taken after one that comes later: another order is believed in

Turn = tuple[int, int, int, str]
"""What pods are ordered by: priority, how often all was ordered anew, and when it came or its name."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    terms: Terms
    turn: Turn
    version: int  # of the pod when it was first seen: who came first has the lower
    key: str


@dataclass(slots=True)
class Line:
    """Pods by their terms: those that wait, and those called ahead that kube-scheduler has not taken yet."""

    _waiting: dict[str, _Waiting] = field(default_factory=dict)  # by uid
    _called: dict[str, _Waiting] = field(default_factory=dict)
    _heaps: dict[Terms, list[tuple[Turn, str]]] = field(default_factory=dict)
    _orders: int = 0
    _last: dict[int, Turn] = field(default_factory=dict)  # by priority
    _taken: int = 0
    _surprises: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, pod: Pod, terms: Terms) -> None:
        """Someone new; the last of its priority."""
        turn = (-pod.priority, self._orders, pod.version, "")
        self._push(pod.uid, _Waiting(terms, turn, pod.version, pod.key))

    def call(self, uid: str) -> None:
        """It need not wait any more: what it waited for is there before its turn."""
        self._called[uid] = self._waiting.pop(uid)

    def drop(self, uid: str) -> None:
        """It is gone; an unknown one is fine."""
        self._waiting.pop(uid, None)
        self._called.pop(uid, None)

    def take(self, uid: str) -> None:
        """kube-scheduler has taken up this one: the first, if we know its order. Again is no news."""
        taken = self._waiting.pop(uid, None) or self._called.pop(uid, None)
        if taken is None:
            return
        priority = taken.turn[0]
        self._surprises += taken.turn < self._last.get(priority, taken.turn)
        self._last[priority] = taken.turn
        self._taken += 1
        if self._taken == OF_LAST:
            if self._surprises >= SURPRISES:
                self._reorder(by_name=taken.turn[-1] == "")
            self._taken = self._surprises = 0

    def firsts(self) -> Iterator[tuple[Turn, str, Terms]]:
        """The first pod of each kind: its turn, uid and terms."""
        for terms in tuple(self._heaps):
            heap = self._heaps[terms]
            while heap and not self._is_valid(*heap[0]):
                heapq.heappop(heap)
            if heap:
                yield *heap[0], terms
            else:
                del self._heaps[terms]

    def _is_valid(self, turn: Turn, uid: str) -> bool:
        waiting = self._waiting.get(uid)
        return waiting is not None and waiting.turn == turn

    def _push(self, uid: str, waiting: _Waiting) -> None:
        self._waiting[uid] = waiting
        heapq.heappush(self._heaps.setdefault(waiting.terms, []), (waiting.turn, uid))

    def _reorder(self, *, by_name: bool) -> None:
        """All that are here now are before all that come; among them, the other order than before holds."""
        self._orders += 1
        self._heaps.clear()
        self._last.clear()
        for uid, one in tuple(self._waiting.items()):
            self._push(uid, self._in_order(one, by_name))
        self._called = {uid: self._in_order(one, by_name) for uid, one in self._called.items()}
        self._orders += 1

    def _in_order(self, one: _Waiting, by_name: bool) -> _Waiting:
        order = (0, one.key) if by_name else (one.version, "")
        return replace(one, turn=(one.turn[0], self._orders, *order))
