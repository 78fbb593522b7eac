"""Where a request goes: ranks nodes, chooses one and holds its cards, by the ledger as it is now."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpuslice.apps.extender.kubelet_rejections import KubeletRejections, sentences
from gpuslice.apps.extender.node_query import NodeQuery, Positions
from gpuslice.apps.extender.ranking import best_of, scores
from gpuslice.core.ledger import Ledger, shape_of
from gpuslice.core.model import Placement, Pod, Refusal, Request
from gpuslice.core.placement import NodeState, not_shared, place, refuse, without_cards
from gpuslice.core.policy import NEVER, Policy
from gpuslice.core.policy.fleet import Flags, Ints
from gpuslice.core.preemption import HIGHEST, NOTHING_TAKEN
from gpuslice.core.rejections import Backoff
from gpuslice.core.reservation import open_to

TRIES = 4  # how many nodes to try if the cards of the best are kept for other pods
OUR_WEIGHT = 100  # of our scores (0 … 10) in the configuration that we ship
SPREAD_WEIGHT = 2  # kube-scheduler's default weight of PodTopologySpread


class Placer:
    """Places pods by one policy. `filter_best`: how many fitting nodes filter lets pass, 0 for all."""

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
        filter_best: int = 0,
        *,
        rejections: KubeletRejections | None = None,
    ) -> None:
        self.ledger = ledger
        self._rejections = rejections
        self.policy = policy
        self.filter_best = filter_best
        self._names: list[str] = []  # by row
        self._names_version = (-1, -1)

    # -- many nodes ----------------------------------------------------------------------------------------

    def rank(self, query: NodeQuery, pod: Pod, request: Request) -> tuple[Ints, Positions]:
        """The policy's rank of each node in the question; NEVER where the request does not fit.

        Also returns the positions of nodes whose rank is NEVER only because cards are kept for pods that come
        before `pod`: usually none, never many.
        """
        ranks = self.policy.keys(shape_of(request))
        keys: Ints = ranks.take(query.rows) if len(ranks) else np.full(len(query.rows), NEVER)
        keys[query.unknown] = NEVER
        row_of = self.ledger.fleet.row_of
        if self.ledger.compute_required and not request.compute_percent:
            keys[np.isin(query.rows, self._rows(self.ledger.compute_required))] = NEVER
        if request.min_tier:
            keys[np.isin(query.rows, self.ledger.rows_below(request.min_tier))] = NEVER
        closed: list[int] = []
        reservations = self.ledger.reservations
        roomy: set[int] = set(query.rows[keys != NEVER].tolist()) if len(reservations) else set()
        for name in reservations.nodes_closed_to(pod.uid, pod.priority):
            allocations = self.ledger.allocations(name)
            if allocations is not None and row_of.get(name) in roomy:
                state = open_to(allocations, reservations.taken(name, pod.uid, pod.priority))
                if isinstance(place(state, request), Refusal):
                    closed.append(row_of[name])
        kept = query.unknown[:0]
        if closed:
            kept = np.flatnonzero(np.isin(query.rows, closed) & (keys != NEVER))
            keys[kept] = NEVER
        in_backoff, last_choice = self._backed_off(pod, request)
        for rows in (in_backoff, last_choice):
            concerned = np.isin(query.rows, rows) if rows else None
            if concerned is not None and (rows is in_backoff or (keys[~concerned] != NEVER).any()):
                keys[concerned] = NEVER
        return keys, kept

    def choose_node(
        self, pod: Pod, open_rows: Flags, least: int, *, last_resort: bool = False
    ) -> Placement | None:
        """The node and cards that kube-scheduler would choose for `pod` now among `open_rows`.

        None if fewer than `least` of them fit. `last_resort` includes nodes with a taint that keeps away pods
        that have a choice.
        """
        request, fleet = pod.request, self.ledger.flush()
        assert request is not None
        keys = self.policy.keys(shape_of(request)).copy()
        keys[~open_rows] = NEVER
        keys[fleet.cpu_left < request.host.cpu_milli] = NEVER
        keys[fleet.memory_left < request.host.memory_mib] = NEVER
        if not last_resort:
            keys[self._rows(self.ledger.avoided)] = NEVER
        if not request.compute_percent:
            keys[self._rows(self.ledger.compute_required)] = NEVER
        if request.min_tier:
            keys[self.ledger.rows_below(request.min_tier)] = NEVER
        in_backoff, last_choice = self._backed_off(pod, request)
        keys[in_backoff] = NEVER
        if np.count_nonzero(keys != NEVER) < max(least, 1):
            return None
        if last_choice and np.count_nonzero(keys != NEVER) > np.count_nonzero(keys[last_choice] != NEVER):
            keys[last_choice] = NEVER
        if fleet.nodes_version != self._names_version:
            self._names, self._names_version = [""] * fleet.rows, fleet.nodes_version
            for name, row in fleet.row_of.items():
                self._names[row] = name
        if pod.replica_of:
            keys = self._spread(pod, keys)
        for _ in range(TRIES):
            row = int(keys.argmin())
            placement = self.choose_cards(self._names[row], request, pod)
            if isinstance(placement, Placement):
                return placement
            keys[row] = NEVER
        return None

    def _spread(self, pod: Pod, keys: Ints) -> Ints:
        """Ranks for a replica: the nodes that filter would let pass, by our scores and the spread."""
        best = np.flatnonzero(keys != NEVER)
        if 0 < self.filter_best < len(best):
            best = best_of(keys, self.filter_best)
        best = best[np.argsort(keys[best])]
        names = [self._names[row] for row in best.tolist()]
        ours, spread = scores(keys.take(best)), self.ledger.replicas.scores(pod.replica_of, names)
        total = OUR_WEIGHT * ours + SPREAD_WEIGHT * spread
        spread_keys = np.full(len(keys), NEVER)
        spread_keys[best[np.argsort(-total, kind="stable")]] = np.arange(len(best))
        return spread_keys

    def backoffs(self, pod: Pod, request: Request) -> Sequence[Backoff]:
        """What kubelets' rejections keep the pod from now, by node."""
        return self._rejections.backoffs(pod, request) if self._rejections is not None else ()

    def _backed_off(self, pod: Pod, request: Request) -> tuple[list[int], list[int]]:
        """The rows where what kubelets rejected leaves the pod no room now, and those that it takes last."""
        closed: list[int] = []
        last_choice: list[int] = []
        for each in self.backoffs(pod, request):
            row, state = self.ledger.fleet.row_of.get(each.node), self.ledger.state(each.node)
            if row is None or state is None:
                continue
            found = self._beside(each, state, request)
            if isinstance(found, Refusal):
                closed.append(row)
            elif each.doubtful or not each.doubtful_cards.isdisjoint(part.card for part in found.slices):
                last_choice.append(row)
        return closed, last_choice

    def _beside(self, backoff: Backoff, state: NodeState, request: Request) -> Placement | Refusal:
        """Cards that are not in back-off, and in doubt only where no others have room."""
        if backoff.closed:
            return Refusal(sentences([backoff])[0])
        found = place(without_cards(state, backoff.doubtful_cards), request)
        if isinstance(found, Refusal):
            found = place(without_cards(state, backoff.closed_cards), request)
        return found

    def _rows(self, names: set[str]) -> list[int]:
        """The rows of these nodes, without those that share no cards."""
        row_of = self.ledger.fleet.row_of
        return [row_of[name] for name in names if name in row_of]

    def hold_best(self, pod: Pod, request: Request, query: NodeQuery, keys: Ints) -> Positions:
        """The position of the best node in the question, with its cards held; empty if none fits."""
        keys = keys.copy()
        for _ in range(min(TRIES, len(keys))):
            best = int(keys.argmin())
            if keys[best] == NEVER:
                break
            (node,) = query.names(query.everyone[best : best + 1])
            placement = self.choose_cards(node, request, pod)
            if isinstance(placement, Placement) and self.ledger.plan(pod, placement, makes_way=False) is None:
                return query.everyone[best : best + 1]
            keys[best] = NEVER
        return query.everyone[:0]

    # -- one node ------------------------------------------------------------------------------------------

    def choose_cards(self, node_name: str, request: Request, pod: Pod | None = None) -> Placement | Refusal:
        """The cards on one node for a request; those kept for others are free only without a `pod`."""
        fleet = self.ledger.flush()
        allocations, row = self.ledger.allocations(node_name), fleet.row_of.get(node_name)
        if allocations is None or allocations.node is None or row is None:
            return not_shared(node_name)
        state = allocations.state()
        slots = self.policy.fitting_slots(shape_of(request), row)
        if slots is None:
            return refuse(state, request)
        taken = self.ledger.reservations.taken(node_name, pod.uid, pod.priority) if pod else NOTHING_TAKEN
        backoff = (
            self._rejections.on(node_name, pod, request) if pod and self._rejections is not None else None
        )
        if backoff is not None:
            return self._beside(backoff, open_to(allocations, taken), request)
        if taken:
            return place(open_to(allocations, taken), request)
        return place(state, request, slots)

    def assume(self, pod: Pod, request: Request, node_name: str) -> Placement | Refusal:
        """Choose cards for `pod` and hold them: its own if it holds some, or before others' plans."""
        held = self.ledger.allocation(pod.uid)
        if held is not None and held.assumed and held.node == node_name and held.placement is not None:
            return self.ledger.assume(pod, held.placement) or held.placement
        chosen = self.choose_cards(node_name, request, pod)
        if isinstance(chosen, Refusal) and self.ledger.make_way(request, HIGHEST, node_name):
            chosen = self.choose_cards(node_name, request, pod)
        if isinstance(chosen, Refusal):
            return chosen
        if self._rejections is not None:
            self._rejections.tried(pod, chosen)
        return self.ledger.assume(pod, chosen) or chosen
