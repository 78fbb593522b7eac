"""Keeps autoscalers from taking away nodes whose pods would find no other cards.

They go by CPU and memory, so a node whose cards are in use can look idle, and they look for other room by
sums. So a node with pods on its cards is marked, unless these would fit on others, card by card. Marks that
somebody else has set are left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from itertools import islice
from math import inf

from gpuslice.adapters.clock import loop_time
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import NotFoundError, ToldOnce
from gpuslice.adapters.kube.slim import SLIM_NODES, SlimNode
from gpuslice.apps.extender.autoscaling.node_groups import NodeGroups
from gpuslice.apps.extender.subscriber import Subscriber
from gpuslice.core.contract import NODE_KEPT, SCALE_DOWN_MARKS
from gpuslice.core.ledger import Ledger, shape_of
from gpuslice.core.policy.fleet import FleetNode, Shape
from gpuslice.core.simulation.node_demand import emptied

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
UNMARKED_AFTER_S = 60.0  # in which no mark was needed: pods come and go
MOST_WRITES = 20  # at once
MOST_EMPTIED = 16  # nodes with the least in use that are tried; any other in use is marked
MOST_TARGETS = 256  # nodes with most in use to which their pods might go


class ScaleDown(Subscriber):
    """Marks nodes while this replica leads; if it is not `enabled`, it only takes its marks away.

    `client` writes only as leader.
    """

    def __init__(
        self,
        client: KubeClient,
        ledger: Ledger,
        groups: NodeGroups,
        policy: str,
        *,
        enabled: bool = True,
        clock: Callable[[], float] = loop_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._groups = groups
        self._policy = policy
        self._enabled = enabled
        self._clock, self._sleep = clock, sleep
        self._marked: dict[str, float] = {}  # by us: since when it need not be, inf if it must
        self._others: set[str] = set()  # nodes that somebody else has marked

    def node_changed(self, node: SlimNode) -> None:
        name, found = node.metadata.name, node.metadata.annotations or {}
        if NODE_KEPT in found:
            self._marked.setdefault(name, inf)
            return
        self.node_gone(name)
        if not found.keys().isdisjoint(SCALE_DOWN_MARKS):
            self._others.add(name)

    def node_gone(self, name: str) -> None:
        self._marked.pop(name, None)
        self._others.discard(name)

    async def run(self) -> None:
        """For ever."""
        told_once = ToldOnce(_log, "nodes not marked, will try again")
        while True:
            await self._sleep(LOOK_EVERY_S)
            with told_once:
                if self.leads:
                    await self.check()

    async def check(self) -> None:
        """Mark the nodes that must stay, and take the mark off those that need not have it for a while."""
        now, kept = self._clock(), self._kept() if self._enabled else set[str]()
        for name, since in self._marked.items():
            self._marked[name] = inf if name in kept else min(since, now)
        over = (name for name, since in self._marked.items() if now - since >= UNMARKED_AFTER_S)
        for name in [*islice(over, MOST_WRITES)]:
            await self._write(name, None)
            self._marked.pop(name, None)
        new = (name for name in sorted(kept) if name not in self._marked and name not in self._others)
        for name in [*islice(new, MOST_WRITES)]:
            await self._write(name, "true")
            self._marked[name] = inf

    async def _write(self, node: str, value: str | None) -> None:
        marks = dict.fromkeys((NODE_KEPT, *SCALE_DOWN_MARKS), value)
        try:
            await self._client.merge_patch(SLIM_NODES, node, {"metadata": {"annotations": marks}})
        except NotFoundError:
            return

    def _kept(self) -> set[str]:
        """The nodes in use that could not be emptied, all that could be together."""
        fleet, holds = self._ledger.flush(), self._ledger.holds.by_node
        taken = (fleet.size - fleet.left).sum(axis=1)
        used = [name for name in self._groups.of if name in fleet.row_of and holds[name].by_uid]
        order = [name for name in used if name not in self._groups.leaving]
        order.sort(key=lambda name: int(taken[fleet.row_of[name]]))
        tried = {name: pods for name in order[:MOST_EMPTIED] if (pods := self._pods_on(name)) is not None}
        nodes = defaultdict[str, list[FleetNode]](list)
        for name in dict.fromkeys([*tried, *order[-MOST_TARGETS:]]):
            nodes[self._groups.of[name].name].append(holds[name].row(self._ledger.host_used(name)))
        idle = {name for name, pods in tried.items() if not pods}
        return set(used) - emptied(nodes, tried, self._policy).keys() - idle

    def _pods_on(self, name: str) -> dict[str, Shape] | None:
        """What holds the node's cards, by uid; None if some of it could not be placed elsewhere.

        Without what is there because the node is: it ends with it.
        """
        pods = dict[str, Shape]()
        for uid, hold in self._ledger.holds.by_node[name].by_uid.items():
            if hold.pod.comes_with_node:
                continue
            if hold.placement is None or hold.pod.request is None:
                return None
            pods[uid] = shape_of(hold.pod.request)
        return pods
