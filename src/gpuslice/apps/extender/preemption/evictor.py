"""Carries out evictions and keeps the cards, in an order in which nothing is lost if we die between requests.

    keep the cards ──► nominate ──► each victim: condition DisruptionTarget, DELETE ──► nominate

Nominated first, so that a new leader finds for whom the victims leave. Nominated again at the end, because
kube-scheduler removes a nomination if it tries the pod before the first victim is leaving.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

from gpuslice.adapters.clock import loop_time
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import ConflictError, ForbiddenError, KubeError, NotFoundError
from gpuslice.adapters.kube.events import EventRecorder, pod_reference
from gpuslice.adapters.kube.resources import PODS
from gpuslice.core.hold import Hold
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement, Pod, Request
from gpuslice.core.placement import on_cards
from gpuslice.core.preemption import LOWEST, Eviction, eviction

_log = logging.getLogger(__name__)

RETRIES_S = (0.2, 1.0, 5.0)  # an eviction is not left half done because the API server is busy
CONDITION = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "PreemptionByScheduler",  # makes kube-scheduler keep the nomination while they leave
}


def named_in(namespace: str, pods: Sequence[Pod]) -> str:
    """The pods, for readers of one namespace: who runs what in others is no business of theirs.

    kube-scheduler names no pod to its victims either, nor victims to the pod.
    """
    named = [each.key for each in pods if each.namespace == namespace]
    if others := len(pods) - len(named):
        named.append("a pod of another namespace" if others == 1 else f"{others} pods of other namespaces")
    return ", ".join(named)


class Evictor:
    """Carries out one eviction at a time. `client` writes only as leader."""

    def __init__(
        self,
        client: KubeClient,
        ledger: Ledger,
        reserver: Reserver,
        events: EventRecorder,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.evicted = 0
        self._victims: dict[str, frozenset[str]] = {}  # by uid of the pod for which they leave
        self._client = client
        self._ledger = ledger
        self._reserver = reserver
        self._events = events
        self._sleep = sleep

    async def carry_out(self, pod: Pod, request: Request, found: Eviction, *, ahead: bool = False) -> bool:
        """Evict the victims for `pod`; False if it was given up before the last one. Raises `KubeError`.

        `ahead`: kube-scheduler also finds victims for the pod, so it does not remove the nomination.

        Nothing may have changed since `found` was chosen: the cards are kept before the first await.
        """
        self._reserver.keep(pod, on_cards(found.node, found.cards, request))
        living = self._ledger.pods
        self._victims = {uid: uids for uid, uids in self._victims.items() if uid in living}
        self._victims[pod.uid] = frozenset(each.pod.uid for each in found.victims)
        done = False
        try:
            await self._nominate(pod, found.node)
            for victim in found.victims:
                if not await self._evict(pod, victim):
                    return False
            if found.victims and not ahead:
                await self._nominate(pod, found.node)
            done = True
        except (NotFoundError, ConflictError):  # the pod is gone or is another one by now
            return False
        finally:
            if not done:
                self._ledger.holds.end_reservation(pod.uid)
                self._victims.pop(pod.uid, None)
        cards = ", ".join(map(str, found.cards))
        where, leaving = f"card {cards} of {found.node}", [each.pod for each in found.victims]
        message = f"{where} is kept for this pod until those who are leaving it are gone"
        if leaving:
            message = f"{named_in(pod.namespace, leaving)} must leave {where}, which is kept for this pod"
        self._events.add(pod_reference(pod.namespace, pod.name, pod.uid), "Preempting", message)
        names = ", ".join(each.key for each in leaving)
        _log.info("preempted", extra={"pod": pod.key, "node": found.node, "cards": cards, "victims": names})
        return True

    def victims_for(self, uid: str) -> frozenset[str]:
        """Uids of the victims that we evicted, or are evicting, for a waiting pod."""
        return self._victims.get(uid, frozenset())

    async def _evict(self, pod: Pod, victim: Hold) -> bool:
        """Evict one victim, with retries; False if the pod or the victim no longer exists."""
        for delay_s in (*RETRIES_S, None):
            if not self._still_wanted(pod, victim):
                return False
            try:
                await self._delete(pod, victim)
                break
            except KubeError as error:
                if delay_s is None or isinstance(error, ForbiddenError):
                    raise
                _log.warning("eviction delayed", extra={"pod": victim.pod.key, "error": str(error)})
                await self._sleep(delay_s)
        return True

    def _still_wanted(self, pod: Pod, victim: Hold) -> bool:
        """Whether the pod still waits for these cards, and the victim still has them."""
        now, held = self._ledger.pods.get(pod.uid), self._ledger.holds.of(victim.pod.uid)
        if now is None or now.node or pod.uid not in self._ledger.holds.reserved:
            return False
        return held is None or (held.node == victim.node and held.placement == victim.placement)

    async def _delete(self, pod: Pod, victim: Hold) -> None:
        """State the reason, then delete. It is fine if the victim is gone or is another pod by now."""
        one, held = victim.pod, self._ledger.holds.of(victim.pod.uid)
        if held is None or held.pod.terminating:
            return
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        whom = named_in(one.namespace, [pod])
        message = f"preempting to make room on a card for {whom}, which has a higher priority"
        condition = CONDITION | {"message": message, "lastTransitionTime": now}
        try:
            await self._client.add_condition(PODS, one.name, condition, one.namespace, uid=one.uid)
            if not self._still_wanted(pod, victim):
                return  # the condition alone does no harm: the disruption controller removes it
            await self._client.delete(PODS, one.name, one.namespace, uid=one.uid)
        except (NotFoundError, ConflictError):
            return
        self.evicted += 1
        about, message = pod_reference(one.namespace, one.name, one.uid), f"Preempted by pod {pod.uid}"
        self._events.add(about, "Preempted", f"{message} on node {victim.node}")

    async def _nominate(self, pod: Pod, node: str) -> None:
        status = {"nominatedNodeName": node}
        await self._client.patch_status(PODS, pod.name, status, pod.namespace, uid=pod.uid)


KEPT_S = 60.0  # once there is room: kube-scheduler retries at least every 10 s
PACE_S = 10.0  # and longer while pods take theirs at least this often: it tries thousands one after the other
LONGEST_S = 600.0


class Reserver:
    """Begins and ends the reservations of a ledger. `lapsed` is called for one that came to nothing.

    They follow ``status.nominatedNodeName``, which outlives every process: they include kube-scheduler's own
    nominations, for which it keeps an amount but no card, and those of an earlier leader.
    """

    def __init__(
        self,
        ledger: Ledger,
        lapsed: Callable[[Placement], None] = lambda _: None,
        clock: Callable[[], float] = loop_time,
    ) -> None:
        self._ledger = ledger
        self._tell_lapsed = lapsed
        self._clock = clock
        self._kept: set[str] = set()  # uids at the last check
        self._taken_s = 0.0  # when a pod last took what was reserved for it

    def keep(self, pod: Pod, placement: Placement) -> None:
        """Reserve these cards from now on."""
        self._ledger.holds.reserve(pod, placement, self._clock() + KEPT_S)

    def renew(self) -> None:
        """Begin reservations for nominations in the pods' status, and end those that came to nothing."""
        ledger = self._ledger
        for uid, node in tuple(ledger.nominated.items()):
            # it was nominated: keep cards for it, once there is room or some is coming
            pod, holds = ledger.pods.get(uid), ledger.holds.on(node)
            if pod is None or pod.request is None or holds is None or ledger.withdrawn.get(uid) == node:
                continue
            if uid not in ledger.holds.reserved and ledger.holds.of(uid) is None:
                found = eviction(holds, pod.request, LOWEST, (), holds.kept_from(uid, pod.priority))
                if found is not None:
                    self.keep(pod, on_cards(node, found.cards, pod.request))
        now_s, kept = self._clock(), set(ledger.holds.reserved)
        if any(ledger.holds.of(uid) is not None for uid in self._kept - kept):
            self._taken_s = now_s
        self._kept, more_s = kept, LONGEST_S - KEPT_S if now_s < self._taken_s + PACE_S else 0.0
        for uid, hold in tuple(ledger.holds.reserved.items()):
            assert hold.placement is not None
            holds = ledger.holds.on(hold.node)
            if holds is not None and holds.comes_free(hold.placement):
                ledger.holds.extend_reservation(uid, now_s + KEPT_S)
            elif hold.until_s + more_s <= now_s:
                # there was room, and nobody came
                ledger.holds.end_reservation(uid)
                ledger.withdrawn[uid] = hold.node
                _log.info("reservation lapsed", extra={"pod": uid, "node": hold.node})
                self._tell_lapsed(hold.placement)
        for uid in [uid for uid in ledger.withdrawn if uid not in ledger.pods]:
            del ledger.withdrawn[uid]
