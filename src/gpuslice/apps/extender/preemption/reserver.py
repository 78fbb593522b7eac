"""How long cards are reserved for pods for which others were evicted.

The ledger's reservations follow ``status.nominatedNodeName``, which outlives every process: they include
kube-scheduler's own nominations, for which it keeps an amount but no card, and those of an earlier leader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gpuslice.apps.extender.loop_clock import loop_time
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement, Pod
from gpuslice.core.placement import on_cards
from gpuslice.core.preemption import LOWEST, eviction

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
        self._kept: set[str] = set()  # uids at the last check
        self._taken_s = 0.0  # when a pod last took what was reserved for it
        self._lapsed: dict[str, str] = {}  # uid → the node of a nomination that came to nothing

    def keep(self, pod: Pod, placement: Placement) -> None:
        """Reserve these cards from now on."""
        self._ledger.holds.reserve(pod, placement, self._clock() + KEPT_S)

    def disown(self, uid: str, node: str) -> None:
        """This pod's nomination to this node keeps no cards, even if its status shows it a while longer."""
        self._lapsed[uid] = node

    def renew(self) -> None:
        """Begin reservations for nominations in the pods' status, and end those that came to nothing."""
        ledger = self._ledger
        for uid, node in tuple(ledger.nominated.items()):
            # it was nominated: keep cards for it, once there is room or some is coming
            pod, holds = ledger.pods.get(uid), ledger.holds.on(node)
            if pod is None or pod.request is None or holds is None or self._lapsed.get(uid) == node:
                continue
            if uid not in ledger.holds.reserved and ledger.holds.of(uid) is None:
                found = eviction(holds, pod.request, LOWEST, (), holds.kept_from(uid, pod.priority))
                if found is not None:
                    self.keep(pod, on_cards(node, found.cards, pod.request))
        now_s, kept = self._clock(), set(ledger.holds.reserved)
        if any(ledger.holds.of(uid) is not None for uid in self._kept - kept):
            self._taken_s = now_s
        self._kept, more_s = kept, LONGEST_S - KEPT_S if now_s < self._taken_s + PACE_S else 0.0
        for uid, hold in tuple(ledger.holds.reserved.items()):
            assert hold.placement is not None
            holds = ledger.holds.on(hold.node)
            if holds is not None and holds.comes_free(hold.placement):
                ledger.holds.extend_reservation(uid, now_s + KEPT_S)
            elif hold.until_s + more_s <= now_s:
                # there was room, and nobody came
                ledger.holds.end_reservation(uid)
                self._lapsed[uid] = hold.node
                _log.info("reservation lapsed", extra={"pod": uid, "node": hold.node})
                self._tell_lapsed(hold.placement)
        for uid in [uid for uid in self._lapsed if uid not in ledger.pods]:
            del self._lapsed[uid]
