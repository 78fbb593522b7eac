"""Tells autoscalers of nodes that they would not add, because the sum of a node's cards seems to suffice.

    a pod that every card refuses ──► how many nodes it takes by cards, and by sums (`node_demand`)
        ──► the difference is asked for by placeholders, each as large as a node of its group
        ──► a node comes ──► the pod has room: the placeholder is gone before an autoscaler looks again

Nothing of this is stored: who takes over begins with what the placeholders say. A pod for which nodes have
come several times, and which still waits, is kept back by something that we do not see, and asks no longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpuslice.adapters.clock import loop_time
from gpuslice.adapters.kube.errors import ToldOnce
from gpuslice.adapters.kube.followed_pod import PodNews
from gpuslice.adapters.kube.slim import SlimNode
from gpuslice.adapters.kube.terms import Terms
from gpuslice.apps.extender.autoscaling.node_groups import NodeGroups
from gpuslice.apps.extender.autoscaling.placeholders import NewNodes, Placeholders
from gpuslice.apps.extender.subscriber import FilterVerdict, Subscriber
from gpuslice.core.hold import Hold
from gpuslice.core.ledger import Ledger, shape_of
from gpuslice.core.node_group import NodeGroup
from gpuslice.core.policy.fit import fitting_rows
from gpuslice.core.policy.fleet import FleetNode, Shape
from gpuslice.core.simulation.node_demand import Demand, Waiting, demand

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
SETTLED_AFTER_S = 5.0  # of waiting: most pods find a place, or have one made, before
MOST_PODS = 100  # that are considered at once; the others follow
MOST_NODES = 10  # asked for in one group at once
COMES_WITHIN_S = 900.0  # a node, and its cards once it is there: as long as cluster-autoscaler waits
UNKNOWN_FOR_S = 30.0  # if the watch has not shown a pod by then, there is none
MOST_TRIES, TRIES_LAST_S = 3, 3600.0


@dataclass(slots=True)
class _Pod:
    """A waiting pod. `asked`: kube-scheduler found nodes for it, cards aside. `tries`: nodes that came.

    `terms`: None until the API server has shown the pod, which kube-scheduler may see before us.
    """

    since_s: float
    terms: Terms | None = None
    asked: bool = False
    tries: int = 0
    tried_s: float = 0.0


class ScaleUp(Subscriber):
    """Asks for nodes while this replica leads. `policy` names the one that places pods."""

    def __init__(
        self,
        ledger: Ledger,
        groups: NodeGroups,
        placeholders: Placeholders,
        policy: str,
        *,
        clock: Callable[[], float] = loop_time,
    ) -> None:
        self.asked_for: dict[NodeGroup, int] = {}
        self._since_s: dict[str, float] = {}  # by group: since when so many nodes are asked for
        self._last_until_s: dict[str, float] = {}  # until when others are preferred: none of it came
        self._ledger = ledger
        self._groups = groups
        self._placeholders = placeholders
        self._policy = policy
        self._clock = clock
        self._pods: dict[str, _Pod] = {}  # by uid
        self._needing: set[str] = set()  # pods for which nodes are asked
        self._first_seen_s: dict[str, float] = {}  # nodes without cards yet
        self._changed = asyncio.Event()
        self._question: Any = None  # of which `_answer` is the answer: it takes up to a tenth of a second
        self._answer: Demand | None = None

    # -- what is heard -------------------------------------------------------------------------------------

    def pod_changed(self, news: PodNews, before: Hold | None) -> None:
        pod = news.view
        if not news.waits or news.terms is None or pod.terminating or pod.gates:
            self.pod_gone(pod.uid, before)
        else:
            self._pods.setdefault(pod.uid, _Pod(self._clock())).terms = news.terms

    def pod_gone(self, uid: str, before: Hold | None) -> None:
        self._pods.pop(uid, None)
        if uid in self._needing:
            self._changed.set()

    def node_changed(self, node: SlimNode) -> None:
        if self.asked_for:
            self._changed.set()

    def decided(self, verdict: FilterVerdict) -> None:
        if not verdict.error and verdict.pod.request is not None:
            pod = self._pods.setdefault(verdict.pod.uid, _Pod(self._clock()))
            pod.asked = not len(verdict.passed) and len(verdict.asked) > 0

    def started_leading(self) -> None:
        super().started_leading()
        self._placeholders.forget()

    # -- what is done --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """For ever. A node that comes, or a pod that needs none any more, is answered at once."""
        told_once = ToldOnce(_log, "nodes not asked for, will try again")
        while True:
            self._changed.clear()
            with told_once:
                if self.leads:
                    await self.check()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._changed.wait()

    async def check(self) -> None:
        """Ask for as many nodes as are needed now."""
        found = self._demand()
        hidden = dict[NodeGroup, int]()
        needing = set[str]()
        if found is not None:
            by_name = {group.name: group for group in self._groups.nodes}
            hidden = {by_name[name]: min(count, MOST_NODES) for name, count in found.hidden.items()}
            needing = {uid for uid, name in found.group_of.items() if name in found.hidden}
        for uid in self._needing - needing:
            if (pod := self._pods.get(uid)) is not None:  # there is room for it now
                pod.tries, pod.tried_s = pod.tries + 1, self._clock()
        self._needing = needing
        now = self._clock()
        for group in hidden:
            if self.asked_for.get(group) != hidden[group]:
                self._since_s[group.name] = now
            elif now - self._since_s[group.name] >= COMES_WITHIN_S:
                self._last_until_s[group.name] = now + TRIES_LAST_S
        if hidden != self.asked_for:
            _log.info("nodes asked for", extra={"groups": {each.name: n for each, n in hidden.items()}})
        self.asked_for = hidden
        nodes, places = self._groups.nodes, self._groups.places
        await self._placeholders.show(
            {group: NewNodes(n, nodes[group], places[group].taints) for group, n in hidden.items()}
        )

    def _demand(self) -> Demand | None:
        now, waiting = self._clock(), list[Waiting]()
        for uid, known in [*self._pods.items()]:
            pod = self._ledger.pods.get(uid)
            if pod is None and now - known.since_s > UNKNOWN_FOR_S:
                del self._pods[uid]
            if pod is None or pod.request is None or known.terms is None:
                continue
            if self._ledger.holds.of(uid) is not None or uid in self._ledger.holds.reserved:
                continue  # it has cards, or others are evicted for it
            if now - known.tried_s > TRIES_LAST_S:
                known.tries = 0
            if now - known.since_s < SETTLED_AFTER_S or known.tries >= MOST_TRIES:
                continue
            names = frozenset(group.name for group in self._groups.open_to(known.terms))
            waiting.append(Waiting(uid, shape_of(pod.request), names, known.asked))
            if len(waiting) == MOST_PODS:
                break
        if not any(pod.asked and pod.groups for pod in waiting):
            return None  # autoscalers see what the others need
        new = {group.name: node for group, node in self._groups.nodes.items()}
        nodes = self._nodes({pod.shape for pod in waiting}, len(waiting))
        last = {name for name, until_s in self._last_until_s.items() if now < until_s}
        question = (nodes, new, waiting, last)
        if question != self._question:
            self._question, self._answer = question, demand(*question[:3], self._policy, last=last)
        return self._answer

    def _nodes(self, shapes: Iterable[Shape], most: int) -> dict[str, list[FleetNode]]:
        """By group, the nodes that could matter: those with most free units in all, and those with room."""
        fleet = self._ledger.flush()
        rows_of = defaultdict[str, list[int]](list)
        nodes = defaultdict[str, list[FleetNode]](list)
        names = dict[int, str]()
        coming = dict[str, float]()
        for name, group in self._groups.of.items():
            if name in self._groups.leaving:
                continue
            row = fleet.row_of.get(name)
            if row is not None:
                rows_of[group.name].append(row)
                names[row] = name
            else:
                coming[name] = self._first_seen_s.get(name, self._clock())
                if self._clock() - coming[name] < COMES_WITHIN_S:
                    nodes[group.name].append(replace(self._groups.nodes[group], name=name))
        self._first_seen_s = coming
        sums = fleet.left.sum(axis=1)
        for group_name, found in rows_of.items():
            rows = np.array(found)
            chosen = set(rows[np.argsort(-sums[rows], kind="stable")[:most]].tolist())
            for shape in shapes:
                chosen.update(fitting_rows(fleet, shape, rows)[:most].tolist())
            for row in sorted(chosen):
                name = names[row]
                nodes[group_name].append(self._ledger.holds.by_node[name].row(self._ledger.host_used(name)))
        return nodes
