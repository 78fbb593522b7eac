"""Makes room in advance for pods equal to one that kube-scheduler preempts for, which wait behind it.

kube-scheduler preempts for one pod at a time: its filters on all nodes, a simulation on a hundred of them,
and all other pods before it tries the pod again. What it found for one pod holds for the next pod with the
same spec, on the nodes that were not taken:

    preempt is answered for a pod ──► the other nodes that it named, with its own victims there
        ──► the next pods of the queue that equal it in all that kube-scheduler reads
        ──► each gets a node of its own, is nominated, and its victims are evicted (`evictor`)
        ──► kube-scheduler takes them up, and looks at the nominated node alone

Only pods are evicted that kube-scheduler would evict itself: a node where anything has changed is left out,
and nothing is done where a disruption budget applies, or while a pod would fit without. If kube-scheduler
takes up one of the pods meanwhile, it is told to wait (`pending_evictions`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from gpuslice.adapters.clock import loop_time
from gpuslice.adapters.kube.budgets import protects_any
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.terms import Terms
from gpuslice.adapters.wire.extender import MetaVictims
from gpuslice.apps.extender.placer import Placer
from gpuslice.apps.extender.preemption.pending_evictions import PendingEvictions
from gpuslice.apps.extender.preemption.preemptor import Preemptor
from gpuslice.apps.extender.speedups.nominator import Nominator
from gpuslice.core.model import Pod, Request
from gpuslice.core.preemption import Cost, Eviction, cost, importance, victims

_log = logging.getLogger(__name__)

MOST = 32  # pods per answer
AT_ONCE = 8  # evictions
LASTS_S = 2.0  # how long kube-scheduler's findings hold; it asks again for the next pod that it takes up
PATIENCE_S = 0.5  # that preempt's answer waits for them, so that kube-scheduler does not outrun us
TOKEN = re.compile(rb"kube-api-access-\w+")  # the name of a volume that differs in each pod
OWN_LABELS = re.compile("job-name|controller-uid|pod-name|pod-index|job-completion-index")  # each pod's own


@dataclass(frozen=True, slots=True)
class _Answer:
    """What kube-scheduler found for a pod. `nodes`: its victims' uids by node, most expensive first."""

    pod: Pod
    request: Request
    terms: Terms
    nodes: dict[str, frozenset[str]]
    since_s: float


class BatchPreemptor:
    """Acts on the latest answer."""

    def __init__(
        self,
        client: KubeClient,
        placer: Placer,
        nominator: Nominator,
        preemptor: Preemptor,
        evictions: PendingEvictions,
        *,
        clock: Callable[[], float] = loop_time,
    ) -> None:
        self._pending = evictions
        self._client = client
        self._placer = placer
        self._ledger = placer.ledger
        self._nominator = nominator
        self._preemptor = preemptor
        self._evictor = preemptor.evictor
        self._clock = clock
        self._answer: _Answer | None = None
        self._asked, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()

    async def follow(self, pod: Pod, request: Request, others: Mapping[str, MetaVictims]) -> None:
        """kube-scheduler was answered for `pod` and takes none of `others`; wait until some are ready."""
        terms = self._nominator.terms_of(pod.uid)
        if not self._preemptor.enabled or terms is None or not self._nominator.leads:
            return
        pods, found = self._ledger.pods, list[tuple[Cost, str, frozenset[str]]]()
        for name, each in others.items():
            uids = frozenset(victim.uid for victim in each.pods or ())
            if uids <= pods.keys() and not each.num_pdb_violations:  # all victims have parts of cards
                found.append((cost([pods[uid] for uid in uids], 0), name, uids))
        dearest_first = sorted(found, key=lambda each: each[:2], reverse=True)
        nodes = {name: uids for _, name, uids in dearest_first}
        answer = _Answer(pod, request, terms, nodes, self._clock())
        if not nodes or not self._next(answer):
            return
        self._answer = answer
        self._asked.set()
        self._idle.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._idle.wait()

    async def run(self) -> None:
        """Make room after each answer, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            answer, self._answer = self._answer, None
            if answer is not None:
                try:
                    await self._make_room(answer)
                except KubeError as error:
                    _log.warning("no room made ahead", extra={"pod": answer.pod.key, "error": str(error)})
            if self._answer is None:
                self._idle.set()

    async def _make_room(self, answer: _Answer) -> None:
        evicted = {uid for uids in answer.nodes.values() for uid in uids}
        namespaces = {pod.namespace for uid in evicted if (pod := self._ledger.pods.get(uid)) is not None}
        if await protects_any(self._client, namespaces):
            return
        like = await self._read(answer.pod)
        if like is None:
            return
        waiting = iter(self._next(answer))

        async def work() -> None:
            for pod in waiting:
                try:
                    if await self._read(pod) != like or self._clock() > answer.since_s + LASTS_S:
                        continue
                    now = self._ledger.pods.get(pod.uid)
                    if now is None or now.node or not self._may_follow(answer, now):
                        continue
                    found = self._choose(answer, now)
                    if found is not None and await self._evictor.carry_out(
                        now, answer.request, found, ahead=True
                    ):
                        self._preemptor.results["ahead"] += 1
                except KubeError as error:
                    _log.warning("no room made ahead", extra={"pod": pod.key, "error": str(error)})

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(work())

    def _next(self, answer: _Answer) -> list[Pod]:
        """The next pods in the queue that may equal it."""
        found: list[Pod] = []
        for uid in self._ledger.waiting_after(answer.pod.uid):
            if self._may_follow(answer, pod := self._ledger.pods[uid]):
                found.append(pod)
            if len(found) == MOST:
                break
        return found

    def _may_follow(self, answer: _Answer, pod: Pod) -> bool:
        first = answer.pod
        alike = (pod.priority, pod.request, pod.namespace) == (first.priority, first.request, first.namespace)
        taken_up = self._ledger.holds.of(pod.uid) or pod.nominated or self._pending.knows(pod.uid)
        had_room = self._evictor.victims_for(pod.uid)  # even if it lost what was kept for it
        return alike and not taken_up and not had_room and self._nominator.terms_of(pod.uid) == answer.terms

    async def _read(self, pod: Pod) -> bytes | None:
        """All of a pod that determines where it may run and whom it may evict; None if it no longer waits."""
        try:
            seen: dict[str, Any] = await self._client.get(PODS.as_dict(), pod.name, pod.namespace)
        except NotFoundError:
            return None
        meta, spec, status = seen["metadata"], seen["spec"], seen.get("status") or {}
        labels = {
            key: value for key, value in (meta.get("labels") or {}).items() if not OWN_LABELS.search(key)
        }
        gone = meta["uid"] != pod.uid or meta.get("deletionTimestamp") or spec.get("nodeName")
        if gone or status.get("phase") not in ("Pending", None):
            return None
        return TOKEN.sub(b"", msgspec.json.encode([labels, spec], order="deterministic"))

    def _choose(self, answer: _Answer, pod: Pod) -> Eviction | None:
        """A node as kube-scheduler saw it; None if there is none, or if the pod fits without evictions."""
        everywhere = np.ones(self._ledger.flush().rows, dtype=np.bool_)
        if self._placer.choose_node(pod, everywhere, 1, last_resort=True) is not None:
            return None
        while answer.nodes:
            name, uids = answer.nodes.popitem()
            holds = self._ledger.holds.on(name)
            if holds is None or holds.node is None or self._pending.is_taken(name):
                continue
            leaving = [held for uid in uids if (held := holds.by_uid.get(uid)) is not None]
            if len(leaving) < len(uids) or any(each.pod.terminating or not each.is_bound for each in leaving):
                continue
            hosts = [each.pod.host for each in leaving]
            roomy = holds.node.host.holds(self._ledger.host_used(name), [answer.request.host], hosts)
            found = victims(holds, answer.request, pod.priority, uids)
            if roomy and found is not None and found.uids == uids:
                return Eviction(name, found.cards, tuple(sorted(leaving, key=importance)))
        return None
