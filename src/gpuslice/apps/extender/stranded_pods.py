"""Pods that were refused and would fit by now, though kube-scheduler does not ask about them again.

kube-scheduler may hear before us that a pod is gone. It then asks at once, is answered from what we know, and
tries the waiting pod again only at an event of its own, else after five minutes. So who was refused is
remembered, and when it would fit and nobody has asked for a moment, a node is shown to change (`waker`).
That wakes all waiting pods, so it is done seldom: once for all, and ever more rarely while it helps none of
those that it was done for.

kube-scheduler before 1.28 leaves a pod alone for as long when nobody answered its question. So after a
take-over all that wait there count as refused.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from gpuslice.apps.extender.leadership import Leadership
from gpuslice.apps.extender.loop_clock import loop_time
from gpuslice.apps.extender.node_query import NodeQuery
from gpuslice.apps.extender.placer import Placer
from gpuslice.apps.extender.waker import Waker
from gpuslice.core.ledger import shape_of
from gpuslice.core.model import Placement
from gpuslice.core.policy import NEVER
from gpuslice.core.policy.fleet import Shape

CHECK_EVERY_S = 0.5
STRANDED_AFTER_S = 1.0  # of fitting: what kube-scheduler heard as well it acts on in milliseconds
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 120.0  # between two times that all are woken
LONGEST_FOR_NEW_S = 10.0  # the same, for a pod that nobody was woken for yet
REMEMBERED = 1000  # pods; the oldest are left to kube-scheduler
LOOKED_AT = 50  # pods in one check for which a node is chosen
UNKNOWN_FOR_S = 30.0  # a pod that the watch does not show by then was none
ASKS_AGAIN = 28  # kube-scheduler from this minor version on, about pods that nobody answered for
UNANSWERED_FOR_S = 30.0  # after a take-over, until the Service leads to us


NEVER_ASKED = -1


@dataclass(slots=True)
class _Refused:
    """A pod that was refused on `rows` of the fleet as it was in `version`; NEVER_ASKED: by nobody."""

    rows: npt.NDArray[np.int32]
    version: int
    at_s: float
    fits_since_s: float = inf
    woken_for: bool = False


class StrandedPods:
    """Wakes kube-scheduler for them, while this replica leads."""

    def __init__(
        self,
        placer: Placer,
        waker: Waker,
        leadership: Leadership,
        *,
        clock: Callable[[], float] = loop_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.woken = 0
        self._placer = placer
        self._ledger = placer.ledger
        self._waker = waker
        self._leadership = leadership
        self._clock = clock
        self._sleep = sleep
        self._refused: OrderedDict[str, _Refused] = OrderedDict()  # by uid, the oldest first
        self._pause_s = FIRST_PAUSE_S
        self._woken_at_s = -inf
        self._quiet_until_s = 0.0
        self._unanswered_until_s = 0.0

    def took_over(self) -> None:
        """We lead now; kube-scheduler may have asked in vain, and may for a while."""
        self._unanswered_until_s = self._clock() + UNANSWERED_FOR_S

    def note_refused(self, uid: str, query: NodeQuery) -> None:
        """kube-scheduler asked about this pod and was told that it fits nowhere."""
        rows = query.rows[query.rows >= 0].astype(np.int32)
        before = self._refused.pop(uid, None)
        refused = _Refused(rows, self._ledger.fleet.cards_version, self._clock())
        refused.woken_for = before is not None and before.woken_for
        self._refused[uid] = refused
        if len(self._refused) > REMEMBERED:
            self._refused.popitem(last=False)

    def note_passed(self, uid: str) -> None:
        """It fits somewhere, and kube-scheduler knows. Woken for that, it may soon be for others."""
        refused = self._refused.pop(uid, None)
        if refused is not None and refused.woken_for:
            self._pause_s = FIRST_PAUSE_S
            self._quiet_until_s = min(self._quiet_until_s, self._clock() + FIRST_PAUSE_S)

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._sleep(CHECK_EVERY_S)
            self.check()

    def check(self) -> None:
        """Wake kube-scheduler if somebody has fitted for a while without having been asked about."""
        if not self._leadership.may_bind:
            self._refused.clear()
            return
        now_s = self._clock()
        if 0 < self._waker.kubernetes < ASKS_AGAIN and now_s < self._unanswered_until_s:
            for uid, pod in self._ledger.pods.items():
                if len(self._refused) >= REMEMBERED:
                    break
                if not pod.node and pod.request is not None and uid not in self._refused:
                    self._refused[uid] = _Refused(np.empty(0, np.int32), NEVER_ASKED, now_s)
        stranded = self._stranded() if self._refused else {}
        if not stranded:
            if now_s >= self._quiet_until_s + self._pause_s:
                self._pause_s = FIRST_PAUSE_S
            return
        quiet_until_s = self._quiet_until_s
        if not all(self._refused[uid].woken_for for uid in stranded):
            quiet_until_s = min(quiet_until_s, self._woken_at_s + LONGEST_FOR_NEW_S)
        if now_s < quiet_until_s:
            return
        self.woken += 1
        self._woken_at_s, self._quiet_until_s = now_s, now_s + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        for uid in stranded:
            self._refused[uid].woken_for = True
        self._waker.free_again(*{placement.node: placement for placement in stranded.values()}.values())

    def _stranded(self) -> dict[str, Placement]:
        """Where each of them would go, of the first that are looked at; by uid."""
        fleet, now_s = self._ledger.flush(), self._clock()
        fits: dict[Shape, bool] = {}
        found: dict[str, Placement] = {}
        looked_at = 0
        for uid, refused in tuple(self._refused.items()):
            pod = self._ledger.pods.get(uid)
            if pod is None:
                if now_s > refused.at_s + UNKNOWN_FOR_S:
                    del self._refused[uid]
                continue
            late = refused.version == NEVER_ASKED and now_s > refused.at_s + UNANSWERED_FOR_S  # gated, say
            if pod.node or self._ledger.allocation(uid) is not None:
                self.note_passed(uid)
                continue
            if pod.request is None or late:
                del self._refused[uid]
                continue
            shape = shape_of(pod.request)
            if shape not in fits:
                fits[shape] = bool((self._placer.policy.keys(shape) != NEVER).any())
            placement = None
            if fits[shape] and looked_at < LOOKED_AT:
                looked_at += 1
                open_rows = np.full(fleet.rows, refused.version != fleet.cards_version)
                if refused.version == fleet.cards_version:  # else rows may be others'
                    open_rows[refused.rows] = True
                placement = self._placer.choose_node(pod, open_rows, 1)
            refused.fits_since_s = min(refused.fits_since_s, now_s) if placement is not None else inf
            if placement is not None and now_s >= refused.fits_since_s + STRANDED_AFTER_S:
                found[uid] = placement
        return found
