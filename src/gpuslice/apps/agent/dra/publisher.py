"""Keeps this node's ResourceSlices as they should be, whoever deletes or changes them.

kubelet deletes a node's slices when it starts, and half a minute after the driver's socket is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import NotFoundError
from gpuslice.adapters.kube.resources import RESOURCE_SLICES
from gpuslice.adapters.kube.watch import Reflector
from gpuslice.apps.agent.upkeep import Owned, Upkeep
from gpuslice.core.claims import MOST_DEVICES, same_devices
from gpuslice.core.contract import CLAIM_DRIVER

_log = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often to check what there is to publish."""

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
        self,
        client: KubeClient,
        node: str,
        devices: Callable[[], Devices],
        node_uid: Callable[[], str],
        tell: Callable[[str], None],
    ) -> None:
        self._client = client
        self._node = node
        self._devices = devices
        self._node_uid = node_uid
        self._dropped: set[str] = set()  # those of `GATED_FIELDS` that this one leaves out
        self.upkeep = Upkeep(self._owned, tell, every_s=LOOK_S)
        fields = f"spec.nodeName={node},spec.driver={CLAIM_DRIVER}"
        self._reflector: Reflector[dict[str, Any]] = Reflector(
            client, RESOURCE_SLICES, lambda _: self.upkeep.wake(), fields=fields, cached=True
        )

    async def run(self) -> None:
        """Publish for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reflector.run())
            await self._reflector.synced.wait()
            await self.upkeep.run()

    @property
    def problem(self) -> str:
        """Why not all is as it should be; "" once it is."""
        if self.upkeep.problems or not self.upkeep.settled:
            return next(iter(self.upkeep.problems.values()), "not published yet")
        return NOT_SHARED if "allowMultipleAllocations" in self._dropped else ""

    @property
    def withdrawn(self) -> bool:
        """Whether the API server is known to have no slice of ours."""
        return self._reflector.synced.is_set() and not self._reflector.objects

    def _owned(self) -> Iterator[Owned]:
        """A pool counts only when every slice of its newest generation exists."""
        devices = [] if "allowMultipleAllocations" in self._dropped else self._devices()
        if "taints" in self._dropped:  # then a card that must not be given out can only be left out
            devices = [each for each in devices if "taints" not in each]
        parts = [devices[at : at + MOST_DEVICES] for at in range(0, len(devices), MOST_DEVICES)]
        wanted = {f"{self._node}-{CLAIM_DRIVER}-{number}": part for number, part in enumerate(parts)}
        present = {each["metadata"]["name"]: each for each in self._reflector.objects.values()}
        generation = max((each["spec"]["pool"]["generation"] for each in present.values()), default=1)
        if present and present.keys() != wanted.keys():
            generation += 1
        owner = {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": self._node_uid()}
        for name, part in wanted.items():
            pool = {"name": self._node, "generation": generation, "resourceSliceCount": len(wanted)}
            before = present.get(name, {"metadata": {}, "spec": {}})
            meta, spec = before["metadata"], before["spec"]
            right = spec.get("pool") == pool and same_devices(part, spec.get("devices"))
            right = right and owner in (meta.get("ownerReferences") or ())
            document: dict[str, Any] = {
                "metadata": {"name": name, "ownerReferences": [owner]},
                "spec": {"driver": CLAIM_DRIVER, "nodeName": self._node, "pool": pool, "devices": part},
            }
            if meta:
                document["metadata"]["resourceVersion"] = meta["resourceVersion"]
            yield Owned(f"ResourceSlice {name}", right, True, partial(self._put, document))
        for name in present.keys() - wanted.keys():
            yield Owned(f"ResourceSlice {name}", "published", "withdrawn", partial(self._withdraw, name))

    async def _put(self, document: dict[str, Any]) -> None:
        write = self._client.replace if "resourceVersion" in document["metadata"] else self._client.create
        stored = await write(RESOURCE_SLICES, document)
        for ours, kept in zip(document["spec"]["devices"], stored["spec"].get("devices") or (), strict=False):
            if dropped := GATED_FIELDS & (ours.keys() - kept.keys()) - self._dropped:
                _log.warning("the API server leaves fields out", extra={"fields": sorted(dropped)})
                self._dropped |= dropped
                self.upkeep.wake()

    async def _withdraw(self, name: str) -> None:
        with contextlib.suppress(NotFoundError):
            await self._client.delete(RESOURCE_SLICES, name)
