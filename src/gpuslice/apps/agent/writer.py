"""Writes to the API server: pod annotations, node status, the ConfigMap of unhealthy cards, events."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import NotFoundError
from gpuslice.adapters.kube.events import EventRecorder, node_reference, pod_reference
from gpuslice.adapters.kube.resources import CONFIG_MAPS, NODES
from gpuslice.apps.agent.pods import NODE_PODS, NodePod, node_pod
from gpuslice.apps.agent.repair import Repair
from gpuslice.apps.agent.upkeep import REASON as NOT_REPAIRED
from gpuslice.core.annotations import encode_tiers
from gpuslice.core.contract import (
    AGENT_COMPONENT,
    ANN_GRANTED,
    ANN_PARK,
    ANN_PARKED,
    ANN_TIERS,
    CONDITION_PARKED,
    SYSTEM_NAMESPACE,
    UNHEALTHY_CONFIGMAP_PREFIX,
)
from gpuslice.core.model import Pod, Request, Tier
from gpuslice.core.parking import Amounts, encode_parked
from gpuslice.core.resize import encode_granted

_log = logging.getLogger(__name__)


class Writer:
    """Each method writes or raises a KubeError; nobody who answers kubelet waits for it without a bound.

    `events` are written in the background, by its `run`.
    """

    def __init__(
        self,
        client: KubeClient,
        node: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._client = client
        self._node = node
        self._now_ns = now_ns
        self.events = EventRecorder(client, AGENT_COMPONENT, host=node, clock=clock, now_ns=now_ns)

    async def repair(self, repair: Repair) -> NodePod | None:
        """Write a pod's annotations; returns the pod as it is then, or None if it is gone or replaced.

        Annotations about cards are conditional on the version from which they were derived: a delayed write
        changes nothing. Raises `ConflictError` if the pod has changed since.
        """
        pod = repair.pod.view
        patch = {"metadata": {"annotations": repair.annotations}}
        version = pod.resource_version if repair.of_cards else ""
        try:
            written = await self._client.merge_patch(
                NODE_PODS, pod.name, patch, pod.namespace, uid=pod.uid, resource_version=version
            )
        except NotFoundError as error:
            _log.info("annotations not written", extra={"pod": pod.key, "error": str(error)})
            return None
        _log.info("annotations written", extra={"pod": pod.key, "reason": repair.reason})
        return node_pod(written)

    async def tiers(self, pod: Pod, tiers: Mapping[str, Tier]) -> None:
        """Write what enforces the limits of a pod's containers, where that differs from the node's tier."""
        await self._annotate(pod, {ANN_TIERS: encode_tiers(tiers)})

    async def granted(self, pod: Pod, request: Request) -> NodePod | None:
        """Record that a pod holds no more than `request`, on the condition that it has not changed since.

        None if it is gone. Raises `ConflictError` if it has changed.
        """
        patch = {"metadata": {"annotations": {ANN_GRANTED: encode_granted(request)}}}
        with contextlib.suppress(NotFoundError):
            version = pod.resource_version
            written = await self._client.merge_patch(
                NODE_PODS, pod.name, patch, pod.namespace, uid=pod.uid, resource_version=version
            )
            return node_pod(written)
        return None

    async def parked(self, pod: Pod, amounts: Amounts) -> NodePod | None:
        """Record what is taken off a pod's cards; None if it is gone."""
        return await self._annotate(pod, {ANN_PARKED: encode_parked(amounts)})

    async def order_done(self, pod: Pod) -> NodePod | None:
        """Take away what somebody asked us to do with a pod."""
        return await self._annotate(pod, {ANN_PARK: None})

    async def _annotate(self, pod: Pod, annotations: Mapping[str, str | None]) -> NodePod | None:
        patch = {"metadata": {"annotations": dict(annotations)}}
        with contextlib.suppress(NotFoundError):
            return node_pod(
                await self._client.merge_patch(NODE_PODS, pod.name, patch, pod.namespace, uid=pod.uid)
            )
        return None

    async def parked_condition(self, pod: Pod, what: str) -> None:
        """The pod's condition: `what` is parked, or "" for nothing."""
        at = datetime.fromtimestamp(self._now_ns() / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {
            "type": CONDITION_PARKED,
            "status": "True" if what else "False",
            "reason": "Idle" if what else "InUse",
            "message": what,
            "lastTransitionTime": at,
        }
        with contextlib.suppress(NotFoundError):
            await self._client.add_condition(NODE_PODS, pod.name, condition, pod.namespace, uid=pod.uid)

    async def pod(self, pod: Pod) -> NodePod | None:
        """The pod as it is now; None if it is gone or another pod has its name."""
        try:
            found = await self._client.get(NODE_PODS, pod.name, pod.namespace)
        except NotFoundError:
            return None
        return node_pod(found) if found.metadata.uid == pod.uid else None

    async def lives(self, namespace: str, name: str) -> bool:
        """Whether a pod of this name is on this node and has not ended, whatever the watch has shown."""
        try:
            found = node_pod(await self._client.get(NODE_PODS, name, namespace)).view
        except NotFoundError:
            return False
        return found.node == self._node and not found.finished

    async def reach(self) -> None:
        """Raises KubeError while the API server does not answer."""
        with contextlib.suppress(NotFoundError):
            await self._client.get(NODES, self._node)

    async def node_status(self, amounts: Mapping[str, str | None]) -> None:
        """Set capacity and allocatable of resources that are not devices; None removes one."""
        amounts = dict(amounts)
        await self._client.patch_status(NODES, self._node, {"capacity": amounts, "allocatable": amounts})

    async def node_annotation(self, name: str, value: str | None) -> None:
        """Write an annotation of the node; None removes it."""
        await self._client.merge_patch(NODES, self._node, {"metadata": {"annotations": {name: value}}})

    def node_event(self, reason: str, message: str, *, warning: bool) -> None:
        """An event on the node, written in the background; one that cannot be written is only logged."""
        kind = "Warning" if warning else "Normal"
        self.events.add(node_reference(self._node), reason, message, type=kind)

    def pod_event(self, pod: Pod, reason: str, message: str) -> None:
        """A warning on a pod, likewise."""
        about = pod_reference(pod.namespace, pod.name, pod.uid)
        self.events.add(about, reason, message, type="Warning")

    def not_repaired(self, sentence: str) -> None:
        """An event on the node about something of ours that cannot be put back."""
        self.node_event(NOT_REPAIRED, sentence, warning=True)

    async def set_unhealthy(self, data: Mapping[str, str], *, present: bool) -> None:
        """Write the node's ConfigMap of unhealthy cards, which is `present` or not."""
        document: dict[str, Any] = {"data": dict(data)}
        name = unhealthy_configmap(self._node)
        if present:
            await self._client.merge_patch(CONFIG_MAPS, name, document, SYSTEM_NAMESPACE)
            return
        document["metadata"] = {"name": name, "namespace": SYSTEM_NAMESPACE}
        await self._client.create(CONFIG_MAPS.as_dict(), document, SYSTEM_NAMESPACE)


def unhealthy_configmap(node: str) -> str:
    return UNHEALTHY_CONFIGMAP_PREFIX + node
