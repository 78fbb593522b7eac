"""All that only saves time, in one: nominations, preemption ahead, and ranks before they are asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Coroutine, Mapping
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.wire.extender import MetaVictims
from gpuslice.apps.extender.leadership import Leadership
from gpuslice.apps.extender.placer import Placer
from gpuslice.apps.extender.preemption.pending_evictions import PendingEvictions
from gpuslice.apps.extender.preemption.preemptor import Preemptor
from gpuslice.apps.extender.speedups.batch_preemptor import BatchPreemptor
from gpuslice.apps.extender.speedups.nominator import LIMITS, NominationLimits, Nominator
from gpuslice.core.ledger import Listener
from gpuslice.core.model import Pod, Request
from gpuslice.core.shape import Shape


class Speedups(Nominator):
    """A nominator, for searches that cover at least `search` nodes unless that is 0, and the rest."""

    def __init__(
        self,
        client: KubeClient,
        placer: Placer,
        preemptor: Preemptor,
        evictions: PendingEvictions,
        leadership: Leadership,
        *,
        search: int,
        limits: NominationLimits = LIMITS,
    ) -> None:
        super().__init__(client, placer, preemptor.reserver, leadership, search=search, limits=limits)
        self.batch_preemptor = BatchPreemptor(
            client, placer, self, preemptor, leadership, evictions=evictions
        )
        self._prewarmer = RankPrewarmer(placer.policy)

    async def preempted(self, pod: Pod, request: Request, others: Mapping[str, MetaVictims]) -> None:
        await self.batch_preemptor.follow(pod, request, others)

    def heard_by(self, policy: Listener) -> Listener:
        return self._prewarmer

    def next_shape(self) -> Shape | None:
        return self._prewarmer.next_unranked()

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"nominate": self.run(), "preempt ahead": self.batch_preemptor.run()}

    def evicted_ahead(self) -> int:
        return self.batch_preemptor.evicted


REMEMBERED_SHAPES = 64


class RankPrewarmer:
    """Passes pods' shapes on to the policy, and remembers those that are not ranked yet.

    A shape that is new to the policy requires a look at every node, a few milliseconds in a large cluster.
    Pods are usually seen when they are created, which leaves time to rank their shape between two requests.
    """

    def __init__(self, policy: Listener) -> None:
        self._policy = policy
        self._seen: OrderedDict[Shape, None] = OrderedDict()
        self._unranked: OrderedDict[Shape, None] = OrderedDict()

    def arrived(self, shape: Shape) -> None:
        self._policy.arrived(shape)
        if not shape.cards:
            return  # nobody asks about it
        if shape not in self._seen:
            self._unranked[shape] = None
        self._seen[shape] = None
        self._seen.move_to_end(shape)
        while len(self._seen) > REMEMBERED_SHAPES:
            self._unranked.pop(self._seen.popitem(last=False)[0], None)

    def placed(self, shape: Shape) -> None:
        self._policy.placed(shape)

    def departed(self, shape: Shape) -> None:
        self._policy.departed(shape)

    def next_unranked(self) -> Shape | None:
        """A shape that has arrived and has not been ranked, the latest first."""
        return self._unranked.popitem()[0] if self._unranked else None
