"""Names the node ahead for pods that wait in a queue, so that kube-scheduler need not look at all nodes.

kube-scheduler tries a pod's ``status.nominatedNodeName`` first and alone: its own filters and ours for one
node. Where both say yes it takes that node without scoring any; else it goes on with all nodes as ever. For a
pod that prefers no node, it would find the one that the policy ranks first, for a replica the one that is
best beside others of its kind (`replicas`): only the search is saved.

    a question about all nodes ──► those suit pods with the same terms (`grounds`)
        ──► the next such pod of the queue: choose node and cards as bind would (`ahead`)
        ──► hold them (`Ledger.plan`), PATCH annotations and nomination in one write (`nominator`)
        ──► kube-scheduler asks about that node alone: yes ──► bind, which finds the pod annotated already

So a guided pod costs as many writes as another. A plan is no promise: it makes way for whoever finds no other
room, and a nomination in vain costs one look at one node. Nobody is nominated where room is scarce, since a
nomination counts in kube-scheduler's sums for pods that come later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf

import numpy as np

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.terms import Terms
from gpuslice.adapters.wire.names import UNKNOWN
from gpuslice.apps.extender.ahead import Ahead
from gpuslice.apps.extender.asked import Asked
from gpuslice.apps.extender.decisions import Decisions
from gpuslice.apps.extender.grounds import Ground
from gpuslice.apps.extender.keeping import Keeping, loop_time
from gpuslice.apps.extender.line import Line
from gpuslice.apps.extender.nominator import Nominator
from gpuslice.core.model import Placement, Pod

_log = logging.getLogger(__name__)

READY = 24  # nominations written before kube-scheduler goes on: its watch is behind what we know
PATIENCE_S = 0.25  # or so long
SWEEP_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class GuideLimits:
    """How much is nominated. `room` nodes must fit the pod, and `spare` times as many as there are plans."""

    ahead: int = 128  # plans: more than kube-scheduler takes up while one request is under way
    at_once: int = 16  # requests
    room: int = 100
    spare: int = 2
    over_s: float = 5.0  # after a search: by then the pod is bound, or will not be soon
    kept_s: float = 15.0  # kube-scheduler has not asked: it does not want the pod at present


LIMITS = GuideLimits()


@dataclass(slots=True)
class _Known:
    """A pod that waits. `node`: planned or nominated for it, since when, and since when it is written."""

    terms: Terms
    node: str = ""
    since_s: float = 0.0
    written_s: float = inf
    over: bool = False


class Guide:
    """Nominates for one cluster. `leading` is asked before each write."""

    def __init__(
        self,
        client: KubeClient,
        decisions: Decisions,
        keeping: Keeping,
        *,
        leading: Callable[[], bool] = lambda: True,
        enabled: bool = True,
        limits: GuideLimits = LIMITS,
        clock: Callable[[], float] = loop_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.results: Counter[str] = Counter()
        self._ahead = Ahead(decisions, limits.room, limits.spare)
        self._nominator = Nominator(client, decisions.ledger, leading, now_ns)
        self._ledger = decisions.ledger
        self._keeping = keeping
        self._leading = leading
        self._enabled = enabled
        self._limits = limits
        self._clock = clock
        self._sleep = sleep
        self._known: dict[str, _Known] = {}  # by uid
        self._line = Line()
        self._grounds: dict[Terms, Ground] = {}
        self._writes: dict[str, asyncio.Future[None]] = {}  # by uid
        self._ready: set[str] = set()  # nominated, and not taken up yet
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()

    # -- what is heard -------------------------------------------------------------------------------------

    def waits(self, pod: Pod, terms: Terms | None) -> None:
        """A pod without a node, as the API server showed it; `terms` None when it is not to be guided."""
        now = self._ledger.pods.get(pod.uid)
        if not self._enabled or now is None or now.version > pod.version:
            return
        known = self._known.get(pod.uid)
        if terms is None or pod.terminating or pod.request is None:
            self.left(pod.uid)
        elif known is None:
            self._queue(pod, terms)
        elif not pod.nominated and known.written_s < inf:
            self._end(pod.uid, known)  # kube-scheduler took the nomination back

    def left(self, uid: str) -> None:
        """A pod has a node, or is gone."""
        known = self._known.pop(uid, None)
        self._line.drop(uid)
        self._ready.discard(uid)
        if known is not None and known.node and self._ledger.planned(uid):
            self._ledger.forget(uid)

    def asked(self, uid: str, asked: Asked) -> None:
        """kube-scheduler asks where the pod fits: on its nominated node, or on all that would do."""
        if not self._enabled:
            return
        self._line.take(uid)
        if len(asked.rows) > 1:
            self._note_search(uid, asked)
        elif (known := self._known.get(uid)) is not None and known.node and not known.over:
            self.results["guided"] += 1
            self._ground(known.terms).reached()
        self._ready.discard(uid)
        self._wake.set()

    def hold(self, uid: str, asked: Asked) -> Placement | None:
        """The best node for a pod that kube-scheduler looks at all nodes for, held from now on.

        While others wait behind it: what is planned for them should not depend on which one it takes.
        """
        known, pod = self._known.get(uid), self._ledger.pods.get(uid)
        if known is None or pod is None or pod.node or not self._leading() or self._next() is None:
            return None
        open_rows = np.zeros(self._ledger.fleet.rows, dtype=np.bool_)
        open_rows[asked.rows[asked.rows >= 0]] = True
        placement = self._ahead.choose(pod, open_rows)
        if placement is None or self._ledger.plan(pod, placement) is not None:
            return None
        known.node, known.since_s, known.written_s, known.over = placement.node, self._clock(), inf, False
        return placement

    def retire(self) -> None:
        """We are not the leader any more: nothing is planned by us."""
        for uid, known in self._known.items():
            if known.node:
                self._end(uid, known)
                known.node = ""

    def keep_pace(self) -> Awaitable[None] | None:
        """Until the next pods are nominated, for a moment: kube-scheduler takes one up after our answer."""
        if len(self._ready) >= READY or not (self._line or self._writes):
            return None
        return self._nominations_written()

    async def _nominations_written(self) -> None:
        await asyncio.sleep(0)  # `run` begins what was asked for just now
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while self._writes and len(self._ready) < READY:
                    self._progress.clear()
                    await self._progress.wait()

    async def written(self, uid: str) -> None:
        """Until no request of ours for this pod is under way."""
        while (write := self._writes.get(uid)) is not None:
            await asyncio.wait([write])

    def _queue(self, pod: Pod, terms: Terms) -> None:
        if pod.nominated or pod.placement is not None:
            return
        self._known[pod.uid] = _Known(terms)
        self._line.put(pod, terms)
        self._wake.set()

    def _note_search(self, uid: str, asked: Asked) -> None:
        known = self._known.get(uid)
        if known is None:
            return
        now = self._clock()
        ground = self._ground(known.terms)
        ground.shown(asked.rows, now)
        if known.node and not known.over:
            if known.written_s < inf or uid in self._writes:
                self._note_search_in_vain(known, ground, asked, now)
            self._end(uid, known)

    def _note_search_in_vain(self, known: _Known, ground: Ground, asked: Asked, now: float) -> None:
        """Where kube-scheduler would take the node, it had taken up the pod before it saw the nomination."""
        row = self._ledger.fleet.row_of.get(known.node, UNKNOWN)
        if row in asked.rows:
            self.results["late"] += 1
            ground.late(now)
            return
        self.results["missed"] += 1
        if ground.missed(row, now):
            _log.info("nominations paused", extra={"node": known.node, "results": dict(self.results)})

    def _end(self, uid: str, known: _Known) -> None:
        """What was planned for the pod is no more; its status may still name the node."""
        if self._ledger.planned(uid):
            self._ledger.forget(uid)
        self._keeping.disown(uid, known.node)
        self._ready.discard(uid)
        known.over = True

    def _ground(self, terms: Terms) -> Ground:
        return self._grounds.setdefault(terms, Ground(self._ledger.fleet))

    # -- what is done --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Nominate for those next in the queue whenever something was asked, until cancelled."""
        if not self._enabled:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sweep_for_ever(), name="sweep nominations")
            while True:
                await self._wake.wait()
                self._wake.clear()
                while len(self._writes) < self._limits.at_once and (chosen := self._choose()):
                    pod, placement = chosen
                    self._writes[pod.uid] = asyncio.get_running_loop().create_future()
                    tasks.create_task(self._nominate(pod, placement), name=f"nominate {pod.key}")

    def _choose(self) -> tuple[Pod, Placement] | None:
        """The next pod of the queue, with node and cards that are held for it from now on."""
        if not self._leading() or self._ledger.plans >= self._limits.ahead:
            return None
        while (first := self._next()) is not None:
            uid, terms = first
            pod = self._ledger.pods.get(uid)
            if pod is None or pod.node or pod.nominated or self._ledger.allocation(uid) is not None:
                self._line.drop(uid)
                continue
            placement = self._ahead.choose(pod, self._grounds[terms].open)
            if placement is None or self._ledger.plan(pod, placement) is not None:
                return None  # kube-scheduler searches for this one, and then the next is looked at
            self._line.call(uid)
            known = self._known[uid]
            known.node, known.since_s = placement.node, self._clock()
            self._grounds[terms].tried()
            return pod, placement
        return None

    def _next(self) -> tuple[str, Terms] | None:
        """The very next pod of those for which it is known where they may go."""
        now = self._clock()
        firsts = (each for each in self._line.firsts() if self._is_open(each[-1], now))
        first = min(firsts, default=None, key=lambda each: each[:2])
        return first[1:] if first is not None else None

    def _is_open(self, terms: Terms, now: float) -> bool:
        ground = self._grounds.get(terms)
        return ground is not None and ground.is_known(now)

    # -- writing -------------------------------------------------------------------------------------------

    async def _nominate(self, pod: Pod, placement: Placement) -> None:
        known = self._known[pod.uid]
        try:
            if await self._nominator.nominate(pod, placement):
                known.written_s = self._clock()
                if not known.over:
                    self._ready.add(pod.uid)
            else:
                self._end(pod.uid, known)
        finally:
            self._writes.pop(pod.uid).set_result(None)
            self._progress.set()
            self._wake.set()

    async def _sweep_for_ever(self) -> None:
        while True:
            await self._sleep(SWEEP_EVERY_S)
            await self.sweep()

    async def sweep(self) -> None:
        """Take back what came to nothing."""
        for uid, known in tuple(self._known.items()):
            if known.node and self._is_stale(known):
                await self._take_back(uid, known)
        self._forget_unused()

    def _is_stale(self, known: _Known) -> bool:
        age_s = self._clock() - known.since_s
        return age_s > (self._limits.over_s if known.over else self._limits.kept_s)

    async def _take_back(self, uid: str, known: _Known) -> None:
        node, pod, allocation = known.node, self._ledger.pods.get(uid), self._ledger.allocation(uid)
        if allocation is not None and not allocation.planned:
            return  # it is being bound
        self._end(uid, known)
        known.node, known.written_s = "", inf
        if pod is not None and not pod.node and pod.placement is not None and uid not in self._writes:
            self.results["taken back"] += 1
            await self._nominator.take_back(pod, node)

    def _forget_unused(self) -> None:
        used = {known.terms for known in self._known.values()}
        self._grounds = {terms: ground for terms, ground in self._grounds.items() if terms in used}
