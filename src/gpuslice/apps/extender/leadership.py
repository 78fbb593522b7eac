"""Which replica a Service shows: the pod of the one that answers carries a label, and no other pod does.

Readiness cannot tell it. A replica that stands by must count as ready, or no update of several replicas would
ever end and no node with the leader could be drained: both wait for somebody else to be ready first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.resources import PODS
from gpuslice.core.contract import LABEL_LEADER

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class OwnPod:
    """The pod that this process runs in."""

    namespace: str
    name: str


class LeaderLabel:
    """Keeps the label where it belongs while `run` runs. `leads` is asked whether this replica answers."""

    def __init__(self, client: KubeClient, pod: OwnPod, leads: Callable[[], bool]) -> None:
        self._client = client
        self._pod = pod
        self._leads = leads
        self._problem = ""

    async def run(self) -> None:
        """For ever. What cannot be written is tried again, and said once."""
        shown: bool | None = None  # a container that was started again may find the label of the one before
        while True:
            leads = self._leads()
            if leads != shown:
                shown = leads if await self._written(leads) else None
            await asyncio.sleep(RETRY_S if shown is None else LOOK_EVERY_S)

    async def _written(self, leads: bool) -> bool:
        try:
            await self._label(self._pod.name, "true" if leads else None)
            for other in await self._others() if leads else ():
                await self._label(other, None)
        except KubeError as error:
            if str(error) != self._problem:
                _log.warning("label of the leader not written, will try again", extra={"error": str(error)})
            self._problem = str(error)
            return False
        self._problem = ""
        return True

    async def _others(self) -> list[str]:
        labelled = await self._client.list(PODS, self._pod.namespace, labels=LABEL_LEADER)
        return [pod.metadata.name for pod in labelled.items or () if pod.metadata.name != self._pod.name]

    async def _label(self, pod: str, value: str | None) -> None:
        try:
            await self._client.merge_patch(
                PODS, pod, {"metadata": {"labels": {LABEL_LEADER: value}}}, self._pod.namespace
            )
        except NotFoundError:
            _log.info("pod is gone", extra={"pod": pod})
