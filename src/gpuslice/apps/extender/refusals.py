"""What the owner of a pod that fits nowhere is told."""

from __future__ import annotations

import numpy as np

from gpuslice.adapters.wire.names import UNKNOWN
from gpuslice.apps.extender.node_query import NodeQuery
from gpuslice.core.ledger import Ledger, shape_of
from gpuslice.core.model import Request
from gpuslice.core.node_sample import sample_size
from gpuslice.core.placement import refuse
from gpuslice.core.policy import Policy
from gpuslice.core.words import counted

SAMPLED = (
    "a node that was not asked about would hold it: kube-scheduler shows an extender only a sample of the "
    "nodes; set percentageOfNodesToScore: 100 in its profile"
)


class Refusals:
    """Explains each."""

    def __init__(self, ledger: Ledger, policy: Policy) -> None:
        self.sampled = 0  # pods refused because kube-scheduler showed us only some of the nodes
        self._ledger = ledger
        self._policy = policy

    def explain(self, request: Request, query: NodeQuery) -> str:
        """What was requested, what is missing and the most that would fit, over all nodes in the question."""
        fits_elsewhere = self._policy.choose(shape_of(request)) is not None
        known = query.rows != UNKNOWN
        shared = int(known.sum())
        if not shared:
            nodes = counted(len(query.rows), "node")
            text = f"asked for {counted(request.units, 'unit')}; {nodes} looked at, none with shared cards"
        else:
            left = self._ledger.fleet.left[query.rows]
            fitting = (left >= request.units_per_card).sum(axis=1)
            most = np.where(known, fitting if request.card_count > 1 else left.max(axis=1), -1)
            if request.min_tier:
                most[np.isin(query.rows, self._ledger.rows_below(request.min_tier))] = -1
            state = self._ledger.state(query.names(np.array([most.argmax()]))[0])
            detail = refuse(state, request).detail if state is not None else ""
            text = f"{detail} ({counted(shared, 'node')} with shared cards looked at)"
        total = self._ledger.node_count()
        if fits_elsewhere and len(query.rows) == sample_size(total) < total:
            self.sampled += 1
            text = f"{text}; {SAMPLED}"
        return text
