"""Carries out an eviction, in an order in which nothing is lost if we die between two requests.

    keep the cards ──► nominate ──► each victim: condition DisruptionTarget, DELETE ──► nominate

Nominated first, so that a new leader finds for whom the victims leave. Nominated again at the end, because
kube-scheduler removes a nomination if it tries the pod before the first victim is leaving.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import ConflictError, ForbiddenError, KubeError, NotFoundError
from gpuslice.adapters.kube.resources import PODS
from gpuslice.apps.extender.leadership import Leadership
from gpuslice.apps.extender.pod_events import PodEvents
from gpuslice.apps.extender.preemption.reserver import Reserver
from gpuslice.core.hold import Hold
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod, Request
from gpuslice.core.placement import on_cards
from gpuslice.core.preemption import Eviction

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
    """Carries out one eviction at a time, for the leader alone."""

    def __init__(
        self,
        client: KubeClient,
        ledger: Ledger,
        reserver: Reserver,
        leadership: Leadership,
        events: PodEvents,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.evicted = 0
        self._victims: dict[str, frozenset[str]] = {}  # by uid of the pod for which they leave
        self._client = client
        self._ledger = ledger
        self._reserver = reserver
        self._leadership = leadership
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
        self._events.note(pod, "Preempting", message)
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
        self._expect_leading()
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        whom = named_in(one.namespace, [pod])
        message = f"preempting to make room on a card for {whom}, which has a higher priority"
        condition = CONDITION | {"message": message, "lastTransitionTime": now}
        try:
            await self._client.add_condition(PODS, one.name, condition, one.namespace, uid=one.uid)
            if not self._still_wanted(pod, victim):
                return  # the condition alone does no harm: the disruption controller removes it
            self._expect_leading()
            await self._client.delete(PODS, one.name, one.namespace, uid=one.uid)
        except (NotFoundError, ConflictError):
            return
        self.evicted += 1
        self._events.note(one, "Preempted", f"Preempted by pod {pod.uid} on node {victim.node}")

    async def _nominate(self, pod: Pod, node: str) -> None:
        self._expect_leading()
        status = {"nominatedNodeName": node}
        await self._client.patch_status(PODS, pod.name, status, pod.namespace, uid=pod.uid)

    def _expect_leading(self) -> None:
        if not self._leadership.may_bind:
            raise KubeError("this extender is not the leader any more")
