"""The waiting pods, in the order in which kube-scheduler takes them up.

By priority, then by arrival. But a kube-scheduler that has just started finds all of them at once and takes
them by namespace and name, which is recognized from the order in which it takes them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from gpuslice.adapters.kube.terms import Terms
from gpuslice.core.model import Pod
from gpuslice.core.policy.fleet import Flags, Fleet, Ints

OF_LAST, SURPRISES = 16, 4  # so many of the last pods out of order mean another order

Rank = tuple[int, int, int, str]
"""The sort key of pods: priority, how often the order was reset, and the arrival or the name."""


@dataclass(frozen=True, slots=True)
class _Pending:
    terms: Terms
    rank: Rank
    version: int  # of the pod when it was first seen; lower for those that came first
    key: str


@dataclass(slots=True)
class PendingQueue:
    """Pods by their terms: those that wait, and nominated ones that kube-scheduler has not taken up yet."""

    _waiting: dict[str, _Pending] = field(default_factory=dict)  # by uid
    _nominated: dict[str, _Pending] = field(default_factory=dict)
    _heaps: dict[Terms, list[tuple[Rank, str]]] = field(default_factory=dict)
    _orders: int = 0
    _last: dict[int, Rank] = field(default_factory=dict)  # by priority
    _taken: int = 0
    _surprises: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, pod: Pod, terms: Terms) -> None:
        """Add a new pod, the last of its priority."""
        rank = (-pod.priority, self._orders, pod.version, "")
        self._push(pod.uid, _Pending(terms, rank, pod.version, pod.key))

    def nominate(self, uid: str) -> None:
        """The pod waits no longer: it has a node before kube-scheduler takes it up."""
        self._nominated[uid] = self._waiting.pop(uid)

    def drop(self, uid: str) -> None:
        """The pod is gone; unknown pods are ignored."""
        self._waiting.pop(uid, None)
        self._nominated.pop(uid, None)

    def take(self, uid: str) -> None:
        """kube-scheduler has taken up this pod: the first one, if the order is right. May be repeated."""
        taken = self._waiting.pop(uid, None) or self._nominated.pop(uid, None)
        if taken is None:
            return
        priority = taken.rank[0]
        self._surprises += taken.rank < self._last.get(priority, taken.rank)
        self._last[priority] = taken.rank
        self._taken += 1
        if self._taken < OF_LAST:
            return
        if self._surprises >= SURPRISES:
            # all pods that are here now precede later ones; among them the other order holds from now on
            by_name = taken.rank[-1] == ""
            self._orders += 1
            self._heaps.clear()
            self._last.clear()
            for waiting, one in tuple(self._waiting.items()):
                self._push(waiting, self._in_order(one, by_name))
            self._nominated = {
                nominated: self._in_order(one, by_name) for nominated, one in self._nominated.items()
            }
            self._orders += 1
        self._taken = self._surprises = 0

    def firsts(self) -> Iterator[tuple[Rank, str, Terms]]:
        """The first pod with each set of terms: its rank, uid and terms."""
        for terms in tuple(self._heaps):
            heap = self._heaps[terms]
            while heap:
                rank, uid = heap[0]
                waiting = self._waiting.get(uid)
                if waiting is not None and waiting.rank == rank:
                    yield rank, uid, terms
                    break
                heapq.heappop(heap)
            else:
                del self._heaps[terms]

    def _push(self, uid: str, pending: _Pending) -> None:
        self._waiting[uid] = pending
        heapq.heappush(self._heaps.setdefault(pending.terms, []), (pending.rank, uid))

    def _in_order(self, one: _Pending, by_name: bool) -> _Pending:
        order = (0, one.key) if by_name else (one.version, "")
        return replace(one, rank=(one.rank[0], self._orders, *order))


LASTS_S = 10.0
"""Nodes start and stop being feasible; one question in ten seconds follows that at no cost."""
MISSES, OF_TRIED = 8, 64
LATE, LATE_PAUSE_S = 32, 2.0  # in a row: the first nominations for a new queue are always late
PAUSE_S = 60.0  # after so many nominations in vain something that we cannot see prevents them


@dataclass(slots=True)
class FeasibleNodes:
    """The rows on which pods of some terms may run, and the results of nominations to them.

    kube-scheduler asks an extender only about the nodes that its own filters let pass. What it asked for one
    pod holds for a while for others with the same terms, except for CPU and memory, which the ledger knows.
    An error costs a question about one node: kube-scheduler then asks about all.
    """

    fleet: Fleet
    rows: Flags = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    searched: int = 0  # how many nodes the last question was about
    _version: tuple[int, int] = (-1, -1)
    _since_s: float = -LASTS_S
    _paused_until_s: float = 0.0
    _tried: int = 0
    _missed: int = 0
    _late: int = 0

    def learn(self, rows: Ints, now_s: float) -> None:
        """kube-scheduler asked about these rows; negative ones are not our nodes."""
        version = self.fleet.nodes_version
        if version != self._version or now_s >= self._since_s + LASTS_S:
            self.rows = np.zeros(self.fleet.rows, dtype=np.bool_)
            self._version, self._since_s = version, now_s
        self.rows[rows[rows >= 0]] = True
        self.searched = len(rows)

    def is_known(self, now_s: float) -> bool:
        """Whether what was learned is still valid and useful."""
        fresh = self._version == self.fleet.nodes_version and now_s < self._since_s + LASTS_S
        return fresh and now_s >= self._paused_until_s

    def note_nominated(self) -> None:
        """A pod was nominated to one of these nodes."""
        self._tried += 1
        if self._tried > OF_TRIED:
            self._tried = self._missed = 0

    def note_taken(self) -> None:
        """kube-scheduler tried a pod on the node that it was nominated to."""
        self._late = 0

    def note_late(self, now_s: float) -> None:
        """The nomination came after kube-scheduler had begun its search: useless, if that is frequent."""
        self._late += 1
        if self._late >= LATE:
            self._paused_until_s, self._late = now_s + LATE_PAUSE_S, 0

    def note_missed(self, row: int, now_s: float) -> bool:
        """The nominated node did not do; `row` is negative if it is gone. True if a pause begins."""
        if 0 <= row < len(self.rows):
            self.rows[row] = False
        self._missed += 1
        if self._missed < MISSES:
            return False
        self._paused_until_s = now_s + PAUSE_S
        self._tried = self._missed = 0
        return True
