"""Why a pod fits nowhere: for kube-scheduler node by node, and in one sentence for the pod's owner."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gpuslice.adapters.wire.names import Pieces
from gpuslice.apps.extender.node_query import NodeQuery, Reason
from gpuslice.core.ledger import NOBODY_IN_PARTICULAR, Ledger
from gpuslice.core.model import Pod, Request
from gpuslice.core.node_sample import sample_size
from gpuslice.core.placement import Fit, not_shared, refusal
from gpuslice.core.policy.fit import Fits
from gpuslice.core.rejections import words_of
from gpuslice.core.words import counted

SAMPLED = (
    "a node that was not asked about would hold it: kube-scheduler shows an extender only a sample of the "
    "nodes; set percentageOfNodesToScore: 100 in its profile"
)
MOST_NAMED = 3  # nodes in back-off in one event


class Refusals:
    """Explains each. `in_full`: node by node with what was asked and the most that would fit."""

    def __init__(self, ledger: Ledger, *, in_full: bool = False) -> None:
        self.sampled = 0  # pods refused because kube-scheduler showed us only some of the nodes
        self._ledger = ledger
        self._in_full = in_full

    def explain(self, request: Request, query: NodeQuery, pod: Pod = NOBODY_IN_PARTICULAR) -> str:
        """What was requested, what is missing and the most that would fit, over all nodes in the question."""
        known = query.known(query.everyone)
        if not len(known):
            nodes = counted(len(query.rows), "node")
            text = f"asked for {counted(request.units, 'unit')}; {nodes} looked at, none with shared cards"
        else:
            rows = query.rows.take(known)
            fits, left = (
                self._why_not(query, request, pod).take(known),
                self._ledger.fleet.left.take(rows, axis=0),
            )
            fitting = (left >= request.units_per_card).sum(axis=1)
            most = np.where(
                fits <= Fit.KUBELET_AWAY, -1, fitting if request.card_count > 1 else left.max(axis=1)
            )
            best = int(most.argmax())
            state = self._ledger.state(query.names(known[best : best + 1])[0])
            found = refusal(Fit(fits[best]), state, request) if state is not None else not_shared("")
            text = (
                f"{found.detail or found.reason} ({counted(len(known), 'node')} with shared cards looked at)"
            )
        if self._fits_unseen(request, query, pod):
            self.sampled += 1
            text = f"{text}; {SAMPLED}"
        backoffs = self._ledger.kubelets.rejections.backoffs(pod, request, self._ledger.kubelets.now_s())
        closed = [each for each in backoffs if each.closed or each.closed_cards]
        return "; ".join([text, *(words_of(each) for each in closed[:MOST_NAMED])])

    def by_node(self, request: Request, query: NodeQuery, pod: Pod) -> tuple[Pieces, Pieces]:
        """Why each node was refused, as JSON, and the same for those nodes where preemption cannot help."""
        fits = self._why_not(query, request, pod)
        reasons = {Fit(value): (fits == value).nonzero()[0] for value in np.unique(fits).tolist()}
        unknown = {name: not_shared(name).reason for name in query.names(query.unknown)}

        def pieces(*, only_final: bool) -> Pieces:
            texts: list[Reason] = [
                (which, fit.reason(request))
                for fit, which in reasons.items()
                if fit is not Fit.NOT_SHARED and (fit.is_final or not only_final)
            ]
            if not self._in_full:
                return query.reasons_json(texts, unknown)
            return query.reasons_json([], {**unknown, **dict(self._full(texts, request, query, fits))})

        return pieces(only_final=False), pieces(only_final=True)

    def _full(
        self, texts: list[Reason], request: Request, query: NodeQuery, fits: Fits
    ) -> Iterator[tuple[str, str]]:
        for which, text in texts:
            for at, name in zip(which.tolist(), query.names(which), strict=True):
                state = self._ledger.state(name)
                yield name, str(refusal(Fit(fits[at]), state, request)) if state is not None else text

    def _why_not(self, query: NodeQuery, request: Request, pod: Pod) -> Fits:
        found = np.full(len(query.rows), Fit.NOT_SHARED, dtype=np.int8)
        known = query.known(query.everyone)
        found[known] = self._ledger.why_not(request, query.rows.take(known), pod)
        return found

    def _fits_unseen(self, request: Request, query: NodeQuery, pod: Pod) -> bool:
        """Whether kube-scheduler has left out a node that would hold the pod, CPU and memory included."""
        total = self._ledger.node_count()
        if not len(query.rows) == sample_size(total) < total:
            return False
        unseen = np.setdiff1d(np.fromiter(self._ledger.flush().row_of.values(), np.intp), query.rows)
        fits = self._ledger.why_not(request, unseen, pod, host_limits=True)
        return bool((fits == Fit.YES).any())
