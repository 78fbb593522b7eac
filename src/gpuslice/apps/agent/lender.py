"""Lends what nobody requested of a card, and calls it back before somebody else may use it.

A lease is a part of a container's limit beyond its request, in its limits file. All requests and all leases
of a card together are never more than the card has, so that no allocation within a request fails because of
a lease. To that end a lease that becomes smaller counts as it was until the container is seen to use no more,
and a container starts, or grows, only once what it requested is lent to nobody (`make_room`). Who still uses
more than a smaller lease is past its limit, and the watchdog ends what holds the excess: without that
nothing is lent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.live_limits import LOOKED_S, LiveLimits
from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.set_aside import added_by_card
from gpuslice.core.grant import units_per_card
from gpuslice.core.lending import Borrower, Name, kept
from gpuslice.core.model import Card, ContainerRequest
from gpuslice.core.resize import less
from gpuslice.core.units import MIB, limit_bytes

_log = logging.getLogger(__name__)

EVERY_S = 0.2
RESERVE_BYTES = 1024 * MIB
"""Never lent: what the driver keeps of a card for itself, and no container can be given."""
ROOM_S = 20.0
"""The watchdog gives a program 5 s to end; kubelet waits 30 s for a container to be prepared."""


@dataclass(slots=True)
class CardLeases:
    """Of one card, in bytes. `lowered`: what each had before it got less, and when that was."""

    now: dict[Name, int] = field(default_factory=dict)
    lowered: dict[Name, tuple[int, float]] = field(default_factory=dict)

    def lent_bytes(self) -> int:
        """What may be in use beyond requests."""
        before = {name: most for name, (most, _) in self.lowered.items()}
        return sum(max(self.now.get(name, 0), before.get(name, 0)) for name in self.now.keys() | before)


class Lender:
    """`enabled`: whether what is past its limit is ended on this node."""

    def __init__(
        self,
        state: AllocationState,
        folders: Folders,
        *,
        enabled: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self.live = LiveLimits(state, folders, self.lease_bytes)
        self._enabled = enabled
        self._clock = clock
        self._cards: dict[str, CardLeases] = {}  # by uuid

    def lease_bytes(self, uid: str, container: str, card: str) -> int:
        """What a container may have of a card beyond its request."""
        found = self._cards.get(card)
        return found.now.get((uid, container), 0) if found else 0

    def calls_back(self, uid: str, container: str, card: str) -> bool:
        """Whether it was lent more and is not yet seen to use less."""
        return card in self._cards and (uid, container) in self._cards[card].lowered

    async def run(self) -> None:
        """For ever."""
        while True:
            with contextlib.suppress(OSError):  # of a failing disk, which the upkeep reports
                self.check()
            await asyncio.sleep(EVERY_S)

    async def make_room(self, uuids: Collection[str]) -> bool:
        """Wait until what is requested of these cards is lent to nobody; False if that takes too long.

        Raises OSError.
        """
        until_s = self._clock() + ROOM_S
        while True:
            self.check()
            if self.is_settled(uuids):
                return True
            if self._clock() >= until_s:
                return False
            await asyncio.sleep(EVERY_S)

    def check(self) -> None:
        """One round. Raises OSError."""
        for card in self._state.node.cards:
            borrowers = self._borrowers(card)
            if borrowers or card.uuid in self._cards:
                self._lend(card, borrowers)

    def _lend(self, card: Card, borrowers: dict[Name, tuple[NodePod, ContainerRequest, Borrower]]) -> None:
        leases, now_s = self._cards.setdefault(card.uuid, CardLeases()), self._clock()
        leases.now = {name: lease for name, lease in leases.now.items() if name in borrowers}
        for name, (_, at_s) in tuple(leases.lowered.items()):
            found = borrowers.get(name)
            used = found[2].used_bytes if found else 0
            if now_s - at_s >= LOOKED_S and used <= leases.now.get(name, 0):
                del leases.lowered[name]
        asking = [each for _, _, each in borrowers.values()]
        wanted = kept(leases.now, asking, self._free_bytes(card) - RESERVE_BYTES)
        for name in [name for name, lease in leases.now.items() if wanted[name] < lease]:
            before = leases.lowered.get(name, (0, 0.0))[0]
            leases.lowered[name] = max(before, leases.now[name]), now_s
            self._set(leases, name, wanted[name], borrowers)
        if not leases.lowered:  # else it is not free yet
            for name in [name for name in wanted if wanted[name] > leases.now.setdefault(name, 0)]:
                self._set(leases, name, wanted[name], borrowers)
        if not leases.now and not leases.lowered:
            del self._cards[card.uuid]

    def _set(
        self,
        leases: CardLeases,
        name: Name,
        lease_bytes: int,
        borrowers: dict[Name, tuple[NodePod, ContainerRequest, Borrower]],
    ) -> None:
        pod, container, _ = borrowers[name]
        leases.now[name] = lease_bytes
        self.live.change(pod, container.name, self.live.of_request(pod, container))

    def _borrowers(self, card: Card) -> dict[Name, tuple[NodePod, ContainerRequest, Borrower]]:
        """The running containers on a card that may have more than their request."""
        found = {}
        rules = self._state.rules
        for pod in self._state.pods() if self._enabled and rules.isolation and rules.shared else ():
            request = pod.view.request
            if request is None or pod.view.finished or less(pod.view) is not None:
                continue
            for each in request.containers:
                if not each.borrowable or each.name not in pod.running:
                    continue
                name = pod.view.uid, each.name
                in_force = self.live.in_force(pod, each.name).get(card.uuid)
                own = self.live.of_request(pod, each).get(card.uuid, 0) - self.lease_bytes(*name, card.uuid)
                if in_force is None or own <= 0:
                    continue
                self._learn(card, name, in_force - own)
                used = max(0, self.live.used(pod, each.name).get(card.uuid, 0) - own)
                units = min(each.borrowable // request.card_count, card.units)
                most = limit_bytes(card.memory_mib, units, card.units)
                found[name] = pod, each, Borrower(name, used, most, pod.view.priority, pod.came)
        return found

    def _learn(self, card: Card, name: Name, lease_bytes: int) -> None:
        """What an agent before this one lent."""
        leases = self._cards.setdefault(card.uuid, CardLeases())
        if name not in leases.now and lease_bytes > 0:
            leases.now[name] = lease_bytes

    def _free_bytes(self, card: Card) -> int:
        """What nobody requested, and nobody may be about to use."""
        units = Counter(units_per_card(self._state.ids_in_use()))[card.uuid]
        units += sum(cards.get(card.index, 0) for cards in added_by_card(self._state.pods()).values())
        return card.memory_mib * MIB - limit_bytes(card.memory_mib, min(units, card.units), card.units)

    def is_settled(self, uuids: Collection[str]) -> bool:
        """Whether what is requested of these cards is lent to nobody."""
        cards = [card for card in self._state.node.cards if card.uuid in uuids and card.uuid in self._cards]
        return all(self._cards[card.uuid].lent_bytes() <= self._free_bytes(card) for card in cards)
