"""What saves kube-scheduler a search, or us a computation: nothing, unless `speedups` are wired in.

Without shortcuts kube-scheduler finds the same nodes and makes the same room by itself, only later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any

from gpuslice.adapters.kube.terms import Terms
from gpuslice.adapters.wire.extender import MetaVictims
from gpuslice.apps.extender.node_query import NodeQuery
from gpuslice.core.ledger import Listener
from gpuslice.core.model import Placement, Pod, Request
from gpuslice.core.shape import Shape


class Shortcuts:
    """Asked at every step where time can be saved; here none is."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()  # of nominations

    def asked(self, uid: str, query: NodeQuery) -> None:
        """kube-scheduler asks about a pod, before anything is decided."""

    def hold(self, uid: str, query: NodeQuery) -> Placement | None:
        """The one node that is to pass for the pod though others would, with its cards held."""
        return None

    async def preempted(self, pod: Pod, request: Request, others: Mapping[str, MetaVictims]) -> None:
        """kube-scheduler was answered whom to evict for `pod`, and takes none of `others`."""

    def pod_waits(self, pod: Pod, terms: Terms | None) -> None:
        """A pod without a node, as the API server showed it; `terms` is None if it must not be nominated."""

    def pod_left(self, uid: str) -> None:
        """A pod has a node or is gone."""

    async def written(self, uid: str) -> None:
        """Wait until no request of ours for this pod is in flight, besides its bind."""

    def backpressure(self) -> Awaitable[None] | None:
        """What filter's answer should wait for."""
        return None

    def stopped_leading(self) -> None:
        """Another replica decides from now on."""

    def heard_by(self, policy: Listener) -> Listener:
        """Who hears that pods arrive, are placed and depart, and passes it on to the policy."""
        return policy

    def next_shape(self) -> Shape | None:
        """A shape to rank before anybody asks for it."""
        return None

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """What runs as long as the process does, by name."""
        return {}

    def evicted_ahead(self) -> int:
        """For how many pods room was made before kube-scheduler asked."""
        return 0
