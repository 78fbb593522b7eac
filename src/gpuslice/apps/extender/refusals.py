"""Pods that fit nowhere: what their owners are told, and what the policy learns from it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gpuslice.adapters.wire.extender import Pod as WirePod
from gpuslice.adapters.wire.names import UNKNOWN
from gpuslice.apps.extender.asked import Asked
from gpuslice.core.ledger import Ledger, shape_of
from gpuslice.core.model import Request
from gpuslice.core.placement import refuse
from gpuslice.core.policy import Policy
from gpuslice.core.policy.fleet import Shape
from gpuslice.core.words import counted

REMEMBERED = 10_000
SAMPLED = (
    "a node that was not asked about would hold it: kube-scheduler shows an extender only a sample of the "
    "nodes; set percentageOfNodesToScore: 100 in its profile"
)


@dataclass(frozen=True, slots=True)
class Refused:
    """A pod that fits on none of the nodes asked about, in words for its owner.

    `nodes`: those asked about, which kube-scheduler's own filters let pass; None when the request is wrong.
    """

    pod: WirePod
    explanation: str
    nodes: Asked | None = None


class Refusals:
    """Tells `on_refused` each time; the policy once for a pod."""

    def __init__(self, ledger: Ledger, policy: Policy, on_refused: Callable[[Refused], None]) -> None:
        self.sampled = 0  # pods refused because kube-scheduler showed us a part of the nodes only
        self._ledger = ledger
        self._policy = policy
        self._on_refused = on_refused
        self._told: OrderedDict[str, None] = OrderedDict()  # uids

    def wrong(self, pod: WirePod, problem: str) -> None:
        """What the pod asks for can never be given."""
        self._on_refused(Refused(pod, problem))

    def note(self, pod: WirePod, asked: Asked, request: Request) -> None:
        """It fits on none of the nodes asked about."""
        shape = shape_of(request)
        fits_elsewhere = self._policy.choose(shape) is not None
        if not fits_elsewhere:
            self._tell_policy(pod.metadata.uid, shape)
        explanation = self._explanation(asked, request)
        if fits_elsewhere and is_sample(len(asked.rows), self._ledger.node_count()):
            self.sampled += 1
            explanation = f"{explanation}; {SAMPLED}"
        self._on_refused(Refused(pod, explanation, asked))

    def _tell_policy(self, uid: str, shape: Shape) -> None:
        if uid in self._told:
            return
        self._told[uid] = None
        if self._possible(shape):
            self._policy.refused(shape)
        if len(self._told) > REMEMBERED:
            self._told.popitem(last=False)

    def _possible(self, shape: Shape) -> bool:
        """Whether some node could hold the shape if it were empty: else there is nothing to learn from it."""
        large = (self._ledger.fleet.size >= shape.units).sum(axis=1)
        return bool((large >= shape.cards).any())

    def _explanation(self, asked: Asked, request: Request) -> str:
        """What was asked, what is missing and the most that would fit, over all nodes asked about."""
        known = asked.rows != UNKNOWN
        shared = int(known.sum())
        if not shared:
            nodes = counted(len(asked.rows), "node")
            return f"asked for {counted(request.units, 'unit')}; {nodes} looked at, none with shared cards"
        left = self._ledger.fleet.left[asked.rows]
        fitting = (left >= request.units_per_card).sum(axis=1)
        most = np.where(known, fitting if request.card_count > 1 else left.max(axis=1), -1)
        state = self._ledger.state(asked.names(np.array([most.argmax()]))[0])
        detail = refuse(state, request).detail if state is not None else ""
        return f"{detail} ({counted(shared, 'node')} with shared cards looked at)"


def is_sample(asked: int, nodes: int) -> bool:
    """Whether `asked` is how many nodes kube-scheduler looks for in a cluster of `nodes` (1.36, default).

    Source: ``numFeasibleNodesToFind`` in pkg/scheduler/schedule_one.go.
    """
    if nodes < 100 or asked >= nodes:
        return False
    percent = max(5, 50 - nodes // 125)
    return asked == max(100, nodes * percent // 100)
