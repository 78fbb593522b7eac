"""The device list that kubelet follows: the last one at once, then each change in one message."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Collection

from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.adapters.kubelet.rpc import HEALTHY, UNHEALTHY
from gpuslice.apps.agent.node import device_ids
from gpuslice.core.contract import card_of_device_id
from gpuslice.core.model import Card

SETTLE_S = 0.1
"""Several faults at once are one message: kubelet writes its checkpoint for each."""


class DeviceList:
    """Cards as kubelet's devices, told to every stream that is open."""

    def __init__(self) -> None:
        self.cards: tuple[Card, ...] = ()
        self.unhealthy: frozenset[str] = frozenset()  # uuids
        self.only: frozenset[str] | None = None  # ids that alone may be had; None: all of healthy cards
        self._version = 0
        self._changed = asyncio.Condition()

    async def update(self, cards: tuple[Card, ...], unhealthy: Collection[str]) -> None:
        """The cards now and the uuids of those not to be given out."""
        if (cards, frozenset(unhealthy)) == (self.cards, self.unhealthy):
            return
        self.cards, self.unhealthy = cards, frozenset(unhealthy)
        await self._tell()

    async def keep(self, only: frozenset[str] | None) -> None:
        """Give out nothing but `only`; None: give out everything again."""
        if only != self.only:
            self.only = only
            await self._tell()

    async def _tell(self) -> None:
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
        given_out = {card.uuid: card.units for card in self.cards}
        if self.only is not None:
            given_out = Counter(map(card_of_device_id, self.only))
        good = sum(units for uuid, units in given_out.items() if uuid not in self.unhealthy)
        return {HEALTHY: good, UNHEALTHY: sum(card.units for card in self.cards) - good}

    def _message(self) -> dp.ListAndWatchResponse:
        return dp.ListAndWatchResponse(
            devices=[
                dp.Device(ID=identifier, health=self._health(card, identifier))
                for card in self.cards
                for identifier in device_ids(card)
            ]
        )

    def _health(self, card: Card, identifier: str) -> str:
        given_out = self.only is None or identifier in self.only
        return HEALTHY if given_out and card.uuid not in self.unhealthy else UNHEALTHY
