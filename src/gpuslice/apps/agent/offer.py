"""What kubelet may give out by the node's rules: everything, or nothing beyond what is held already.

kubelet asks the plugin before each start of a container. So where cards are not shared any more, it is served
until the last pod that holds a part of one has ended: their containers start again, and nobody else gets any.
What they hold stays healthy, because kubelet does not take in a pod again whose devices are not, and tells
in the pod's status; everything else is unhealthy, which leaves a scheduler nothing to give.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gpuslice.apps.agent.desk import Desk
from gpuslice.apps.agent.devices import DeviceList
from gpuslice.core.mode import Rules
from gpuslice.core.model import Refusal

LOOK_EVERY_S = 0.2

_log = logging.getLogger(__name__)


class Offer:
    """The device list of one node as its rules and its pods want it."""

    def __init__(self, desk: Desk, devices: DeviceList, rules: Callable[[], Rules]) -> None:
        self._desk = desk
        self._devices = devices
        self._rules = rules

    @property
    def ended(self) -> bool:
        """Whether nobody needs kubelet to know of the cards."""
        return not self._rules().shared and not self._desk.holders()

    @property
    def unknown(self) -> bool:
        """Whether it cannot be told yet what is held."""
        return not self._rules().shared and self._desk.book is None

    async def keep_until_ended(self) -> None:
        """Keep the list as it has to be."""
        while not self.ended:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)
        _log.info("leaving kubelet: the cards are not shared, and nobody holds a part of one any more")

    async def look(self) -> None:
        await self._devices.keep(None if self._rules().shared else self._held())

    def refusal(self, ids: frozenset[str]) -> Refusal | None:
        """Why nobody new may have `ids`: who holds them may have ended a moment ago."""
        if self._rules().shared or ids <= self._held():
            return None
        return Refusal(f"node {self._desk.node.name} does not share its cards any more: its labels say so")

    def _held(self) -> frozenset[str]:
        """By kubelet's book, of pods that have not ended."""
        holders = set(self._desk.holders())
        return frozenset[str]().union(
            *(each.ids for each in self._desk.book or () if each.pod_key in holders)
        )
