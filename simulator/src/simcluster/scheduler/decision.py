"""One scheduling cycle: in-tree filters, then extenders one after another, then the scores of both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from simcluster.cluster.amounts import Object
from simcluster.scheduler import filters, scores
from simcluster.scheduler.claims import ClaimPlugin
from simcluster.scheduler.extender import ExtenderError, HttpExtender
from simcluster.scheduler.filters import Failure
from simcluster.scheduler.nodes import NodeCache, NodeInfo
from simcluster.scheduler.words import fit_error

SMALL_CLUSTER = 100  # up to this size every node is examined
LEAST_PERCENTAGE = 5


class FitError(Exception):
    """No node fits; the text is the event's message. `by_extender`: an extender refused some of them."""

    def __init__(self, message: str, *, by_extender: bool) -> None:
        super().__init__(message)
        self.by_extender = by_extender


@dataclass(slots=True)
class Decider:
    """Chooses nodes. `start` rotates, so that a large cluster is sampled differently each time."""

    cache: NodeCache
    extenders: Sequence[HttpExtender]
    claims: ClaimPlugin
    percentage_of_nodes: int = 0
    rng: random.Random = field(default_factory=random.Random)
    _start: int = 0

    async def choose(self, pod: Object) -> str:
        """The node for the pod. Raises FitError, or ExtenderError if a required extender failed."""
        nominated = await self._nominated(pod)
        if nominated is not None:
            return nominated
        failures: dict[str, Failure] = {}
        feasible = self._filter(pod, failures)
        in_tree = len(failures)
        feasible = await self._filter_by_extenders(pod, feasible, failures)
        if not feasible:
            by_extender = len(failures) > in_tree
            claims = bool(pod["spec"].get("resourceClaims"))
            raise FitError(fit_error(len(self.cache), failures, claims=claims), by_extender=by_extender)
        if len(feasible) == 1:
            return feasible[0].name
        # the sum of in-tree and extenders' scores; an extender that fails here has no say
        by_node = scores.scores(pod, feasible)
        interested = [one for one in self.extenders if one.is_interested(pod)]
        answers = await asyncio.gather(*(self._prioritize(one, pod, feasible) for one in interested))
        for answer in answers:
            for name in by_node.keys() & answer.keys():
                by_node[name] += answer[name]
        highest = max(by_node.values())
        return self.rng.choice(sorted(name for name, score in by_node.items() if score == highest))

    async def _nominated(self, pod: Object) -> str | None:
        """The pod's nominated node if it passes all filters: it is tried first, alone and without scores."""
        node = self.cache.get(pod.get("status", {}).get("nominatedNodeName", ""))
        if node is None or self._check(pod, node, self._ignored()) is not None:
            return None
        try:
            kept = await self._filter_by_extenders(pod, [node], {})
        except ExtenderError:
            return None  # then all nodes are examined, and the extender is called again
        return node.name if kept else None

    def _ignored(self) -> frozenset[str]:
        return frozenset(name for one in self.extenders for name in one.config.ignored_by_scheduler)

    def _check(self, pod: Object, node: NodeInfo, ignored: frozenset[str]) -> Failure | None:
        """In-tree filters, without and with the pods of higher priority that are nominated to the node."""
        failure = filters.check(pod, node, ignored)
        first = self.cache.nominated_before(pod, node.name)
        if failure is None and first:
            failure = filters.check(pod, node.with_pods(first), ignored)
        return failure or self.claims.check(pod, node.name)

    def _filter(self, pod: Object, failures: dict[str, Failure]) -> list[NodeInfo]:
        """In-tree filters over nodes in rotating order until enough of them do."""
        nodes = list(self.cache)
        wanted = nodes_to_find(len(nodes), self.percentage_of_nodes)
        ignored = self._ignored()
        feasible: list[NodeInfo] = []
        looked = 0
        for looked in range(1, len(nodes) + 1):
            node = nodes[(self._start + looked - 1) % len(nodes)]
            failure = self._check(pod, node, ignored)
            if failure is not None:
                failures[node.name] = failure
                continue
            feasible.append(node)
            if len(feasible) >= wanted:
                break
        self._start = (self._start + looked) % len(nodes) if nodes else 0
        return feasible

    async def _filter_by_extenders(
        self, pod: Object, feasible: list[NodeInfo], failures: dict[str, Failure]
    ) -> list[NodeInfo]:
        for extender in self.extenders:
            if not feasible:
                break
            if not extender.is_interested(pod):
                continue
            try:
                answer = await extender.filter(pod, feasible)
            except ExtenderError:
                if extender.config.ignorable:
                    continue
                raise
            failures.update({name: Failure((why,)) for name, why in answer.failed.items()})
            failures.update({name: Failure((why,), unresolvable=True) for name, why in answer.never.items()})
            kept = set(answer.nodes)
            feasible = [node for node in feasible if node.name in kept]
        return feasible

    async def _prioritize(
        self, extender: HttpExtender, pod: Object, feasible: list[NodeInfo]
    ) -> dict[str, int]:
        try:
            return await extender.prioritize(pod, feasible)
        except ExtenderError:
            return {}


def nodes_to_find(nodes: int, percentage: int = 0) -> int:
    """How many feasible nodes are enough: all of a small cluster, a shrinking share of a large one."""
    if nodes < SMALL_CLUSTER or percentage >= 100:
        return nodes
    share = percentage or max(LEAST_PERCENTAGE, 50 - nodes // 125)
    return max(SMALL_CLUSTER, nodes * share // 100)
