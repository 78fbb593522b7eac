"""Makes room on a card for a pod of high priority if kube-scheduler thinks that the node has enough room.

Before kube-scheduler evicts, it checks, without asking an extender, whether the pod fits once all pods of
lower priority are gone, and then keeps those pods without whose eviction it fits as well. Where a node's
*sum* of GPU memory suffices and no single card does, it keeps all of them: nobody is evicted, and the pod
waits for ever. This does the missing part in the way that kube-scheduler would:

    refused on every node ──► a moment later, still without a nomination by kube-scheduler
        ──► choose node, cards and victims ──► keep the cards (`reserver`), evict (`evictor`)
        ──► when the victims are gone, kube-scheduler tries the nominated node first

kube-scheduler asks about the nodes that its own filters let pass. On those nodes only the cards are in the
pod's way, and kube-scheduler finds no victims there. If it finds some elsewhere, it asks us whom to evict,
and we stay out of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gpuslice.adapters.clock import loop_time
from gpuslice.adapters.kube.budgets import read_budgets
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import ForbiddenError, KubeError, NotFoundError
from gpuslice.adapters.kube.resources import PODS
from gpuslice.apps.extender.preemption.evictor import Evictor, Reserver
from gpuslice.apps.extender.subscriber import FilterVerdict, Subscriber
from gpuslice.core.ledger import NOBODY_IN_PARTICULAR, Ledger
from gpuslice.core.model import Pod, Request
from gpuslice.core.placement import Fit
from gpuslice.core.preemption import LOWEST, Budget, Eviction, eviction

_log = logging.getLogger(__name__)

PATIENCE_S = 1.0  # after the refusal: a busy kube-scheduler needs some time to ask whom to evict, if it asks
TICK_S = 0.1
WAITING = 100  # refused pods remembered with their nodes; beyond that the least important are dropped
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0  # until a pod for which no eviction helps is examined again
REST = 4.0  # times the duration of a search, before the next one: requests come first
LEAST_CANDIDATES, CANDIDATES_PART = 100, 0.1  # if so many nodes would do, no more are looked at; as upstream
SLICE = 20  # nodes examined before other requests get their turn


NOTHING = Request(0)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A pod that was refused, on which rows of the fleet as of `version`."""

    uid: str
    rows: npt.NDArray[np.int32]
    version: int
    due_s: float
    priority: int = LOWEST  # this and the request as the API server shows them, set when the pod's turn comes
    request: Request = NOTHING


@dataclass(slots=True)
class _Pause:
    until_s: float
    length_s: float


class Preemptor(Subscriber):
    """Preempts for one pod at a time, while this replica leads."""

    def __init__(
        self,
        client: KubeClient,
        ledger: Ledger,
        reserver: Reserver,
        evictor: Evictor,
        *,
        clock: Callable[[], float] = loop_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        enabled: bool = True,
    ) -> None:
        self.results: Counter[str] = Counter()
        self.evictor = evictor
        self._client = client
        self._ledger = ledger
        self._reserver = reserver
        self._clock = clock
        self._sleep = sleep
        self.enabled = enabled
        self._waiting: dict[str, _Waiting] = {}
        self._pauses: dict[str, _Pause] = {}
        self._rest_until_s = 0.0
        self._start = 0

    # -- what is heard -------------------------------------------------------------------------------------

    def decided(self, verdict: FilterVerdict) -> None:
        """If kube-scheduler was told that the pod fits on none of its feasible nodes, that counts.

        It may have seen the pod before us, so what the pod requests is looked up when its turn comes.
        """
        uid = verdict.pod.uid
        if not verdict.is_refusal or not self.enabled or uid in self._ledger.holds.reserved:
            return
        known = self._waiting.pop(uid, None)
        due_s = known.due_s if known else self._clock() + PATIENCE_S
        self._waiting[uid] = _Waiting(
            uid, verdict.asked.astype(np.int32), self._ledger.fleet.cards_version, due_s
        )
        if len(self._waiting) > WAITING:
            del self._waiting[min(self._waiting, key=self._priority)]

    def stopped_leading(self) -> None:
        super().stopped_leading()
        self._waiting.clear()

    def leave_to_scheduler(self, uid: str) -> None:
        """kube-scheduler asked whom to evict for this pod and was answered: it evicts and nominates soon."""
        if self.enabled:
            self._waiting.pop(uid, None)
            self._pauses[uid] = _Pause(self._clock() + FIRST_PAUSE_S, FIRST_PAUSE_S)

    # -- what is done --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Preempt for waiting pods, until cancelled."""
        while True:
            await self._sleep(TICK_S)
            await self.tick()

    async def tick(self) -> None:
        """Renew the reservations, then preempt for the most important pod that is due, if any."""
        self._reserver.renew()
        self._pauses = {uid: pause for uid, pause in self._pauses.items() if uid in self._ledger.pods}
        now_s = self._clock()
        ready = [each.uid for each in self._waiting.values() if max(each.due_s, self._rest_until_s) <= now_s]
        due = [uid for uid in ready if not self._is_paused(uid)]
        if due:
            chosen = self._waiting.pop(max(due, key=self._priority))  # the earliest among equals
            pod = self._ledger.pods.get(chosen.uid)
            if pod is not None and pod.request is not None:
                result = await self._preempt(replace(chosen, priority=pod.priority, request=pod.request))
                if result:
                    self.results[result] += 1

    def _is_paused(self, uid: str) -> bool:
        return uid in self._pauses and self._pauses[uid].until_s > self._clock()

    def _priority(self, uid: str) -> int:
        pod = self._ledger.pods.get(uid)
        return pod.priority if pod is not None else LOWEST

    async def _preempt(self, waiting: _Waiting) -> str:
        """The outcome, or "" if there was nothing to do."""
        lower = [pod for pod in self._ledger.pods.values() if pod.priority < waiting.priority and pod.node]
        nodes = {pod.node for pod in lower}
        if await self._search(waiting, nodes) is None:  # examine the pod ever more rarely
            before = self._pauses.get(waiting.uid)
            length_s = min(LONGEST_PAUSE_S, 2 * before.length_s) if before else FIRST_PAUSE_S
            self._pauses[waiting.uid] = _Pause(self._clock() + length_s, length_s)
            return "helpless" if lower else ""
        try:
            pod = await self._eligible(waiting)
            if pod is None:
                return ""
            budgets = await read_budgets(self._client, {pod.namespace for pod in lower})
            found = await self._search(waiting, nodes, budgets)
            if found is None or self._is_paused(waiting.uid):
                return ""
            if not await self.evictor.carry_out(pod, waiting.request, found):
                return "given_up"
            return "evicted" if found.victims else "kept"
        except ForbiddenError as error:
            _log.error(
                "preemption is forbidden by RBAC; grant it or use --no-preemption",
                extra={"error": str(error)},
            )
        except KubeError as error:
            _log.warning("preemption failed", extra={"pod": waiting.uid, "error": str(error)})
        return "failed"

    async def _eligible(self, waiting: _Waiting) -> Pod | None:
        """The pod if it waits, may preempt by kube-scheduler's rules, and found no other way."""
        known = self._ledger.pods.get(waiting.uid)
        if known is None or known.node:
            return None
        try:
            seen = await self._client.get(PODS, known.name, known.namespace)
        except NotFoundError:
            return None
        may_preempt = (
            seen.metadata.uid == waiting.uid
            and not seen.spec.node_name
            and not seen.spec.scheduling_gates
            and seen.spec.preemption_policy != "Never"
            and seen.metadata.deletion_timestamp is None
            and seen.status.phase in {"", "Pending"}
        )
        # while somebody leaves the nominated node, kube-scheduler's eviction is in progress. Otherwise it has
        # ended in vain, since the pod was asked about and refused again; the nomination may stay, if by the
        # node's sum nobody need leave. The pod is read from the API server: if our news is late and it was
        # refused for that reason, evicting others would be in vain
        nominated = seen.status.nominated_node_name
        holds = self._ledger.holds.on(nominated) if nominated else None
        lower = [
            each.pod.uid
            for each in (holds.by_uid.values() if holds is not None else ())
            if each.pod.node and each.pod.priority < known.priority
        ]
        if may_preempt and lower:
            there = (await self._client.list(PODS, fields=f"spec.nodeName={nominated}")).items or ()
            staying = {each.metadata.uid for each in there if each.metadata.deletion_timestamp is None}
            may_preempt = staying.issuperset(lower)
        return known if may_preempt else None

    # -- choosing ------------------------------------------------------------------------------------------

    async def _search(
        self, waiting: _Waiting, nodes: Collection[str], budgets: Sequence[Budget] = ()
    ) -> Eviction | None:
        """The cheapest eviction among enough of `nodes`; None if none helps or the pod fits by now.

        Nothing has changed since the decision when this returns.
        """
        fleet = self._ledger.flush()
        if waiting.version != fleet.cards_version:
            return None  # nodes were added or removed: rows may be those of others
        refused = set(waiting.rows.tolist())
        names = [name for name, row in fleet.row_of.items() if row in refused and name in nodes]
        # starting with another node each time, as upstream
        self._start = (self._start + LEAST_CANDIDATES) % max(1, len(names))
        names = names[self._start :] + names[: self._start]
        enough = max(LEAST_CANDIDATES, int(CANDIDATES_PART * len(names)))
        best: Eviction | None = None
        found, spent_s, began_s = 0, 0.0, self._clock()
        for number, name in enumerate(names):
            if number % SLICE == SLICE - 1:
                spent_s += self._clock() - began_s
                await asyncio.sleep(0)
                began_s = self._clock()
            way = self._way(waiting, name, budgets)
            if way is not None and (best is None or way.cost < best.cost):
                best = way
            found += way is not None and not way.violations
            if found >= enough:
                break
        self._rest_until_s = self._clock() + REST * (spent_s + self._clock() - began_s)
        if best is None or self._way(waiting, best.node, budgets) != best or self._fits(waiting):
            return None
        return best

    def _way(self, waiting: _Waiting, name: str, budgets: Sequence[Budget]) -> Eviction | None:
        holds = self._ledger.holds.on(name)
        pod = self._ledger.pods.get(waiting.uid)
        if holds is None or (pod is not None and self._ledger.kubelets.reject(name, pod)):
            return None
        taken = holds.kept_from(waiting.uid, waiting.priority)
        return eviction(holds, waiting.request, waiting.priority, budgets, taken)

    def _fits(self, waiting: _Waiting) -> bool:
        """Whether one of the nodes has room by now, so that nobody need be evicted; even one in back-off."""
        rows = waiting.rows[waiting.rows >= 0].astype(np.intp)
        pod = self._ledger.pods.get(waiting.uid, NOBODY_IN_PARTICULAR)
        fits = self._ledger.why_not(waiting.request, rows, pod)
        return bool(np.isin(fits, (Fit.YES, Fit.IN_BACKOFF)).any())
