"""A plan written on its pod, and taken off again: annotations and nomination in one request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.slim import SLIM_PODS
from gpuslice.adapters.kube.views import pod_view
from gpuslice.apps.extender.leadership import Leadership
from gpuslice.core.annotations import PLACEMENT_ANNOTATIONS, placement_annotations
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement, Pod

_log = logging.getLogger(__name__)


class NominationWriter:
    """Writes for the leader alone.

    The annotations mark the pod for a leader after us: a Binding is only ever sent on a version that has
    them, and taking them away makes a new version (see `binder`).
    """

    def __init__(
        self,
        client: KubeClient,
        ledger: Ledger,
        leadership: Leadership,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._leadership = leadership
        self._now_ns = now_ns

    async def nominate(self, pod: Pod, placement: Placement) -> int:
        """The version of the pod that bears it; 0 when it was not written, or perhaps not."""
        state = self._ledger.state(placement.node)
        assert state is not None
        assert pod.request is not None
        annotations = placement_annotations(placement, pod.request, state.node, self._now_ns())
        return await self._patch(pod, dict.fromkeys(PLACEMENT_ANNOTATIONS) | annotations, placement.node)

    async def take_back(self, pod: Pod, node: str) -> None:
        """Take off what was written for `node`; another's nomination stays."""
        nominated = pod.nominated if pod.nominated != node else None
        await self._patch(pod, dict.fromkeys(PLACEMENT_ANNOTATIONS), nominated or None)

    async def _patch(self, pod: Pod, annotations: dict[str, Any], node: str | None) -> int:
        """Both in one write, on the version that is known."""
        if not self._leadership.may_bind:
            return 0
        try:
            seen = await self._client.merge_patch(
                SLIM_PODS,
                pod.name,
                {"metadata": {"annotations": annotations}, "status": {"nominatedNodeName": node}},
                pod.namespace,
                uid=pod.uid,
                resource_version=str(pod.version) if pod.version else "",
                subresource="status",
            )
        except NotFoundError:
            return 0
        except KubeError as error:
            _log.info("not nominated", extra={"pod": pod.key, "error": str(error)})
            return 0
        shown = pod_view(seen)
        self._ledger.apply_pod(shown)
        return shown.version
