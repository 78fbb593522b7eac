"""The device list that kubelet follows: the last one at once, then each change in one message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection

from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.adapters.kubelet.rpc import HEALTHY, UNHEALTHY
from gpuslice.apps.agent.node import device_ids
from gpuslice.core.model import Gpu

SETTLE_S = 0.1
"""Several faults at once are one message: kubelet writes its checkpoint for each."""


class DeviceList:
    """Cards as kubelet's devices, told to every stream that is open."""

    def __init__(self) -> None:
        self.gpus: tuple[Gpu, ...] = ()
        self.unhealthy: frozenset[str] = frozenset()  # uuids
        self._version = 0
        self._changed = asyncio.Condition()

    async def update(self, gpus: tuple[Gpu, ...], unhealthy: Collection[str]) -> None:
        """The cards now and the uuids of those not to be given out."""
        if (gpus, frozenset(unhealthy)) == (self.gpus, self.unhealthy):
            return
        self.gpus, self.unhealthy = gpus, frozenset(unhealthy)
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def messages(self) -> AsyncGenerator[dp.ListAndWatchResponse]:
        """The complete list now, and again after each change."""
        while True:
            version = self._version
            yield self._message()
            async with self._changed:
                await self._changed.wait_for(lambda seen=version: self._version != seen)  # type: ignore[misc]
            await asyncio.sleep(SETTLE_S)

    def counts(self) -> dict[str, int]:
        """How many devices there are of each health."""
        bad = sum(gpu.units for gpu in self.gpus if gpu.uuid in self.unhealthy)
        return {HEALTHY: sum(gpu.units for gpu in self.gpus) - bad, UNHEALTHY: bad}

    def _message(self) -> dp.ListAndWatchResponse:
        return dp.ListAndWatchResponse(
            devices=[
                dp.Device(ID=identifier, health=UNHEALTHY if gpu.uuid in self.unhealthy else HEALTHY)
                for gpu in self.gpus
                for identifier in device_ids(gpu)
            ]
        )
