"""Lends what nobody requested of a card or what lies unused, and calls it back before it is needed.

A lease is a part of a container's limit beyond its request, in its limits file. All requests and all leases
of a card together are never more than the card has, so that no allocation within a request fails because of
a lease. To that end a lease that becomes smaller counts as it was until the container is seen to use no more,
and a container starts, or grows, only once what it requested is lent to nobody (`make_room`). That is so at
once if the memory was free, or as soon as its programs give it back, of which their pressure file tells them.
Of pods that may borrow themselves, what they requested and do not use is lent, too, with some left over: the
limit in their file is then smaller than their request, and an allocation beyond it waits until it is raised.
That is done only where the library is in every program on the card.

Who still uses more is past its limit, and the watchdog ends what holds the excess: without that nothing is
lent.
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
from gpuslice.apps.agent.live_limits import LiveLimits
from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.set_aside import added_by_card
from gpuslice.core.contract import card_of_device_id
from gpuslice.core.grant import units_per_card
from gpuslice.core.lending import LEAST_STEP, Borrower, Name, kept
from gpuslice.core.model import Card, ContainerRequest, Pod
from gpuslice.core.units import MIB, limit_bytes

_log = logging.getLogger(__name__)

EVERY_S = 0.2
WAITING_S = 0.02
"""While somebody waits for what was lent."""
BACK_S = 0.1
"""While a program may come to wait for what is its own."""
UNUSED_FOR_S = 10.0
"""What was wanted back is not lent again so soon."""
LEFT_OVER = 8
LEFT_OVER_BYTES = 1024 * MIB
"""An eighth of a request, or a GiB if that is more, is left to whoever lends from it."""
RESERVE_BYTES = 1024 * MIB
"""Never lent: what the driver keeps of a card for itself, and no container can be given."""
ROOM_S = 20.0
"""The watchdog gives a program 5 s to end; kubelet waits 30 s for a container to be prepared."""


@dataclass(slots=True)
class CardLeases:
    """Of one card, in bytes. `lowered`: what each had before it got less. `wanted_by`: who asked for that."""

    now: dict[Name, int] = field(default_factory=dict)
    lowered: dict[Name, int] = field(default_factory=dict)
    wanted_by: Pod | None = None

    def knows(self, name: Name) -> bool:
        return name in self.now or name in self.lowered

    def lent_bytes(self) -> int:
        """What may be in use beyond requests."""
        both = {name: (self.now.get(name, 0), self.lowered.get(name)) for name in self.now | self.lowered}
        return sum(now if before is None else max(now, before) for now, before in both.values())


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
        self._starting: set[Name] = set()
        self._looked = False  # at what an agent before this one lent
        self._wanted_s: dict[Name, float] = {}  # when it last wanted back what is its own
        self._refused: dict[tuple[Name, str], tuple[int, float]] = {}  # by card, how often, and when at last
        self.is_waiting = asyncio.Event()  # while anything is called back
        self.parked_bytes: Callable[[str, str, str], int] = lambda *_: 0  # by pod uid, container, card
        self.on_card: set[Name] = set()  # whose recorded memory is not lent: it is there, or on its way

    def lease_bytes(self, uid: str, container: str, card: str) -> int:
        """What a container may have of a card beyond its request."""
        found = self._cards.get(card)
        return found.now.get((uid, container), 0) if found else 0

    def calls_back(self, uid: str, container: str, card: str) -> bool:
        """Whether it was lent more and is not yet seen to use less."""
        leases = self._cards.get(card)
        return (
            leases is not None
            and (uid, container) in leases.lowered
            and self.lease_bytes(uid, container, card) >= 0
        )

    def is_urgent(self, card: str) -> bool:
        """Whether a program waits for what is its own of the card."""
        now_s, leases = self._clock(), self._cards.get(card)
        lenders = [name for name, lease in leases.now.items() if lease < 0] if leases else []
        return any(now_s - self._wanted_s.get(name, -UNUSED_FOR_S) < UNUSED_FOR_S for name in lenders)

    def wanted_by(self, card: str) -> Pod | None:
        """For whom the card's leases were last called back, if that is known."""
        return self._cards[card].wanted_by if card in self._cards else None

    async def run(self) -> None:
        """For ever."""
        while True:
            with contextlib.suppress(OSError):  # of a failing disk, which the upkeep reports
                self.check()
            lends = any(lease < 0 for leases in self._cards.values() for lease in leases.now.values())
            await asyncio.sleep(BACK_S if lends else EVERY_S)

    async def make_room(self, uuids: Collection[str], pod: Pod | None, container: str = "") -> bool:
        """Wait until what is requested of these cards is lent to nobody; False if that takes too long.

        For a container that is about to start, which then has all that it requested. Raises OSError.
        """
        until_s, starting = self._clock() + ROOM_S, {(pod.uid, container)} if pod else set()
        self._starting |= starting
        try:
            while True:
                self.check()
                if self.is_settled(uuids, pod):
                    return True
                if self._clock() >= until_s:
                    return False
                await asyncio.sleep(WAITING_S)
        finally:
            self._starting -= starting

    def check(self) -> None:
        """One round. Raises OSError."""
        living = {pod.view.uid for pod in self._state.pods()}
        self._wanted_s = {name: at_s for name, at_s in self._wanted_s.items() if name[0] in living}
        self._refused = {key: found for key, found in self._refused.items() if key[0][0] in living}
        for card in self._state.node.cards:
            borrowers = self._borrowers(card)
            if borrowers or card.uuid in self._cards:
                self._lend(card, borrowers)
        self._looked = True
        if any(leases.lowered for leases in self._cards.values()):
            self.is_waiting.set()
        else:
            self.is_waiting.clear()

    def _lend(self, card: Card, borrowers: dict[Name, tuple[NodePod, ContainerRequest, Borrower]]) -> None:
        leases = self._cards.setdefault(card.uuid, CardLeases())
        leases.now = {name: lease for name, lease in leases.now.items() if name in borrowers}
        asking = [each for _, _, each in borrowers.values()]
        wanted = kept(leases.now, asking, self._free_bytes(card) - RESERVE_BYTES)
        for name in [name for name, lease in leases.now.items() if wanted[name] < lease]:
            leases.lowered[name] = max(leases.lowered.get(name, 0), leases.now[name])
            self._set(leases, name, wanted[name], borrowers)
        for name in tuple(leases.lowered):
            if name not in borrowers or self._is_back(card, *borrowers[name][:2]):
                del leases.lowered[name]
        if not leases.lowered:  # else it is not free yet
            leases.wanted_by = None
            for name in [name for name in wanted if wanted[name] > leases.now.setdefault(name, 0)]:
                self._set(leases, name, wanted[name], borrowers)
        if not leases.now and not leases.lowered:
            del self._cards[card.uuid]

    def _is_back(self, card: Card, pod: NodePod, container: ContainerRequest) -> bool:
        """Whether a container cannot have more than its smaller limit any more; asks it for the rest."""
        leases, name = self._cards[card.uuid], (pod.view.uid, container.name)
        used, limits = self.live.used(pod, container.name), self.live.in_force(pod, container.name)
        if leases.now[name] < 0 and used.get(card.uuid, 0) > limits.get(card.uuid, 0):  # it is its own
            leases.now[name] = 0
            self._wanted_s[name] = self._clock()
            self.live.change(pod, container, self.live.of_request(pod, container))
            return True
        excesses = self.live.ask_back(pod, container.name)
        return not excesses.get(card.uuid) and self.live.driver_knows(pod, container.name)

    def _set(
        self,
        leases: CardLeases,
        name: Name,
        lease_bytes: int,
        borrowers: dict[Name, tuple[NodePod, ContainerRequest, Borrower]],
    ) -> None:
        pod, container, _ = borrowers[name]
        leases.now[name] = lease_bytes
        self.live.change(pod, container, self.live.of_request(pod, container))

    def _borrowers(self, card: Card) -> dict[Name, tuple[NodePod, ContainerRequest, Borrower]]:
        """The running containers on a card that may have more than their request."""
        found = {}
        rules, lends = self._state.rules, None
        for pod in self._state.pods() if self._enabled and rules.isolation and rules.shared else ():
            request = pod.view.request
            if request is None or pod.view.finished:
                continue
            for each in request.containers:
                name = pod.view.uid, each.name
                known = card.uuid in self._cards and self._cards[card.uuid].knows(name)
                if each.name not in pod.running or name in self._starting:
                    continue
                if not (each.borrowable or known) and self._looked:  # else its file need not be read
                    continue
                said = next((one for one in self.live.entries(pod, each.name) if one.uuid == card.uuid), None)
                in_force = said.memory_bytes if said is not None else None
                own = self.live.of_request(pod, each).get(card.uuid, 0) - self.lease_bytes(*name, card.uuid)
                if said is None or in_force is None or own <= 0:
                    continue
                lent = in_force - (in_force if said.request_bytes is None else said.request_bytes)
                if not (each.borrowable or lent or known):
                    continue
                self._learn(card, name, lent)
                used = self.live.used(pod, each.name).get(card.uuid, 0)
                units = min(each.borrowable // request.card_count, card.units)
                most = limit_bytes(card.memory_mib, units, card.units)
                lends = self._is_held_by_library(card) if lends is None else lends
                spare = self._spare_bytes(card, pod, each, own, used) if lends and each.borrowable else 0
                presses = used >= in_force - in_force // LEFT_OVER or self._was_refused(card, pod, each)
                found[name] = (
                    pod,
                    each,
                    Borrower(name, max(0, used - own), most, pod.view.priority, pod.came, spare, presses),
                )
        return found

    def _was_refused(self, card: Card, pod: NodePod, container: ContainerRequest) -> bool:
        """Whether an allocation of the container was refused lately."""
        key, now_s = ((pod.view.uid, container.name), card.uuid), self._clock()
        account = self.live.accounts(pod, container.name).get(card.uuid)
        count, at_s = self._refused.get(key, (account.refused if account else 0, -UNUSED_FOR_S))
        if account is not None and account.refused > count:
            at_s = now_s
        self._refused[key] = account.refused if account else 0, at_s
        return now_s - at_s < UNUSED_FOR_S

    def _spare_bytes(self, card: Card, pod: NodePod, container: ContainerRequest, own: int, used: int) -> int:
        """What may be lent of a container's request, in whole steps."""
        name, now_s = (pod.view.uid, container.name), self._clock()
        lent = -min(0, self.lease_bytes(*name, card.uuid))
        left_over = max(own // LEFT_OVER, LEFT_OVER_BYTES)
        account = self.live.accounts(pod, container.name).get(card.uuid)
        if lent and ((account and account.wanted_bytes) or used > own - lent - left_over // 2):
            self._wanted_s[name] = now_s
            self._cards[card.uuid].wanted_by = pod.view
        if pod.interactive or now_s - self._wanted_s.get(name, -UNUSED_FOR_S) < UNUSED_FOR_S:
            return 0
        return max(lent, (own - used - left_over) // LEAST_STEP * LEAST_STEP)

    def _is_held_by_library(self, card: Card) -> bool:
        """Whether the library is in every program on the card: then allocations can wait."""
        if card.uuid in self._state.by_driver.cards:
            return False
        for each in self._state.assignments or ():
            if card.uuid in {card_of_device_id(one) for one in each.ids}:
                pod = self._state.pod_named(each.pod_key)
                if pod is None or each.container in pod.unlimited or each.container in pod.tiers:
                    return False
        return True

    def _learn(self, card: Card, name: Name, lease_bytes: int) -> None:
        """What an agent before this one lent."""
        leases = self._cards.setdefault(card.uuid, CardLeases())
        if name not in leases.now and lease_bytes:
            leases.now[name] = lease_bytes

    def _free_bytes(self, card: Card) -> int:
        """What nobody requested, and nobody may be about to use."""
        parked = sum(
            self.parked_bytes(pod.view.uid, each, card.uuid)
            for pod in self._state.pods()
            for each in pod.parked
        )
        units = Counter(units_per_card(self._state.ids_in_use()))[card.uuid]
        units += sum(cards.get(card.index, 0) for cards in added_by_card(self._state.pods()).values())
        return (
            parked + card.memory_mib * MIB - limit_bytes(card.memory_mib, min(units, card.units), card.units)
        )

    def starts(self, ids: frozenset[str]) -> None:
        """Another run of the container with these ids begins, of which nothing is parked."""
        for pod in self._state.pods():
            found = {each: self._state.listed_ids(pod.view.uid, each) for each in pod.parked}
            mine = [each for each, listed in found.items() if listed and ids & listed]
            self.on_card |= {(pod.view.uid, each) for each in mine}

    def wants(self, card: Card, but: Name) -> bool:
        """Whether a borrower of the card other than `but` has little left and may have more."""
        for name, (pod, container, borrower) in self._borrowers(card).items():
            limit = self.live.in_force(pod, container.name).get(card.uuid, 0)
            left = limit - self.live.used(pod, container.name).get(card.uuid, 0)
            may_have = self.lease_bytes(*name, card.uuid) < borrower.most_bytes
            if name != but and may_have and left < max(LEAST_STEP, limit // 8):
                return True
        return False

    def is_settled(self, uuids: Collection[str], pod: Pod | None) -> bool:
        """Whether what is requested of these cards is lent to nobody; `pod`: who requested it."""
        cards = [card for card in self._state.node.cards if card.uuid in uuids and card.uuid in self._cards]
        waits_for = [card for card in cards if self._cards[card.uuid].lent_bytes() > self._free_bytes(card)]
        for card in waits_for:
            self._cards[card.uuid].wanted_by = pod
        return not waits_for
