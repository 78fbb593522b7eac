"""A plan written on its pod, as the node that kube-scheduler tries first, and taken off again."""

from __future__ import annotations

import logging

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.slim import SLIM_PODS
from gpuslice.adapters.kube.views import pod_view
from gpuslice.apps.extender.leadership import Leadership
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod

_log = logging.getLogger(__name__)


class NominationWriter:
    """Writes for the leader alone: a hint, that gives nobody any cards."""

    def __init__(self, client: KubeClient, ledger: Ledger, leadership: Leadership) -> None:
        self._client = client
        self._ledger = ledger
        self._leadership = leadership

    async def nominate(self, pod: Pod, node: str | None) -> bool:
        """Whether the pod shows `node` now, None for no node; False also when that is not known."""
        if not self._leadership.may_bind:
            return False
        try:
            seen = await self._client.merge_patch(
                SLIM_PODS,
                pod.name,
                {"status": {"nominatedNodeName": node}},
                pod.namespace,
                uid=pod.uid,
                resource_version=str(pod.version) if pod.version else "",
                subresource="status",
            )
        except NotFoundError:
            return False
        except KubeError as error:
            _log.info("not nominated", extra={"pod": pod.key, "error": str(error)})
            return False
        self._ledger.apply_pod(pod_view(seen))
        return True
