"""Which replica decides: the holder of the lease, shown to the Service by a label on its pod.

Readiness cannot express this. A standby replica must be ready too; otherwise a rolling update would never
finish and the leader's node could not be drained, since both wait for another replica to be ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError, ToldOnce
from gpuslice.adapters.kube.followed_pod import PodNews
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.lease import LeaseElector
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.transport import Transport
from gpuslice.apps.extender.subscriber import FilterVerdict, Subscriber
from gpuslice.core.contract import LABEL_LEADER
from gpuslice.core.hold import Hold
from gpuslice.core.model import Pod

_log = logging.getLogger(__name__)

POLL_EVERY_S = 0.1
RETRY_S = 1.0
LOOK_AGAIN_S = 5.0
LOOK_RETRY_S = 0.5


@dataclass(slots=True)
class Leadership:
    """Whether this replica may decide and write. Without an elector it always leads.

    `cleared`: nothing that an earlier leader began can still take effect.
    """

    elector: LeaseElector | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    cleared: bool = False

    @property
    def leading(self) -> bool:
        return self.elector is None or self.elector.leading

    @property
    def may_bind(self) -> bool:
        return self.leading and self.cleared

    def why_not(self) -> str:
        """Why this replica may not bind, or "" if it may."""
        if self.elector is not None and not self.leading:
            if self.elector.lapsed:
                return "not the leader any more: the API server did not renew the lease in time"
            return f"not the leader, that is {self.elector.holder or 'nobody yet'}"
        return "" if self.cleared else "taking over: earlier placements are being settled"


class LeadersTransport:
    """Reads always, and writes only while this replica leads, which is checked right before each write."""

    def __init__(self, inner: Transport, leadership: Leadership) -> None:
        self._inner = inner
        self._leadership = leadership

    async def request(self, request: ApiRequest) -> ApiResponse:
        if request.method != "GET" and not self._leadership.may_bind:
            raise KubeError("this extender is not the leader; ask the one that is ready")
        return await self._inner.request(request)

    def stream(self, request: ApiRequest) -> AsyncGenerator[bytes]:
        return self._inner.stream(request)


class BindFence(Subscriber):
    """Holds a Binding back until the next leader is certain to know its pod, without a write or a clock.

    A new leader takes the lease, then reads all pods and changes the version of those that wait, so that
    Bindings on earlier versions fail. So a Binding may go if the lease was still ours after the pod was seen
    as it is now: one look at the lease covers all pods seen before it began.
    """

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._begun = self._ours = 0  # looks, and the last one that found the lease ours
        self._seen: dict[str, tuple[int, int]] = {}  # by uid of a waiting pod: its version, and looks before
        self._wake, self._news = asyncio.Event(), asyncio.Event()

    def pod_changed(self, news: PodNews, before: Hold | None) -> None:
        if news.waits:
            self._is_covered(news.view)
        else:
            self._seen.pop(news.view.uid, None)

    def pod_gone(self, uid: str, before: Hold | None) -> None:
        self._seen.pop(uid, None)

    def decided(self, verdict: FilterVerdict) -> None:
        """A pod that passes will be bound soon: look now, so that its bind need not wait."""
        if len(verdict.passed) and verdict.is_known and not self._is_covered(verdict.pod):
            self._wake.set()

    async def passed(self, pod: Pod) -> None:
        """Wait until a Binding of the pod as it is may go; at once if this replica does not lead."""
        while self.leads and self._leadership.elector is not None and not self._is_covered(pod):
            self._wake.set()
            await self._news.wait()

    def _is_covered(self, pod: Pod) -> bool:
        version, looks = self._seen.get(pod.uid, (-1, 0))
        if version < pod.version:
            looks = self._begun
            self._seen[pod.uid] = (pod.version, looks)
        return looks < self._ours

    def stopped_leading(self) -> None:
        super().stopped_leading()
        self._wake.set()

    async def run(self) -> None:
        """Look whenever a pod is to be bound that no look covers, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.leads and (elector := self._leadership.elector) is not None:
                self._begun += 1
                try:
                    if await elector.confirm():
                        self._ours = self._begun
                except KubeError as error:
                    _log.warning("lease not read, will retry", extra={"error": str(error)})
                    await asyncio.sleep(LOOK_RETRY_S)
                    self._wake.set()
            self._news.set()
            self._news = asyncio.Event()


@dataclass(frozen=True, slots=True)
class OwnPod:
    """The pod that this process runs in."""

    namespace: str
    name: str


class LeaderLabel:
    """Keeps the label on the right pod while `run` runs. `leads` returns whether this replica answers."""

    def __init__(self, client: KubeClient, pod: OwnPod, leads: Callable[[], bool]) -> None:
        self._client = client
        self._pod = pod
        self._leads = leads

    async def run(self) -> None:
        """For ever. A failed write is retried, and logged once.

        The leader checks now and then: a late request of the previous leader may remove its label.
        """
        shown: bool | None = None  # a restarted container may find the label that its previous process left
        told_once, look_again_s = ToldOnce(_log, "leader's label not written, will try again"), 0.0
        now = asyncio.get_running_loop().time
        while True:
            leads = self._leads()
            if leads != shown or (leads and now() >= look_again_s):
                shown = None
                with told_once:
                    if leads:
                        await self._show_alone()
                    else:
                        await self._label(self._pod.name, None)
                    shown, look_again_s = leads, now() + LOOK_AGAIN_S
            await asyncio.sleep(RETRY_S if shown is None else POLL_EVERY_S)

    async def _show_alone(self) -> None:
        """Label our own pod first: a Service without endpoints is worse than one with two."""
        found = await self._client.list(PODS, self._pod.namespace, labels=LABEL_LEADER)
        labelled = {pod.metadata.name for pod in found.items or ()}
        if self._pod.name not in labelled:
            await self._label(self._pod.name, "true")
        for other in labelled - {self._pod.name}:
            await self._label(other, None)

    async def _label(self, pod: str, value: str | None) -> None:
        try:
            await self._client.merge_patch(
                PODS, pod, {"metadata": {"labels": {LABEL_LEADER: value}}}, self._pod.namespace
            )
        except NotFoundError:
            _log.info("pod is gone", extra={"pod": pod})
