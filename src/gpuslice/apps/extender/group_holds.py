"""Cards held for the members of pod groups, from kube-scheduler's questions until the members are bound.

With pod groups (``spec.schedulingGroup``, Kubernetes 1.36) kube-scheduler tries the members of a group one
after the other in memory, and binds them when enough of them have found a node. An extender is asked about
each member, but is not told what was assumed nor when the attempt ends. Without holds all members would be
offered the same free cards, and some would be refused at bind: half of a gang would run.

    filter for a member ──► its previous hold is released ──► one node passes, its cards are held
        ──► bind: the cards are the pod's        ──► another question: chosen again
        ──► a member is refused, and no bind follows for `SETTLED_S`: the group has failed and rests
        ──► no question or bind for `LASTS_S`: something has failed that cannot be seen here

A hold gives way to nobody, since taking its cards would break up a group. Therefore it must be short.
kube-scheduler 1.36 retries a failed group immediately, many times a second: if its cards were held each time,
a group that never fits would starve all other pods. So a group rests after a failure, longer each time, and
is refused during that time; pods that were refused because of it are woken (`stranded_pods`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from gpuslice.apps.extender.loop_clock import loop_time
from gpuslice.apps.extender.node_query import NodeQuery, Positions
from gpuslice.apps.extender.placer import Placer
from gpuslice.core.model import Pod, Request
from gpuslice.core.policy.fleet import Ints

LASTS_S = 10.0  # between two questions about one group: the longest time that kube-scheduler gets stuck
SETTLED_S = 1.0  # after a refusal: if enough others have found a node, they are bound by then
FIRST_REST_S, LONGEST_REST_S = 3.0, 12.0  # the longest is more than kube-scheduler's longest back-off, 10 s
RESTS = "The group has not fitted a moment ago; others come first for some seconds"
SWEEP_EVERY_S = 0.25


@dataclass(slots=True)
class _Group:
    """Members for which cards are held, and when a member was last given a node or bound."""

    members: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)  # members asked about in this attempt
    active_s: float = 0.0
    refused: bool = False  # whether a member was refused in this attempt
    rest_s: float = FIRST_REST_S  # how long to rest if this attempt fails


class GroupHolds:
    """The holds of one cluster's pod groups, by namespace and name."""

    def __init__(
        self,
        placer: Placer,
        *,
        clock: Callable[[], float] = loop_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._placer = placer
        self._ledger = placer.ledger
        self._clock = clock
        self._sleep = sleep
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, str] = {}  # by uid, of the members

    def ask(self, pod: Pod, name: str, query: NodeQuery) -> bool:
        """kube-scheduler asks about a member: release its hold, unless the question is about just that node.

        False while the group rests, when nothing must be held for it.
        """
        key, now = f"{pod.namespace}/{name}", self._clock()
        group = self._groups.setdefault(key, _Group())
        if pod.uid in group.asked:  # another attempt: kube-scheduler tries each member once
            if group.refused and now < group.active_s + SETTLED_S + group.rest_s:
                return False
            if group.refused:
                group.rest_s = min(LONGEST_REST_S, 2 * group.rest_s)
            group.asked, group.refused = set(), False
        group.asked.add(pod.uid)
        group.members.add(pod.uid)
        self._group_of[pod.uid] = key
        group.active_s = now
        planned = self._ledger.holds.tentative(pod.uid)
        if planned is not None and [self._ledger.fleet.row_of.get(planned.node)] != query.rows.tolist():
            self._ledger.forget(pod.uid)
        return True

    def hold(self, pod: Pod, request: Request, query: NodeQuery, keys: Ints) -> Positions:
        """The node that passes for a member, with its cards held from now on; empty if it fits nowhere."""
        passing = self._placer.hold_best(pod, request, query, keys)
        if not len(passing):
            self._groups[self._group_of[pod.uid]].refused = True
        return passing

    def note_bind(self, uid: str) -> None:
        """A member is being bound: enough of the group have a node, and the other members follow."""
        group = self._groups.get(self._group_of.get(uid, ""))
        if group is not None:
            group.active_s, group.refused, group.rest_s = self._clock(), False, FIRST_REST_S

    async def run(self) -> None:
        """Release holds that nobody comes for, for ever."""
        while True:
            await self._sleep(SWEEP_EVERY_S)
            self.sweep()

    def sweep(self) -> None:
        """Release the holds of failed groups, and forget groups that nobody asks about."""
        now = self._clock()
        for key, group in tuple(self._groups.items()):
            if now >= group.active_s + (SETTLED_S if group.refused else LASTS_S):
                self._release(group)
            if now >= group.active_s + 2 * LONGEST_REST_S:
                self._forget(key)

    def retire(self) -> None:
        """This replica no longer leads: the one that does decides."""
        for key, group in tuple(self._groups.items()):
            self._release(group)
            self._forget(key)

    def _release(self, group: _Group) -> None:
        for uid in group.members:
            if self._ledger.holds.tentative(uid) is not None:  # it was not bound meanwhile
                self._ledger.forget(uid)
        group.members.clear()

    def _forget(self, key: str) -> None:
        del self._groups[key]
        self._group_of = {uid: group for uid, group in self._group_of.items() if group != key}
