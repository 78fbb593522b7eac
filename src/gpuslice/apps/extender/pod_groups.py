"""Pod groups: all members get their cards together, or none does.

There are two ways in. By labels, for a kube-scheduler that does not know groups: the members wait behind
scheduling gates until cards for all are held (`gated_groups`). By Kubernetes' own ``spec.schedulingGroup``
(1.36), where kube-scheduler tries the members one after the other (`TriedGroups`). Either way a member passes
filter for one node, the one on which its cards are held, and the hold gives way to nobody: taking its cards
would break up a group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gpuslice.adapters.clock import loop_time
from gpuslice.apps.extender.gated_groups import GatedGroups
from gpuslice.apps.extender.placer import NOWHERE, Placer
from gpuslice.apps.extender.subscriber import Subscriber
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod, Request
from gpuslice.core.policy.fleet import Ints, Rows

LASTS_S = 10.0  # between two questions about one group: the longest time that kube-scheduler gets stuck
SETTLED_S = 1.0  # after a refusal: if enough others have found a node, they are bound by then
FIRST_REST_S, LONGEST_REST_S = 3.0, 12.0  # the longest is more than kube-scheduler's longest back-off, 10 s
RESTS = "The group has not fitted a moment ago; others come first for some seconds"
CHECK_EVERY_S = 0.25


class PodGroups:
    """All groups of one cluster, while this replica leads."""

    def __init__(self, gated: GatedGroups, placer: Placer) -> None:
        self.gated = gated
        self.tried = TriedGroups(placer.ledger)
        self._placer = placer
        self._ledger = placer.ledger

    def place(self, pod: Pod, request: Request, own: str, rows: Rows) -> Ints | str:
        """The position of the one of these rows that passes for a member, with its cards held, or why none.

        `own` is the name of Kubernetes' own group, "" for one by labels. Empty if the member fits nowhere.
        """
        way: GatedGroups | TriedGroups = self.tried if own else self.gated
        why_not = self.tried.asked(pod, own, rows) if own else self.gated.asked(pod)
        held = self._ledger.holds.of(pod.uid)
        if why_not and (own or held is None):
            return why_not
        passing = NOWHERE
        if held is not None and (row := self._ledger.fleet.row_of.get(held.node)) is not None:
            passing = np.flatnonzero(rows == row)
        if not len(passing) and (held is None or held.kind.is_tentative):
            self._ledger.forget(pod.uid)  # kube-scheduler's own filters exclude the held node
            passing = self._placer.hold_best(pod, request, rows)
        way.decided_for(pod.uid, fits=bool(len(passing)))
        return passing

    async def gathered(self, uid: str) -> str:
        """Before a bind: wait for other members, if the pod needs them; why it cannot be bound, or ""."""
        self.tried.bind_begins(uid)
        return await self.gated.gathered(uid)

    async def run(self) -> None:
        """Hold cards for groups that can start, and release what nobody comes for, for ever."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(CHECK_EVERY_S)
                self.tried.sweep()
                for pod in self.gated.check():
                    tasks.create_task(self.gated.take_gate_off(pod), name=f"take gate off {pod.key}")


@dataclass(slots=True)
class _Group:
    """Members for which cards are held, and when a member was last given a node or bound."""

    members: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)  # members asked about in this attempt
    active_s: float = 0.0
    refused: bool = False  # whether a member was refused in this attempt
    rest_s: float = FIRST_REST_S  # how long to rest if this attempt fails


class TriedGroups(Subscriber):
    """Groups whose members kube-scheduler tries one after the other, by namespace and name.

    With pod groups (``spec.schedulingGroup``, Kubernetes 1.36) kube-scheduler tries the members of a group
    one after the other in memory, and binds them when enough of them have found a node. An extender is asked
    about each member, but is not told what was assumed nor when the attempt ends. Without holds all members
    would be offered the same free cards, and some would be refused at bind: half of a gang would run.

        filter for a member ──► its previous hold is released ──► one node passes, its cards are held
            ──► bind: the cards are the pod's        ──► another question: chosen again
            ──► a member is refused, and no bind follows for `SETTLED_S`: the group has failed and rests
            ──► no question or bind for `LASTS_S`: something has failed that cannot be seen here

    A hold gives way to nobody, since taking its cards would break up a group. Therefore it must be short.
    kube-scheduler 1.36 retries a failed group immediately, many times a second: if its cards were held each
    time, a group that never fits would starve all other pods. So a group rests after a failure, longer each
    time, and is refused during that time; pods that were refused because of it are woken (`StrandedPods`).
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = loop_time) -> None:
        self._ledger = ledger
        self._clock = clock
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, str] = {}  # by uid, of the members

    def asked(self, pod: Pod, name: str, rows: Rows) -> str:
        """kube-scheduler asks about a member: release its hold, unless the question is about just that node.

        Returns why nothing must be held for it now, or "".
        """
        key, now = f"{pod.namespace}/{name}", self._clock()
        group = self._groups.setdefault(key, _Group())
        if pod.uid in group.asked:  # another attempt: kube-scheduler tries each member once
            if group.refused and now < group.active_s + SETTLED_S + group.rest_s:
                return RESTS
            if group.refused:
                group.rest_s = min(LONGEST_REST_S, 2 * group.rest_s)
            group.asked, group.refused = set(), False
        group.asked.add(pod.uid)
        group.members.add(pod.uid)
        self._group_of[pod.uid] = key
        group.active_s = now
        held = self._ledger.holds.tentative(pod.uid)
        if held is not None and [self._ledger.fleet.row_of.get(held.node)] != rows.tolist():
            self._ledger.forget(pod.uid)
        return ""

    def decided_for(self, uid: str, *, fits: bool) -> None:
        """filter lets the member pass for one node, or for none."""
        if not fits:
            self._groups[self._group_of[uid]].refused = True

    def bind_begins(self, uid: str) -> None:
        """A member is being bound: enough of the group have a node, and the other members follow."""
        group = self._groups.get(self._group_of.get(uid, ""))
        if group is not None:
            group.active_s, group.refused, group.rest_s = self._clock(), False, FIRST_REST_S

    def sweep(self) -> None:
        """Release the holds of failed groups, and forget groups that nobody asks about."""
        now = self._clock()
        for key, group in tuple(self._groups.items()):
            if now >= group.active_s + (SETTLED_S if group.refused else LASTS_S):
                self._release(group)
            if now >= group.active_s + 2 * LONGEST_REST_S:
                self._forget(key)

    def stopped_leading(self) -> None:
        super().stopped_leading()
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
