"""Cards held for the members of pod groups, from kube-scheduler's questions until they are bound.

With pod groups (``spec.schedulingGroup``, Kubernetes 1.36) kube-scheduler tries the members of a group one
after the other in its memory, and binds them when enough have found a node. An extender is asked about each,
and told neither of what was assumed nor of its end. Were nothing held, all members would be shown the same
free cards, and some would be refused when they are bound: half of a gang would run.

    filter for a member ──► what was held for it makes way ──► one node passes, its cards are held
        ──► bind: they are the pod's        ──► asked about again: chosen anew
        ──► a member is refused, and no bind comes for `SETTLED_S`: the group has failed, it rests
        ──► no question or bind for `LASTS_S`: something has failed that is not seen here

A hold makes way for nobody, since whoever took its cards would break a group in two. So it must be short.
kube-scheduler 1.36 tries a group that failed again at once, many times a second: were its cards held anew
each time, a group that never fits would starve all others. So it rests after a failure, ever longer, and is
told no meanwhile; who was refused because of it is woken (`stranded_pods`).
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

LASTS_S = 10.0  # between two questions about one group: the longest that a kube-scheduler gets stuck
SETTLED_S = 1.0  # after a refusal: where enough others have found a node, they are bound by then
FIRST_REST_S, LONGEST_REST_S = 3.0, 12.0  # longer than kube-scheduler's longest back-off, which is 10 s
RESTS = "The group has not fitted a moment ago; others come first for some seconds"
SWEEP_EVERY_S = 0.25


@dataclass(slots=True)
class _Group:
    """Members that cards are held for, and when one of the group was last given a node or bound."""

    members: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)  # in this attempt
    active_s: float = 0.0
    refused: bool = False  # one of them, in this attempt
    rest_s: float = FIRST_REST_S  # after this attempt, if it fails


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
        """kube-scheduler asks about a member: what was held for it makes way, unless for just that node.

        False while the group rests, and nothing is to be held for it.
        """
        key, now = f"{pod.namespace}/{name}", self._clock()
        group = self._groups.setdefault(key, _Group())
        if pod.uid in group.asked:  # another attempt: kube-scheduler tries each of them once
            if group.refused and now < group.active_s + SETTLED_S + group.rest_s:
                return False
            if group.refused:
                group.rest_s = min(LONGEST_REST_S, 2 * group.rest_s)
            group.asked, group.refused = set(), False
        group.asked.add(pod.uid)
        group.members.add(pod.uid)
        self._group_of[pod.uid] = key
        group.active_s = now
        planned = self._ledger.planned(pod.uid)
        if planned is not None and [self._ledger.fleet.row_of.get(planned.node)] != query.rows.tolist():
            self._ledger.forget(pod.uid)
        return True

    def hold(self, pod: Pod, request: Request, query: NodeQuery, keys: Ints) -> Positions:
        """The node that passes for a member, with its cards held from now on; none where it fits nowhere."""
        passing = self._placer.hold_best(pod, request, query, keys)
        if not len(passing):
            self._groups[self._group_of[pod.uid]].refused = True
        return passing

    def note_bind(self, uid: str) -> None:
        """A member is being bound: enough of the group have a node, and the others come next."""
        group = self._groups.get(self._group_of.get(uid, ""))
        if group is not None:
            group.active_s, group.refused, group.rest_s = self._clock(), False, FIRST_REST_S

    async def run(self) -> None:
        """Release what nobody comes for, for ever."""
        while True:
            await self._sleep(SWEEP_EVERY_S)
            self.sweep()

    def sweep(self) -> None:
        """Release the holds of groups that have failed, and forget those that nobody asks about."""
        now = self._clock()
        for key, group in tuple(self._groups.items()):
            if now >= group.active_s + (SETTLED_S if group.refused else LASTS_S):
                self._release(group)
            if now >= group.active_s + 2 * LONGEST_REST_S:
                self._forget(key)

    def retire(self) -> None:
        """We are not the leader any more: who is decides."""
        for key, group in tuple(self._groups.items()):
            self._release(group)
            self._forget(key)

    def _release(self, group: _Group) -> None:
        for uid in group.members:
            if self._ledger.planned(uid) is not None:  # not bound meanwhile
                self._ledger.forget(uid)
        group.members.clear()

    def _forget(self, key: str) -> None:
        del self._groups[key]
        self._group_of = {uid: group for uid, group in self._group_of.items() if group != key}
