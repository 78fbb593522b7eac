"""The pods that wait, in the order in which kube-scheduler takes them up.

By priority, then as they came. A kube-scheduler that has just started found them all at once, by namespace
and name, which shows when it takes one from far behind.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuslice.adapters.kube.terms import Terms
from gpuslice.core.model import Pod

SURPRISES = 3  # in a row, before another order is believed in

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
    """Pods by their terms. `far`: how many may be before a pod that is taken up without a surprise."""

    far: int
    _waiting: dict[str, _Waiting] = field(default_factory=dict)  # by uid
    _heaps: dict[Terms, list[tuple[Turn, str]]] = field(default_factory=dict)
    _orders: int = 0
    _surprises: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, uid: str) -> bool:
        return uid in self._waiting

    def put(self, pod: Pod, terms: Terms) -> None:
        """Someone new; the last of its priority."""
        turn = (-pod.priority, self._orders, pod.version, "")
        self._push(pod.uid, _Waiting(terms, turn, pod.version, pod.key))

    def drop(self, uid: str) -> None:
        """It waits no more; an unknown one is fine."""
        self._waiting.pop(uid, None)

    def take(self, uid: str) -> None:
        """kube-scheduler has taken up this one, if it waits: the first, if we know its order."""
        taken = self._waiting.pop(uid, None)
        if taken is None or len(self) <= self.far:
            return
        before = sum(other.turn < taken.turn for other in self._waiting.values())
        self._surprises = self._surprises + 1 if before > self.far else 0
        if self._surprises == SURPRISES:
            self._reorder(by_name=taken.turn[-1] == "")

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
        """All that wait now are before all that come; among them, the other order than before holds."""
        self._orders += 1
        self._surprises = 0
        self._heaps.clear()
        for uid, one in tuple(self._waiting.items()):
            order = (0, one.key) if by_name else (one.version, "")
            self._push(uid, _Waiting(one.terms, (one.turn[0], self._orders, *order), one.version, one.key))
        self._orders += 1
