"""Which card a device of dynamic resource allocation is: the driver's ResourceSlices of this node say.

They are asked for when kubelet's book has a claim whose device is not known yet, so a node without claims
never asks. Source of the attributes: NVIDIA's driver ``gpu.nvidia.com`` gives each device its ``uuid``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.resources import DICT, Resource
from gpuslice.adapters.kubelet.podresources import Claimed
from gpuslice.apps.exporter.book import NVIDIA_DRIVER

_log = logging.getLogger(__name__)
VERSIONS = ("v1", "v1beta2", "v1beta1")
ASK_AGAIN_S = 30.0


class DeviceSlices:
    """(pool, device) → uuid. Without a `client` nothing is known."""

    def __init__(
        self, client: KubeClient | None, node: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._node = node
        self._clock = clock
        self._known: dict[tuple[str, str], str] = {}
        self._due_s = 0.0
        self._told = False

    async def of(self, claims: Iterable[Claimed]) -> Mapping[tuple[str, str], str]:
        """What is known; asks the API server first where a device of `claims` is not."""
        ours = [(each.pool, each.device) for each in claims if each.driver == NVIDIA_DRIVER]
        if self._client is not None and self._clock() >= self._due_s and set(ours) - self._known.keys():
            self._due_s = self._clock() + ASK_AGAIN_S
            try:
                self._known |= await self._ask(self._client)
            except KubeError as error:
                if not self._told:
                    _log.warning("ResourceSlices not read", extra={"error": str(error)})
                self._told = True
        return self._known

    async def _ask(self, client: KubeClient) -> dict[tuple[str, str], str]:
        for version in VERSIONS:
            slices = Resource(
                f"resource.k8s.io/{version}", "resourceslices", "ResourceSlice", DICT, namespaced=False
            )
            try:
                found = await client.list(slices, fields=f"spec.nodeName={self._node}")
            except NotFoundError:  # this server does not have the version
                continue
            return {key: uuid for each in found.items or () for key, uuid in devices_of(each)}
        return {}


def devices_of(document: Mapping[str, Any]) -> Iterable[tuple[tuple[str, str], str]]:
    """((pool, device), uuid) of one slice, of any version of the API."""
    spec = document.get("spec", {})
    if spec.get("driver") != NVIDIA_DRIVER:
        return
    for device in spec.get("devices") or ():
        attributes = (device.get("basic") or device).get("attributes") or {}
        uuid = (attributes.get("uuid") or attributes.get(f"{NVIDIA_DRIVER}/uuid") or {}).get("string", "")
        if uuid:
            yield (spec.get("pool", {}).get("name", ""), device.get("name", "")), uuid
