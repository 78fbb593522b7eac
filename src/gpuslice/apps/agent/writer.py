"""Writes to the API server: pod annotations, node status, the ConfigMap of unhealthy cards, events."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import AlreadyExistsError, NotFoundError
from gpuslice.adapters.kube.events import EventRecorder, node_reference, pod_reference
from gpuslice.adapters.kube.resources import CONFIG_MAPS, NODES
from gpuslice.apps.agent.pods import NODE_PODS, NodePod, node_pod
from gpuslice.apps.agent.repair import Repair
from gpuslice.core.annotations import encode_tiers
from gpuslice.core.contract import ANN_TIERS, SYSTEM_NAMESPACE, UNHEALTHY_CONFIGMAP_PREFIX
from gpuslice.core.model import Pod, Tier

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
        self.events = EventRecorder(client, "gpushare-device-plugin", host=node, clock=clock, now_ns=now_ns)

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
        patch = {"metadata": {"annotations": {ANN_TIERS: encode_tiers(tiers)}}}
        with contextlib.suppress(NotFoundError):
            await self._client.merge_patch(NODE_PODS, pod.name, patch, pod.namespace, uid=pod.uid)

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

    async def unhealthy(self) -> dict[str, str] | None:
        """The node's ConfigMap of unhealthy cards; None if there is none."""
        try:
            found = await self._client.get(CONFIG_MAPS, self._configmap, SYSTEM_NAMESPACE)
        except NotFoundError:
            return None
        return found.data or {}

    async def set_unhealthy(self, data: Mapping[str, str]) -> None:
        """Write the ConfigMap, creating it if necessary."""
        document = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": self._configmap, "namespace": SYSTEM_NAMESPACE},
            "data": dict(data),
        }
        try:
            await self._client.merge_patch(
                CONFIG_MAPS, self._configmap, {"data": dict(data)}, SYSTEM_NAMESPACE
            )
        except NotFoundError:
            try:
                await self._client.create(CONFIG_MAPS, document, SYSTEM_NAMESPACE)
            except AlreadyExistsError:  # somebody else created it first: add our part
                await self._client.merge_patch(
                    CONFIG_MAPS, self._configmap, {"data": dict(data)}, SYSTEM_NAMESPACE
                )

    @property
    def _configmap(self) -> str:
        return UNHEALTHY_CONFIGMAP_PREFIX + self._node
