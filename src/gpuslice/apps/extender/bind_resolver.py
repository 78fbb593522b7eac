"""Finds out whether a pod was bound after an unclear answer, and ensures that no Binding takes effect later.

A Binding is conditional on its pod's version. If the pod is not bound, its version is changed, so that a
Binding sent earlier has no effect. Where an admission policy refuses every change of the pod, we wait until
no request can arrive any more: one such pod must not keep a new leader from ever answering.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import ConflictError, KubeError, NotFoundError
from gpuslice.adapters.kube.slim import SLIM_PODS, SlimPod
from gpuslice.adapters.kube.views import pod_view
from gpuslice.apps.extender.loop_clock import loop_time
from gpuslice.core.contract import ANN_ASSUME_TIME
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod

_log = logging.getLogger(__name__)

RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LONGEST_REQUEST_S = 60.0
"""After this time an API server gives up a request (its ``--request-timeout``)."""


class BindResolver:
    """Asks the API server about single pods and updates the ledger."""

    def __init__(
        self,
        client: KubeClient,
        ledger: Ledger,
        *,
        clock: Callable[[], float] = loop_time,
        now_ns: Callable[[], int] = time.time_ns,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._clock = clock
        self._now_ns = now_ns
        self._sleep = sleep

    async def resolve(self, pod: Pod, node: str) -> bool:
        """Read the pod until it is known whether it is bound to `node`; if not, it cannot be later."""
        began_s, attempt = self._clock(), 0
        while True:
            delay_s = RETRY_S[min(attempt, len(RETRY_S) - 1)]
            attempt += 1
            try:
                may_arrive = self._clock() < began_s + LONGEST_REQUEST_S
                return await self._resolve_once(pod, node, may_arrive=may_arrive)
            except ConflictError:  # the pod changed between reading and writing: read it again
                _log.debug("pod changed while it was read", extra={"pod": pod.key, "retry_in_s": delay_s})
            except KubeError as error:
                _log.warning(
                    "bind not resolved yet",
                    extra={"pod": pod.key, "node": node, "error": str(error), "retry_in_s": delay_s},
                )
            await self._sleep(delay_s)

    async def _resolve_once(self, pod: Pod, node: str, *, may_arrive: bool) -> bool:
        """`may_arrive`: a Binding that was sent earlier may still take effect."""
        try:
            seen: SlimPod | None = await self._client.get(SLIM_PODS, pod.name, pod.namespace)
            if seen is not None and seen.metadata.uid == pod.uid and not seen.spec.node_name:
                seen = await self._made_anew(pod, seen, required=may_arrive)
        except NotFoundError:
            seen = None
        if seen is None or seen.metadata.uid != pod.uid:
            self._ledger.remove_pod(pod.uid)
            return False
        self._ledger.apply_pod(pod_view(seen))
        if not seen.spec.node_name:
            self._ledger.forget(pod.uid)
        return seen.spec.node_name == node

    async def _made_anew(self, pod: Pod, seen: SlimPod, *, required: bool) -> SlimPod:
        """Another version of the pod; the current one if none can be made and none is `required`."""
        try:
            return await self._client.merge_patch(
                SLIM_PODS,
                pod.name,
                # any change makes a new version; this one is overwritten when the pod is bound
                {"metadata": {"annotations": {ANN_ASSUME_TIME: str(self._now_ns())}}},
                pod.namespace,
                uid=pod.uid,
                resource_version=seen.metadata.resource_version,
            )
        except (ConflictError, NotFoundError):
            raise
        except KubeError as error:
            if required:
                raise
            _log.error(
                "pod cannot be changed; taken for not bound", extra={"pod": pod.key, "error": str(error)}
            )
            return seen
