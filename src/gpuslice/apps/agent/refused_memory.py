"""An event on a pod whose memory requests were refused, since that is what a person looks at first.

The library counts refusals in the container's region, where its own processes can write: the events are for
people, and nothing depends on them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.sizing import suggested_size

_log = logging.getLogger(__name__)

EVERY_S = 5.0
REASON = "GPUMemoryRefused"


class RefusedOf(NamedTuple):
    """A container on a card. `uid` is its pod's."""

    uid: str
    container: str
    card: str


class RefusedMemory:
    """Checks the counters of all regions now and then. A repeated event only raises its count."""

    def __init__(self, state: AllocationState, folders: Folders, writer: Writer) -> None:
        self._state = state
        self._folders = folders
        self._writer = writer
        self._told: dict[RefusedOf, int] | None = None  # None before the first check

    async def run(self) -> None:
        """Check for ever. What a tenant writes in its region stops nobody."""
        while True:
            try:
                await self.check()
            except Exception as error:  # a tenant can provoke anything
                _log.warning("refusals not read, will try again", exc_info=error)
            await asyncio.sleep(EVERY_S)

    async def check(self) -> None:
        """One check. What was refused before this agent started, the previous agent has reported."""
        folders = await asyncio.to_thread(lambda: list(self._folders.counts()))
        found = {
            RefusedOf(owner.uid, owner.container, card): counted.refused
            for _, owner, counts in folders
            for card, counted in counts.items()
            if owner.uid and counted.refused
        }
        before, self._told = self._told, found
        for place, number in found.items():
            if before is None or number <= before.get(place, 0):
                continue
            pod = self._state.pod(place.uid)
            limit = (self._state.limits(place.uid, place.container) or {}).get(place.card)
            if pod is None or limit is None:
                continue
            card = limit.card
            size = {"units": limit.units, "card_units": card.units, "card_mib": card.memory_mib}
            better = suggested_size(**size, peak_mib=limit.memory_mib, refused=True)
            count = pod.view.request.card_count if pod.view.request is not None else 1
            on = "" if count == 1 else f" on each of {count} cards"
            ask = (
                f"ask for {better.units * count} of {card.units * count} units or more, which is "
                f"{better.limit_mib} MiB{on}"
                if better is not None
                else "it has the whole card already"
            )
            what = f"container {place.container} was refused memory of card {card.index}"
            self._writer.pod_event(
                pod.view, REASON, f"{what}: it would have passed its limit of {limit.memory_mib} MiB; {ask}"
            )
