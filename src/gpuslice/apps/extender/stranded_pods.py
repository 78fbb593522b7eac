"""Pods that were refused and would fit by now, though kube-scheduler does not ask about them again.

kube-scheduler may see before us that a pod is gone. It then asks at once, is answered from what we know, and
retries the waiting pod only at its next event, otherwise after five minutes. So refused pods are remembered,
and when one would fit and nobody has asked for a moment, a change of a node is shown (`waker`). That wakes
all waiting pods, so it is done rarely: once for all of them, and ever more rarely as long as it helps none of
them.

kube-scheduler before 1.28 leaves a pod alone for as long if its question got no answer. So after a takeover
all waiting pods count as refused.
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
STRANDED_AFTER_S = 1.0  # of fitting; kube-scheduler reacts within milliseconds to what it sees itself
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 120.0  # between two wake-ups of all pods
LONGEST_FOR_NEW_S = 10.0  # the same for a pod that nobody was woken for yet
REMEMBERED = 1000  # pods; the oldest are left to kube-scheduler
LOOKED_AT = 50  # pods in one check for which a node is chosen
UNKNOWN_FOR_S = 30.0  # if the watch has not shown a pod by then, there is none
ASKS_AGAIN = 29
"""From this minor version of the API server on, kube-scheduler asks again about pods whose question got no
answer. 1.28 does, but it may be one version older than the API server (`waker`)."""
UNANSWERED_FOR_S = 30.0  # after a takeover, until the Service leads to us


NEVER_ASKED = -1


@dataclass(slots=True)
class _Refused:
    """A pod refused on `rows` of the fleet as of `version`; NEVER_ASKED if nobody has asked."""

    rows: npt.NDArray[np.int32]
    version: int
    at_s: float
    fits_since_s: float = inf
    woken_for: bool = False


class StrandedPods:
    """Wakes kube-scheduler for stranded pods, while this replica leads."""

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
        """This replica leads now. Questions of kube-scheduler may have got no answer, and may for a while."""
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
        """The pod fits, and kube-scheduler knows. If it was woken for that, others may be soon too."""
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
        """Wake kube-scheduler if a pod has fitted for a while and nobody has asked about it."""
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
        """By uid, where each of the first few pods would go."""
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
            late = refused.version == NEVER_ASKED and now_s > refused.at_s + UNANSWERED_FOR_S  # e.g. gated
            if pod.node or self._ledger.holds.of(uid) is not None:
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
                if refused.version == fleet.cards_version:  # otherwise rows may be those of other nodes
                    open_rows[refused.rows] = True
                placement = self._placer.choose_node(pod, open_rows, 1)
            refused.fits_since_s = min(refused.fits_since_s, now_s) if placement is not None else inf
            if placement is not None and now_s >= refused.fits_since_s + STRANDED_AFTER_S:
                found[uid] = placement
        return found
