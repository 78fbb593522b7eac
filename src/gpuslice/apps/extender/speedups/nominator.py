"""Nominates nodes for pods that wait in a queue, so that kube-scheduler need not search all nodes.

kube-scheduler tries a pod's ``status.nominatedNodeName`` first: its own filters and ours for this one node.
If both let it pass, it takes that node without scoring any; otherwise it continues with all nodes as usual.
For a pod without preferences it would find the node that the policy ranks first, and for a replica the one
that suits it best next to others of its kind (`replicas`), so only the search is saved.

    a question about all nodes ──► these nodes suit pods with the same terms (`FeasibleNodes`)
        ──► the next such pod in the queue: choose node and cards as bind would (`placer`)
        ──► hold them (`Ledger.nominate`), PATCH the nomination
        ──► kube-scheduler asks about this one node: yes ──► bind

A nomination is an additional write, which costs an API server twice as much as a Binding. It pays where a
search covers so many nodes that it costs more. A nomination is no promise: it gives way to a pod without
other room, and a nomination in vain costs one look at one node. Nobody is nominated where room is scarce,
since a nomination counts in kube-scheduler's sums for later pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf

from gpuslice.adapters.clock import loop_time
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.followed_pod import PodNews
from gpuslice.adapters.kube.slim import SLIM_PODS
from gpuslice.adapters.kube.terms import Terms
from gpuslice.adapters.kube.views import pod_view
from gpuslice.adapters.wire.names import UNKNOWN
from gpuslice.apps.extender.placer import Placer
from gpuslice.apps.extender.speedups.pending_queue import FeasibleNodes, PendingQueue
from gpuslice.apps.extender.subscriber import Shortcuts
from gpuslice.core.hold import Hold
from gpuslice.core.model import Placement, Pod
from gpuslice.core.policy.fleet import Rows

_log = logging.getLogger(__name__)

READY = 24  # nominations written before kube-scheduler goes on, since its watch lags behind
PATIENCE_S = 0.25  # the longest wait for them
SWEEP_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class NominationLimits:
    """How much is nominated. `room` nodes must fit the pod, and `spare` times as many as are held already."""

    holds: int = 128  # more than kube-scheduler takes up during one request
    at_once: int = 16  # requests
    room: int = 100
    spare: int = 2
    over_s: float = 5.0  # after a search: by then the pod is bound, or will not be soon
    kept_s: float = 15.0  # if kube-scheduler has not asked by then, it does not want the pod at present


LIMITS = NominationLimits()


@dataclass(slots=True)
class _Waiting:
    """A waiting pod. `node`: held or nominated for it, since when, and since when it is written."""

    terms: Terms
    node: str = ""
    since_s: float = 0.0
    written_s: float = inf
    over: bool = False


class Nominator(Shortcuts):
    """Nominates for one cluster while this replica leads, if a search covers at least `search` nodes.

    Never if `search` is 0. `client` writes only as leader.
    """

    def __init__(
        self,
        client: KubeClient,
        placer: Placer,
        *,
        search: int = 1,
        limits: NominationLimits = LIMITS,
        clock: Callable[[], float] = loop_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__()
        self._client = client
        self._placer = placer
        self._ledger = placer.ledger
        self._search = search
        self._limits = limits
        self._clock = clock
        self._sleep = sleep
        self._waiting: dict[str, _Waiting] = {}  # by uid
        self._queue = PendingQueue()
        self._feasible: dict[Terms, FeasibleNodes] = {}
        self._writes: dict[str, asyncio.Future[None]] = {}  # by uid
        self._ready: set[str] = set()  # nominated and not taken up yet
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()

    # -- what is heard -------------------------------------------------------------------------------------

    def pod_changed(self, news: PodNews, before: Hold | None) -> None:
        pod, terms = news.view, news.terms if news.has_only_terms else None  # else it must not be nominated
        now, waiting = self._ledger.pods.get(pod.uid), self._waiting.get(pod.uid)
        if not news.waits:
            self.pod_gone(pod.uid, before)
        elif now is None or now.version > pod.version:
            return
        elif terms is None or pod.terminating:
            self.pod_gone(pod.uid, before)
        elif waiting is not None:
            if not pod.nominated and waiting.written_s < inf:
                self._end(pod.uid, waiting)  # kube-scheduler has removed the nomination
        elif not pod.nominated:
            self._waiting[pod.uid] = _Waiting(terms)
            self._queue.put(pod, terms)
            self._wake.set()

    def terms_of(self, uid: str) -> Terms | None:
        """The terms of a waiting pod; None if it must not be nominated."""
        waiting = self._waiting.get(uid)
        return waiting.terms if waiting is not None else None

    def pod_gone(self, uid: str, before: Hold | None) -> None:
        """It waits no longer."""
        waiting = self._waiting.pop(uid, None)
        self._queue.drop(uid)
        self._ready.discard(uid)
        if waiting is not None and waiting.node and self._ledger.holds.tentative(uid):
            self._ledger.forget(uid)

    def asked(self, uid: str, rows: Rows) -> None:
        """kube-scheduler asks whether the pod fits on its nominated node, or on all feasible ones."""
        self._queue.take(uid)
        waiting = self._waiting.get(uid)
        if waiting is not None:
            feasible = self._feasible.setdefault(waiting.terms, FeasibleNodes(self._ledger.fleet))
            if len(rows) > 1:  # all nodes: an earlier nomination came too late or was in vain
                feasible.learn(rows, self._clock())
                if waiting.node and not waiting.over:
                    self._note_useless(waiting, feasible, rows, written=uid in self._writes)
                    self._end(uid, waiting)
            elif waiting.node and not waiting.over:
                self.results["used"] += 1
                feasible.note_taken()
        self._ready.discard(uid)
        self._wake.set()

    def _note_useless(self, waiting: _Waiting, feasible: FeasibleNodes, rows: Rows, *, written: bool) -> None:
        if not written and waiting.written_s == inf:
            return
        row = self._ledger.fleet.row_of.get(waiting.node, UNKNOWN)
        if row in rows:  # feasible, but kube-scheduler had not seen the nomination yet
            self.results["late"] += 1
            feasible.note_late(self._clock())
            return
        self.results["missed"] += 1
        if feasible.note_missed(row, self._clock()):
            _log.info("nominations paused", extra={"node": waiting.node, **self.results})

    def passes_one(self, uid: str) -> bool:
        """While others wait behind the pod: scoring several nodes costs as much as all else that is done for
        it, and what is held for the others should not depend on which of the nodes it takes."""
        return uid in self._waiting and self.leads and self._next() is not None

    def stopped_leading(self) -> None:
        """This replica must not hold anything."""
        super().stopped_leading()
        for uid, waiting in self._waiting.items():
            if waiting.node:
                self._end(uid, waiting)
                waiting.node = ""

    def backpressure(self) -> Awaitable[None] | None:
        """Wait a moment until the next pods are nominated: kube-scheduler takes one up after our answer."""
        if len(self._ready) >= READY or not self._nominates():
            return None

        async def nominations_written() -> None:
            await asyncio.sleep(0)  # let `run` begin what was just requested
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    while self._writes and len(self._ready) < READY:
                        self._progress.clear()
                        await self._progress.wait()

        return nominations_written()

    async def written(self, uid: str) -> None:
        """Wait until no request of ours for this pod is in flight."""
        while (write := self._writes.get(uid)) is not None:
            await asyncio.wait([write])

    def _end(self, uid: str, waiting: _Waiting) -> None:
        """Drop what is held for the pod; its status may still name the node."""
        if self._ledger.holds.tentative(uid):
            self._ledger.forget(uid)
        self._ledger.withdrawn[uid] = waiting.node
        self._ready.discard(uid)
        waiting.over = True

    # -- what is done --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Nominate the next pods in the queue after each question, until cancelled."""

        async def sweep_for_ever() -> None:
            while True:
                await self._sleep(SWEEP_EVERY_S)
                await self.sweep()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sweep_for_ever(), name="sweep nominations")
            while True:
                await self._wake.wait()
                self._wake.clear()
                while len(self._writes) < self._limits.at_once and (chosen := self._choose()):
                    pod, placement = chosen
                    self._writes[pod.uid] = asyncio.get_running_loop().create_future()
                    tasks.create_task(self._nominate(pod, placement), name=f"nominate {pod.key}")

    def _choose(self) -> tuple[Pod, Placement] | None:
        """The next pod in the queue, with node and cards held for it from now on."""
        if not self._nominates() or self._ledger.holds.tentative_count >= self._limits.holds:
            return None
        while (first := self._next()) is not None:
            uid, terms = first
            pod = self._ledger.pods.get(uid)
            if pod is None or pod.node or pod.nominated or self._ledger.holds.of(uid) is not None:
                self._queue.drop(uid)
                continue
            if uid in self._ledger.holds.reserved:  # others were evicted for it
                self._queue.drop(uid)
                continue
            feasible = self._feasible[terms]
            least_room = max(self._limits.room, self._limits.spare * self._ledger.holds.tentative_count)
            placement = self._placer.choose_node(pod, feasible.rows, least_room)
            if (
                placement is None
                or self._ledger.nominate(pod, placement, self._clock() + self._limits.kept_s) is not None
            ):
                return None  # kube-scheduler searches for this one; the next pod is tried after that
            self._queue.nominate(uid)
            waiting = self._waiting[uid]
            waiting.node, waiting.since_s = placement.node, self._clock()
            feasible.note_nominated()
            return pod, placement
        return None

    def _nominates(self) -> bool:
        """Whether to nominate the next pod in the queue: whether that costs less than a search."""
        if self._writes:
            return True
        first = self._next() if self._search and self.leads else None
        return first is not None and self._feasible[first[1]].searched >= self._search

    def _next(self) -> tuple[str, Terms] | None:
        """The next pod in the queue for which the feasible nodes are known."""
        now = self._clock()
        known = {terms for terms, feasible in self._feasible.items() if feasible.is_known(now)}
        firsts = (each for each in self._queue.firsts() if each[-1] in known)
        first = min(firsts, default=None, key=lambda each: each[:2])
        return first[1:] if first is not None else None

    async def _nominate(self, pod: Pod, placement: Placement) -> None:
        """The pod may leave before this begins and while it is written."""
        try:
            waiting = self._waiting.get(pod.uid)
            if waiting is None:
                return
            if not await self._write(pod, placement.node):
                self._end(pod.uid, waiting)
                return
            waiting.written_s = self._clock()
            if not waiting.over and pod.uid in self._waiting:
                self._ready.add(pod.uid)
        finally:
            self._writes.pop(pod.uid).set_result(None)
            self._progress.set()
            self._wake.set()

    async def sweep(self) -> None:
        """Take back nominations that came to nothing."""
        for uid, waiting in tuple(self._waiting.items()):
            patience_s = self._limits.over_s if waiting.over else self._limits.kept_s
            if not waiting.node or self._clock() - waiting.since_s <= patience_s:
                continue
            node, pod, hold = waiting.node, self._ledger.pods.get(uid), self._ledger.holds.of(uid)
            if hold is not None and not hold.kind.is_tentative:
                continue  # it is being bound
            self._end(uid, waiting)
            waiting.node, waiting.written_s = "", inf
            if pod is not None and not pod.node and pod.nominated == node and uid not in self._writes:
                self.results["withdrawn"] += 1
                await self._write(pod, None)
        used = {waiting.terms for waiting in self._waiting.values()}
        self._feasible = {terms: feasible for terms, feasible in self._feasible.items() if terms in used}

    async def _write(self, pod: Pod, node: str | None) -> bool:
        """Nominate `node`, or none; whether the pod shows that now. Only a hint, which assigns no cards."""
        try:
            seen = await self._client.merge_patch(
                SLIM_PODS,
                pod.name,
                {"status": {"nominatedNodeName": node}},
                pod.namespace,
                uid=pod.uid,
                resource_version=pod.resource_version,
                subresource="status",
            )
        except NotFoundError:
            return False
        except KubeError as error:
            _log.info("not nominated", extra={"pod": pod.key, "error": str(error)})
            return False
        self._ledger.apply_pod(pod_view(seen))
        return True
