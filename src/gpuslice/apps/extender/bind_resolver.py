"""Finds out what became of a pod whose writes got no clear answer, and takes back what leads to no binding.

Afterwards nothing that was sent before can take effect any more: every request was made for a version of the
pod, and that version is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import ConflictError, KubeError, NotFoundError
from gpuslice.adapters.kube.slim import SLIM_PODS, SlimPod
from gpuslice.adapters.kube.views import pod_view
from gpuslice.core.annotations import PLACEMENT_ANNOTATIONS
from gpuslice.core.contract import ANN_ASSUME_TIME
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod

_log = logging.getLogger(__name__)

RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class BindResolver:
    """Asks the API server about single pods and tells the ledger."""

    def __init__(
        self,
        client: KubeClient,
        ledger: Ledger,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._now_ns = now_ns
        self._sleep = sleep

    async def resolve(self, pod: Pod, node: str, *, patch_on_its_way: bool = False) -> bool:
        """Read the pod until it is known whether it is bound to `node`; if it is not, take all back.

        `patch_on_its_way`: our annotations may still arrive on a pod that does not have them yet.
        """
        attempt = 0
        while True:
            delay_s = RETRY_S[min(attempt, len(RETRY_S) - 1)]
            attempt += 1
            try:
                return await self._resolve_once(pod, node, patch_on_its_way)
            except ConflictError:  # it changed between our reading and writing: read again
                _log.debug("pod changed while it was read", extra={"pod": pod.key, "retry_in_s": delay_s})
            except KubeError as error:
                _log.warning(
                    "bind not resolved yet",
                    extra={"pod": pod.key, "node": node, "error": str(error), "retry_in_s": delay_s},
                )
            await self._sleep(delay_s)

    async def _resolve_once(self, pod: Pod, node: str, patch_on_its_way: bool) -> bool:
        try:
            seen = await self._client.get(SLIM_PODS, pod.name, pod.namespace)
        except NotFoundError:
            seen = None
        if seen is None or seen.metadata.uid != pod.uid:
            self._ledger.remove_pod(pod.uid)
            return False
        if seen.spec.node_name:
            self._ledger.apply_pod(pod_view(seen))
            return seen.spec.node_name == node
        # remove our annotations: a Binding made on the version with them then fails. So does a PATCH that
        # would write them later: where none are there yet, one is written to be removed
        ours = [name for name in PLACEMENT_ANNOTATIONS if name in (seen.metadata.annotations or {})]
        if not ours and patch_on_its_way:
            ours = [ANN_ASSUME_TIME]
            seen = await self._annotate(seen, {ANN_ASSUME_TIME: str(self._now_ns())})
        if ours:
            await self._annotate(seen, dict.fromkeys(ours))
        self._ledger.forget(pod.uid)
        return False

    async def _annotate(self, seen: SlimPod, annotations: dict[str, Any]) -> SlimPod:
        try:
            return await self._client.merge_patch(
                SLIM_PODS,
                seen.metadata.name,
                {"metadata": {"annotations": annotations}},
                seen.metadata.namespace,
                uid=seen.metadata.uid,
                resource_version=seen.metadata.resource_version,
            )
        except NotFoundError:  # gone: so are its annotations
            return seen
