"""Grants pods that run more of their cards, as their annotations ask: the room for it and its record.

    wanted ──► room on its cards and in the namespace's quota ──► held ──► PATCH of the pod ──► the agent

The PATCH is conditional on the version of the pod that was decided about. Until it is known that this version
is over, the ledger holds what was granted: a PATCH whose answer was lost may still arrive. That is also why
a new leader needs no record: the wish stands in that version of the pod, so that the leader holds the same
again before it decides anything else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import (
    ConflictError,
    ForbiddenError,
    KubeError,
    NotFoundError,
    UnavailableError,
)
from gpuslice.adapters.kube.followed_pod import PodNews
from gpuslice.adapters.kube.resources import QUOTAS
from gpuslice.adapters.kube.slim import SLIM_PODS, SlimPod
from gpuslice.adapters.kube.views import pod_view
from gpuslice.apps.extender.pod_records import PodEvents
from gpuslice.apps.extender.subscriber import Subscriber
from gpuslice.core.contract import ANN_ASSUME_TIME, ANN_GRANTED
from gpuslice.core.hold import Hold, HoldKind
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod, Refusal
from gpuslice.core.quota import why_over_quota
from gpuslice.core.resize import added_in, encode_granted, grown, more
from gpuslice.core.words import counted

_log = logging.getLogger(__name__)

RETRY_S = 1.0
"""For what has no room yet, or could not be written: another pod may have gone."""


class Resizer(Subscriber):
    """The pods that want more than they hold, one after another. `client` writes only as leader."""

    def __init__(
        self,
        client: KubeClient,
        ledger: Ledger,
        events: PodEvents,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._events = events
        self._now_ns = now_ns
        self._sleep = sleep
        self._waiting: dict[str, None] = {}  # uids, the first to ask first
        self._sent: dict[str, int] = {}  # by uid, the version for which a PATCH may still arrive
        self._woken = asyncio.Event()

    def pod_changed(self, news: PodNews, before: Hold | None) -> None:
        self._note(news.view)

    def _note(self, pod: Pod) -> None:
        if more(pod) is not None:
            self._waiting[pod.uid] = None
            self._woken.set()

    def started_leading(self) -> None:
        """Hold what an earlier leader may have granted, before anybody else gets it."""
        super().started_leading()
        for uid in self._waiting:
            pod = self._ledger.pods.get(uid)
            if pod is not None and isinstance(larger := self._decided(pod), Pod):
                self._sent[uid] = pod.version
                self._ledger.grow(larger)
        self._woken.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            for uid in tuple(self._waiting):
                if self.leads:
                    await self._resize(uid)
            if self._waiting:
                await self._sleep(RETRY_S)
                self._woken.set()

    async def _resize(self, uid: str) -> None:
        """Grant one pod what it wants if there is room; what fails is tried again."""
        pod = self._ledger.pods.get(uid)
        if pod is None or more(pod) is None:
            self._waiting.pop(uid, None)
            self._sent.pop(uid, None)
            return
        try:
            refusal: Pod | Refusal | None = await self._over_quota(pod)
            pod = self._ledger.pods.get(uid, pod)
            larger = self._decided(pod) if refusal is None else refusal
            if isinstance(larger, Refusal):
                self._events.warn(pod, "GPUResizeWaits", str(larger))
                if self._sent.get(uid) == pod.version:
                    await self._write(pod, pod, {ANN_ASSUME_TIME: str(self._now_ns())})
            elif larger is not None and larger.request is not None:
                self._ledger.grow(larger)
                await self._write(pod, larger, {ANN_GRANTED: encode_granted(larger.request)})
        except KubeError as error:
            _log.warning("resize not written, will try again", extra={"pod": pod.key, "error": str(error)})

    def _decided(self, pod: Pod) -> Pod | Refusal | None:
        """The pod with what it wants, or why there is no room; None if it wants nothing any more.

        What is held for it already because it may have been granted is room for it.
        """
        holds, request = self._ledger.holds.on(pod.node), more(pod)
        if request is None:
            return None
        if holds is None or holds.node is None:
            return Refusal(f"Its node {pod.node} no longer exists")
        hold = self._ledger.holds.of(pod.uid)
        if hold is not None and hold.kind is HoldKind.GROWING and hold.pod.version == pod.version:
            return hold.pod
        state = holds.open_to(holds.kept_from(pod.uid, pod.priority))
        return grown(pod, request, state, dict(holds.beside(pod)))

    async def _over_quota(self, pod: Pod) -> Refusal | None:
        """Whether the namespace may not have as much. Where quotas may not be read, they do not count."""
        request = more(pod)
        if request is None or pod.request is None:
            return None
        try:
            quotas = await self._client.list(QUOTAS, pod.namespace)
        except ForbiddenError:
            return None
        added = added_in(self._ledger.pods.values(), pod.namespace)
        asked = request.units - pod.request.units
        return why_over_quota(quotas.items or (), request.names.memory, added, asked)

    async def _write(self, pod: Pod, larger: Pod, annotations: dict[str, str | None]) -> None:
        """Record what is granted, or end the version for which it may be. Raises `KubeError`."""
        patch, version = {"metadata": {"annotations": annotations}}, pod.resource_version
        try:
            seen = await self._client.merge_patch(
                SLIM_PODS, pod.name, patch, pod.namespace, uid=pod.uid, resource_version=version
            )
        except (ConflictError, NotFoundError):  # that version is over: what was sent has no effect any more
            await self._look(pod)
            return
        except KubeError as error:
            if isinstance(error, UnavailableError) and error.outcome_unknown:
                self._sent[pod.uid] = pod.version
            elif self._sent.get(pod.uid) != pod.version:
                self._ledger.grow(pod, HoldKind.BOUND)
            raise
        self._ledger.apply_pod(pod_view(seen))
        if larger is not pod and larger.request is not None and pod.request is not None:
            now, before = larger.request.units, pod.request.units
            _log.info("resized", extra={"pod": pod.key, "units": now})
            self._events.note(pod, "GPUResized", f"it holds {counted(now, 'unit')} instead of {before}")

    async def _look(self, pod: Pod) -> None:
        """Learn what the pod is now; until then what was granted stays held."""
        try:
            found: SlimPod = await self._client.get(SLIM_PODS, pod.name, pod.namespace)
            seen = pod_view(found)
        except NotFoundError:
            self._ledger.remove_pod(pod.uid)
            return
        if seen.uid == pod.uid:
            self._ledger.apply_pod(seen)
            self._note(seen)
        else:
            self._ledger.remove_pod(pod.uid)
