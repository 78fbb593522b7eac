"""How long cards are reserved for pods that others were evicted for.

The ledger's reservations follow ``status.nominatedNodeName``, which outlives every process: kube-scheduler's
own nominations, for which it keeps an amount but no card, and those of a leader before us.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement, Request
from gpuslice.core.placement import on_cards
from gpuslice.core.preemption import Eviction, eviction
from gpuslice.core.reservation import Reservation, comes_free

_log = logging.getLogger(__name__)

KEPT_S = 60.0  # once the room is there: kube-scheduler tries again every 10 s at most
TURN_S = 0.1  # and for each reservation: where thousands preempt, it tries all others before one again
LOWEST = -(1 << 31)  # nobody has less: with it, only those who are leaving anyway make room


def loop_time() -> float:
    """Seconds on the clock of the event loop, by which everything here waits."""
    return asyncio.get_running_loop().time()


class Reserver:
    """Begins and ends the reservations of a ledger. `lapsed` hears of one that came to nothing."""

    def __init__(
        self,
        ledger: Ledger,
        lapsed: Callable[[Placement], None] = lambda _: None,
        clock: Callable[[], float] = loop_time,
    ) -> None:
        self._ledger = ledger
        self._tell_lapsed = lapsed
        self._clock = clock
        self._since_s: dict[str, float] = {}  # uid → when its reservation began, or somebody was leaving yet
        self._most = 0  # reservations at once, since there were none
        self._lapsed: dict[str, str] = {}  # uid → node of a nomination that came to nothing

    def keep(self, uid: str, priority: int, placement: Placement) -> None:
        """Keep these cards from now on."""
        self._ledger.reservations.keep(Reservation(uid, priority, placement))
        self._since_s[uid] = self._clock()

    def disown(self, uid: str, node: str) -> None:
        """This pod's nomination of this node keeps no cards, though its status may show it a while longer."""
        self._lapsed[uid] = node

    def renew(self) -> None:
        """Take up what the pods' status says now, end what has come to nothing."""
        ledger = self._ledger
        for uid, node in tuple(ledger.nominated.items()):
            # somebody nominated it: keep cards for it, once there is room or some on its way
            pod, allocations = ledger.pods.get(uid), ledger.allocations(node)
            if pod is None or pod.request is None or allocations is None or self._lapsed.get(uid) == node:
                continue
            if ledger.reservations.of(uid) is None and ledger.allocation(uid) is None:
                taken = ledger.reservations.taken(node, uid, pod.priority)
                found = eviction(allocations, pod.request, LOWEST, (), taken)
                if found is not None:
                    self.keep(uid, pod.priority, placement_of(found, pod.request))
        self._most = max(self._most, len(ledger.reservations)) if len(ledger.reservations) else 0
        lasts_s = KEPT_S + TURN_S * self._most
        for reservation in ledger.reservations:
            uid, node = reservation.uid, reservation.placement.node
            allocations = ledger.allocations(node)
            if allocations is not None and comes_free(allocations, reservation):
                self._since_s[uid] = self._clock()
            elif self._since_s.get(uid, -lasts_s) + lasts_s <= self._clock():
                # the room has been there, and nobody came
                ledger.reservations.drop(uid)
                self._lapsed[uid] = node
                _log.info("reservation lapsed", extra={"pod": uid, "node": node})
                self._tell_lapsed(reservation.placement)
        for memory in (self._since_s, self._lapsed):
            for uid in [uid for uid in memory if uid not in ledger.pods]:
                del memory[uid]


def placement_of(found: Eviction, request: Request) -> Placement:
    """The cards on which an eviction makes room."""
    return on_cards(found.node, found.cards, request)
