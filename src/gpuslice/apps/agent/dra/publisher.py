"""Keeps this node's ResourceSlices as they should be, whoever deletes or changes them.

kubelet deletes a node's slices when it starts, and half a minute after the driver's socket is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import AlreadyExistsError, ConflictError, KubeError, NotFoundError
from gpuslice.adapters.kube.resources import RESOURCE_SLICES
from gpuslice.adapters.kube.watch import Change, Reflector
from gpuslice.core.claims import MOST_DEVICES, same_devices
from gpuslice.core.contract import CLAIM_DRIVER

_log = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often to check what there is to publish."""
RETRY_S = 1.0

GATED_FIELDS = frozenset({"allowMultipleAllocations", "taints"})
"""The API server leaves them out where their feature gates are off."""

Devices = list[dict[str, Any]]

NOT_SHARED = (
    "the API server stores ResourceSlices without allowMultipleAllocations, so no card can be shared: switch "
    "feature gate DRAConsumableCapacity on in kube-apiserver, kube-scheduler, kube-controller-manager and "
    "kubelet, and restart this agent"
)


class SlicePublisher:
    """Publishes what `devices` returns; an empty list means nothing. `node_uid`: whose slices they are."""

    def __init__(
        self, client: KubeClient, node: str, devices: Callable[[], Devices], node_uid: Callable[[], str]
    ) -> None:
        self.problem = "not published yet"  # "" once all is as it should be
        self._client = client
        self._node = node
        self._devices = devices
        self._node_uid = node_uid
        self._woken = asyncio.Event()
        self._dropped: set[str] = set()  # those of `GATED_FIELDS` that this one leaves out
        fields = f"spec.nodeName={node},spec.driver={CLAIM_DRIVER}"
        self._reflector: Reflector[dict[str, Any]] = Reflector(
            client, RESOURCE_SLICES, self._changed, fields=fields, cached=True
        )

    async def run(self) -> None:
        """Publish for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reflector.run())
            await self._reflector.synced.wait()
            while True:
                self._woken.clear()
                try:
                    await self._publish()
                    self.problem = NOT_SHARED if "allowMultipleAllocations" in self._dropped else ""
                except (ConflictError, AlreadyExistsError):
                    pass  # the watch is behind our own write, and wakes us when it has caught up
                except KubeError as error:
                    if str(error) != self.problem:
                        about = {"error": str(error)}
                        _log.warning("ResourceSlices not written, will try again", extra=about)
                    self.problem = str(error)
                    await asyncio.sleep(RETRY_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._woken.wait()

    @property
    def withdrawn(self) -> bool:
        """Whether the API server is known to have no slice of ours."""
        return self._reflector.synced.is_set() and not self._reflector.objects

    def _changed(self, _: Change[dict[str, Any]]) -> None:
        self._woken.set()

    async def _publish(self) -> None:
        """Write what differs. A pool counts only when every slice of its newest generation exists."""
        devices = [] if "allowMultipleAllocations" in self._dropped else self._devices()
        if "taints" in self._dropped:  # then a card that must not be given out can only be left out
            devices = [each for each in devices if "taints" not in each]
        parts = [devices[at : at + MOST_DEVICES] for at in range(0, len(devices), MOST_DEVICES)]
        wanted = {f"{self._node}-{CLAIM_DRIVER}-{number}": part for number, part in enumerate(parts)}
        present = {each["metadata"]["name"]: each for each in self._reflector.objects.values()}
        generation = max((each["spec"]["pool"]["generation"] for each in present.values()), default=1)
        if present and present.keys() != wanted.keys():
            generation += 1
        for name, part in wanted.items():
            pool = {"name": self._node, "generation": generation, "resourceSliceCount": len(wanted)}
            before = present.get(name)
            spec = before["spec"] if before else {}
            if spec.get("pool") == pool and same_devices(part, spec.get("devices")):
                continue
            owner = {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": self._node_uid()}
            document: dict[str, Any] = {
                "metadata": {"name": name, "ownerReferences": [owner]},
                "spec": {"driver": CLAIM_DRIVER, "nodeName": self._node, "pool": pool, "devices": part},
            }
            if before is None:
                stored = await self._client.create(RESOURCE_SLICES, document)
            else:
                document["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
                stored = await self._client.replace(RESOURCE_SLICES, document)
            _log.info("ResourceSlice written", extra={"slice": name, "devices": len(part)})
            for ours, kept in zip(part, stored["spec"].get("devices") or (), strict=False):
                if dropped := GATED_FIELDS & (ours.keys() - kept.keys()) - self._dropped:
                    _log.warning("the API server leaves fields out", extra={"fields": sorted(dropped)})
                    self._dropped |= dropped
                    self._woken.set()
        for name in present.keys() - wanted.keys():
            with contextlib.suppress(NotFoundError):
                await self._client.delete(RESOURCE_SLICES, name)
            _log.info("ResourceSlice withdrawn", extra={"slice": name})
