"""The node's cards as kubelet's devices: each unit is a device, healthy if it may be given out.

kubelet asks the plugin before each start of a container. So on a node that no longer shares its cards, the
list is served until the last pod that holds a slice has ended: its containers can restart, and nobody else
gets any. What they hold stays healthy, because kubelet does not admit a pod again whose devices are
unhealthy, and reports that in the pod's status. Everything else is unhealthy, so that a scheduler has nothing
to give.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable

from gpuslice.adapters.gpu.source import DriverCard
from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.adapters.kubelet.rpc import HEALTHY, UNHEALTHY
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.core.contract import card_of_device_id, device_id
from gpuslice.core.errors import GpusliceError
from gpuslice.core.model import Card
from gpuslice.core.units import UNIT_MIB, card_units

_log = logging.getLogger(__name__)

SETTLE_S = 0.1
"""Several faults at once are one message, since kubelet writes its checkpoint for each."""
REFRESH_S = 0.2

MOST_LIST_BYTES = 4 * 1024 * 1024
"""gRPC's limit for one message in kubelet; ListAndWatch has to name every device in one."""
ENTRY_BYTES = 26  # tags, lengths, "Unhealthy" and some room, besides the id itself


class TooManyUnitsError(GpusliceError):
    """The cards in this unit are more devices than one message to kubelet may hold."""


def memory_unit(wanted: str) -> tuple[str, str]:
    """The unit to use, and a warning if `wanted` is not one: like the vendor's plugin we fall back to GiB."""
    if wanted in UNIT_MIB:
        return wanted, ""
    return "GiB", f'memory unit "{wanted}" is unknown, must be {" or ".join(UNIT_MIB)}; using GiB'


def cut(cards: Iterable[DriverCard], unit: str) -> tuple[Card, ...]:
    """Each card in its own number of units, in index order. Raises `TooManyUnitsError`."""
    found = tuple(
        Card(card.index, card.uuid, card.memory_mib, card_units(card.memory_mib, unit), card.model)
        for card in sorted(cards, key=lambda card: card.index)
    )
    size_bytes = sum(card.units * (len(card.uuid) + 8 + ENTRY_BYTES) for card in found)
    if size_bytes > MOST_LIST_BYTES:
        units = sum(card.units for card in found)
        raise TooManyUnitsError(
            f"{units} devices in units of 1 {unit} are about {size_bytes // 1024} KiB, "
            f"and kubelet takes {MOST_LIST_BYTES // 1024} KiB at once; use --memory-unit=GiB"
        )
    return found


class DeviceList:
    """The list that every open ListAndWatch stream follows: the last one at once, then each change."""

    def __init__(self, state: AllocationState) -> None:
        self._state = state
        self._cards: tuple[Card, ...] = ()
        self._unhealthy: frozenset[str] = frozenset()  # uuids
        self._only: frozenset[str] | None = None  # the only ids given out; None: all of healthy cards
        self._aside: frozenset[str] = frozenset()  # ids given to nobody, as last told
        self._version = 0
        self._changed = asyncio.Condition()

    # -- what is given out ----------------------------------------------------------------------------

    async def update(self, cards: tuple[Card, ...], unhealthy: Collection[str]) -> None:
        """The cards now, and the uuids of those not to be given out."""
        await self._set(cards, frozenset(unhealthy), self._only, self._aside)

    async def refresh(self) -> None:
        """If cards are no longer shared, offer nothing but what is held.

        That includes containers that are not listed: a kubelet that has just started lists none yet.
        """
        unlisted = (each.assignment.ids for each in self._state.maybe_forgotten())
        only = None if self._state.rules.shared else self._state.ids_of_living().union(*unlisted)
        await self._set(self._cards, self._unhealthy, only, self._set_aside())

    def _set_aside(self) -> frozenset[str]:
        return frozenset[str]().union(*self._state.aside.ids().values())

    async def _set(
        self,
        cards: tuple[Card, ...],
        unhealthy: frozenset[str],
        only: frozenset[str] | None,
        aside: frozenset[str],
    ) -> None:
        if (cards, unhealthy, only, aside) != (self._cards, self._unhealthy, self._only, self._aside):
            self._cards, self._unhealthy, self._only, self._aside = cards, unhealthy, only, aside
            async with self._changed:
                self._version += 1
                self._changed.notify_all()

    @property
    def needless(self) -> bool:
        """Whether nobody needs kubelet to know the cards."""
        return not self._state.rules.shared and not self._state.holders()

    async def refresh_while(self, wanted: Callable[[], bool]) -> None:
        """Until nobody needs kubelet to know the cards, or as long as `wanted`."""
        while wanted() and not self.needless:
            await self.refresh()
            await asyncio.sleep(REFRESH_S)
        if self.needless:
            _log.info("leaving kubelet: the cards are not shared, and nobody holds a slice of one any more")

    # -- what kubelet sees ----------------------------------------------------------------------------

    async def messages(self) -> AsyncGenerator[dp.ListAndWatchResponse]:
        """The complete list now, and again after each change.

        Devices name no NUMA node: with a topology manager policy, kubelet would count the free units of each
        node, not of each card, and offer us only those of another card than the pod was placed on.
        """
        while True:
            version, devices, aside = self._version, [], self._set_aside()
            for card in self._cards:
                for identifier in (device_id(card.uuid, unit) for unit in range(card.units)):
                    given_out = self._only is None or identifier in self._only
                    healthy = given_out and card.uuid not in self._unhealthy and identifier not in aside
                    health = HEALTHY if healthy else UNHEALTHY
                    devices.append(dp.Device(ID=identifier, health=health))
            yield dp.ListAndWatchResponse(devices=devices)
            async with self._changed:
                await self._changed.wait_for(lambda seen=version: self._version != seen)  # type: ignore[misc]
            await asyncio.sleep(SETTLE_S)

    def counts(self) -> dict[str, int]:
        """How many devices there are of each health."""
        given_out = Counter({card.uuid: card.units for card in self._cards})
        if self._only is not None:
            given_out = Counter(map(card_of_device_id, self._only))
        given_out = given_out - Counter(map(card_of_device_id, self._aside))
        good = sum(units for uuid, units in given_out.items() if uuid not in self._unhealthy)
        return {HEALTHY: good, UNHEALTHY: sum(card.units for card in self._cards) - good}
