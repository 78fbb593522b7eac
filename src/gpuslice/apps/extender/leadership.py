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
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.lease import LeaseElector
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.transport import Transport
from gpuslice.core.contract import LABEL_LEADER

_log = logging.getLogger(__name__)

POLL_EVERY_S = 0.1
RETRY_S = 1.0
LOOK_AGAIN_S = 5.0


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

    def take_over_again(self) -> None:
        """Another replica may have begun something."""
        self.cleared = False
        self.changed.set()

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
        problem, look_again_s = "", 0.0
        now = asyncio.get_running_loop().time
        while True:
            leads = self._leads()
            if leads != shown or (leads and now() >= look_again_s):
                try:
                    if leads:
                        await self._show_alone()
                    else:
                        await self._label(self._pod.name, None)
                    shown, problem, look_again_s = leads, "", now() + LOOK_AGAIN_S
                except KubeError as error:
                    if str(error) != problem:
                        _log.warning("leader's label not written, will retry", extra={"error": str(error)})
                    shown, problem = None, str(error)
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
