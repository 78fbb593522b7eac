"""How long cards are reserved for pods that others were evicted for.

The ledger's reservations follow ``status.nominatedNodeName``, which outlives every process: kube-scheduler's
own nominations, for which it keeps an amount but no card, and those of a leader before us.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gpuslice.apps.extender.loop_clock import loop_time
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement, Request
from gpuslice.core.placement import on_cards
from gpuslice.core.preemption import LOWEST, Eviction, eviction
from gpuslice.core.reservation import Reservation, comes_free

_log = logging.getLogger(__name__)

KEPT_S = 60.0  # once the room is there: kube-scheduler tries again every 10 s at most
PACE_S = 10.0  # and while others come for theirs at least so often: it tries thousands one after the other
LONGEST_S = 600.0


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
        self._kept: set[str] = set()  # uids at the last look
        self._taken_s = 0.0  # when a pod last came for what was reserved for it
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
        now_s, kept = self._clock(), {reservation.uid for reservation in ledger.reservations}
        if any(ledger.allocation(uid) is not None for uid in self._kept - kept):
            self._taken_s = now_s
        self._kept, patience_s = kept, LONGEST_S if now_s < self._taken_s + PACE_S else KEPT_S
        for reservation in ledger.reservations:
            uid, node = reservation.uid, reservation.placement.node
            allocations = ledger.allocations(node)
            if allocations is not None and comes_free(allocations, reservation):
                self._since_s[uid] = now_s
            elif self._since_s.get(uid, -LONGEST_S) + patience_s <= now_s:
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
