"""Where a request goes: ranks nodes, chooses one and holds its cards, by the ledger as it is now."""

from __future__ import annotations

import numpy as np

from gpuslice.apps.extender.kubelet_rejections import KubeletRejections
from gpuslice.apps.extender.node_query import NodeQuery, Positions
from gpuslice.core.hold import NOTHING_TAKEN
from gpuslice.core.ledger import Ledger, shape_of
from gpuslice.core.model import Placement, Pod, Refusal, Request
from gpuslice.core.placement import not_shared, place, refuse
from gpuslice.core.policy import NEVER, Policy
from gpuslice.core.policy.fleet import Flags, Ints, Rows
from gpuslice.core.policy.ranking import TIE_BITS
from gpuslice.core.preemption import HIGHEST

TOP_SCORE = 10  # MaxExtenderPriority
SAMPLE_EVERY = 16
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
        self.rejections = rejections
        self.policy = policy
        self.filter_best = filter_best
        self._names: list[str] = []  # by row
        self._names_version = (-1, -1)

    # -- many nodes ----------------------------------------------------------------------------------------

    def rank(self, query: NodeQuery, pod: Pod, request: Request) -> Ints:
        """The policy's rank of each node in the question; NEVER where `Ledger.why_not` has a reason."""
        self.ledger.flush()
        ranks = self.policy.keys(shape_of(request))
        keys: Ints = ranks.take(query.rows) if len(ranks) else np.full(len(query.rows), NEVER)
        keys[query.unknown] = NEVER
        if self.ledger.holds.reserved:
            closed = self._held_from(pod, request, query.rows[keys != NEVER])
            keys[np.isin(query.rows, closed)] = NEVER
        if self.rejections:
            in_backoff, last_choice = self.rejections.rows(pod, request)
            keys[np.isin(query.rows, in_backoff)] = NEVER
            _prefer_others(keys, np.isin(query.rows, last_choice))
        return keys

    def rank_making_room(self, query: NodeQuery, pod: Pod, request: Request) -> Ints:
        """The same, after holds that give way to the pod have ended if it fits nowhere beside them."""
        keys = self.rank(query, pod, request)
        if not (keys != NEVER).any() and self.ledger.release_nominated(request, pod.priority):
            keys = self.rank(query, pod, request)
        return keys

    def _held_from(self, pod: Pod, request: Request, fitting: Rows) -> list[int]:
        return list(self.ledger.rows_held_from(request, pod.uid, pod.priority, set(fitting.tolist())))

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
        keys[(fleet.cpu_left < request.host.cpu_milli) | (fleet.memory_left < request.host.memory_mib)] = (
            NEVER
        )
        if not last_resort:
            keys[fleet.terms["avoided"]] = NEVER
        if self.ledger.holds.reserved:
            keys[self._held_from(pod, request, np.flatnonzero(keys != NEVER))] = NEVER
        last_choice: list[int] = []
        if self.rejections:
            in_backoff, last_choice = self.rejections.rows(pod, request)
            keys[in_backoff] = NEVER
        if np.count_nonzero(keys != NEVER) < max(least, 1):
            return None
        if last_choice:
            _prefer_others(keys, np.isin(np.arange(len(keys)), last_choice))
        if fleet.nodes_version != self._names_version:
            self._names, self._names_version = [""] * fleet.rows, fleet.nodes_version
            for name, row in fleet.row_of.items():
                self._names[row] = name
        if pod.replica_of:
            keys = self._spread(pod, keys)
        placement = self.choose_cards(self._names[int(keys.argmin())], request, pod)
        return placement if isinstance(placement, Placement) else None

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

    def hold_best(self, pod: Pod, request: Request, query: NodeQuery, keys: Ints) -> Positions:
        """The position of the best node in the question, with its cards held; empty if none fits."""
        if not len(keys) or keys[best := int(keys.argmin())] == NEVER:
            return query.everyone[:0]
        chosen = query.everyone[best : best + 1]
        placement = self.choose_cards(query.names(chosen)[0], request, pod)
        if isinstance(placement, Refusal) or self.ledger.hold_for_group(pod, placement) is not None:
            return query.everyone[:0]
        return chosen

    # -- one node ------------------------------------------------------------------------------------------

    def choose_cards(self, node_name: str, request: Request, pod: Pod | None = None) -> Placement | Refusal:
        """The cards on one node for a request; those kept for others are free only without a `pod`."""
        fleet = self.ledger.flush()
        holds, row = self.ledger.holds.on(node_name), fleet.row_of.get(node_name)
        if holds is None or holds.node is None or row is None:
            return not_shared(node_name)
        taken = holds.kept_from(pod.uid, pod.priority) if pod is not None else NOTHING_TAKEN
        if pod is not None and self.rejections:
            beside = self.rejections.place(holds.open_to(taken), pod, request)
            if beside is not None:
                return beside
        if taken:
            return place(holds.open_to(taken), request)
        slots = self.policy.fitting_slots(shape_of(request), row)
        return refuse(holds.state(), request) if slots is None else place(holds.state(), request, slots)

    def assume(self, pod: Pod, request: Request, node_name: str) -> Placement | Refusal:
        """Choose cards for `pod` and hold them: its own if it holds some, or before those nominated."""
        held = self.ledger.holds.of(pod.uid)
        if held is not None and not held.is_bound and held.node == node_name and held.placement is not None:
            chosen: Placement | Refusal = held.placement
        else:
            chosen = self.choose_cards(node_name, request, pod)
            if isinstance(chosen, Refusal) and self.ledger.release_nominated(request, HIGHEST, node_name):
                chosen = self.choose_cards(node_name, request, pod)
        if isinstance(chosen, Refusal):
            return chosen
        if self.rejections is not None:
            self.rejections.tried(pod, chosen)
        return self.ledger.assume(pod, chosen) or chosen


def _prefer_others(keys: Ints, last_choice: Flags) -> None:
    """Leave out what is the last choice, where anything else fits."""
    if last_choice.any() and (keys[~last_choice] != NEVER).any():
        keys[last_choice] = NEVER


def best_of(keys: Ints, count: int) -> Positions:
    """The positions of the `count` best, in order. At least that many must fit."""
    few = keys
    # a sample shows below which key there are enough nodes and few more; partitioning all takes ten times as
    # long
    sample = keys[::SAMPLE_EVERY]
    rank = 3 * count // SAMPLE_EVERY  # so that three times as many as needed are expected
    if rank < len(sample):
        found = keys[keys <= np.partition(sample, rank)[rank]]
        if len(found) >= count:
            few = found
    least = np.partition(few, count - 1)[count - 1]  # no two keys are equal
    best: Positions = (keys <= least).nonzero()[0]
    return best


def scores(keys: Ints) -> Ints:
    """10 for the best key, 9 to 0 for the others by their cost, 0 for what does not fit."""
    if not len(keys) or keys[best := keys.argmin()] == NEVER:
        return np.zeros(len(keys), dtype=np.int64)
    costs = keys >> TIE_BITS  # the policy's cost, without the order among equals
    least, most = int(costs[best]), int(costs.max())
    if most == NEVER >> TIE_BITS:
        never = keys == NEVER
        most = int(costs[~never].max())
        costs[never] = most
    scores: Ints = np.rint((most - costs) * ((TOP_SCORE - 1) / max(1, most - least))).astype(np.int64)
    scores[best] = TOP_SCORE
    return scores
