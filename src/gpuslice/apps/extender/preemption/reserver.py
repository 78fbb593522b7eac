"""How long cards are reserved for pods for which others were evicted.

The ledger's reservations follow ``status.nominatedNodeName``, which outlives every process: they include
kube-scheduler's own nominations, for which it keeps an amount but no card, and those of an earlier leader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gpuslice.apps.extender.loop_clock import loop_time
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement
from gpuslice.core.placement import on_cards
from gpuslice.core.preemption import LOWEST, eviction
from gpuslice.core.reservation import Reservation, comes_free

_log = logging.getLogger(__name__)

KEPT_S = 60.0  # once there is room: kube-scheduler retries at least every 10 s
PACE_S = 10.0  # and longer while pods take theirs at least this often: it tries thousands one after the other
LONGEST_S = 600.0


class Reserver:
    """Begins and ends the reservations of a ledger. `lapsed` is called for one that came to nothing."""

    def __init__(
        self,
        ledger: Ledger,
        lapsed: Callable[[Placement], None] = lambda _: None,
        clock: Callable[[], float] = loop_time,
    ) -> None:
        self._ledger = ledger
        self._tell_lapsed = lapsed
        self._clock = clock
        self._since_s: dict[str, float] = {}  # uid → when it began, or a victim was last still leaving
        self._kept: set[str] = set()  # uids at the last check
        self._taken_s = 0.0  # when a pod last took what was reserved for it
        self._lapsed: dict[str, str] = {}  # uid → the node of a nomination that came to nothing

    def keep(self, uid: str, priority: int, placement: Placement) -> None:
        """Reserve these cards from now on."""
        self._ledger.reservations.keep(Reservation(uid, priority, placement))
        self._since_s[uid] = self._clock()

    def disown(self, uid: str, node: str) -> None:
        """This pod's nomination to this node keeps no cards, even if its status shows it a while longer."""
        self._lapsed[uid] = node

    def renew(self) -> None:
        """Begin reservations for nominations in the pods' status, and end those that came to nothing."""
        ledger = self._ledger
        for uid, node in tuple(ledger.nominated.items()):
            # it was nominated: keep cards for it, once there is room or some is coming
            pod, allocations = ledger.pods.get(uid), ledger.allocations(node)
            if pod is None or pod.request is None or allocations is None or self._lapsed.get(uid) == node:
                continue
            if ledger.reservations.of(uid) is None and ledger.allocation(uid) is None:
                taken = ledger.reservations.taken(node, uid, pod.priority)
                found = eviction(allocations, pod.request, LOWEST, (), taken)
                if found is not None:
                    self.keep(uid, pod.priority, on_cards(node, found.cards, pod.request))
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
                # there was room, and nobody came
                ledger.reservations.drop(uid)
                self._lapsed[uid] = node
                _log.info("reservation lapsed", extra={"pod": uid, "node": node})
                self._tell_lapsed(reservation.placement)
        for memory in (self._since_s, self._lapsed):
            for uid in [uid for uid in memory if uid not in ledger.pods]:
                del memory[uid]
