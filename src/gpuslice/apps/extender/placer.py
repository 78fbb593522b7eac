"""Where a request goes: ranks nodes, chooses one and holds its cards, by the ledger as it is now."""

from __future__ import annotations

import numpy as np

from gpuslice.adapters.wire.names import UNKNOWN
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
NOWHERE = np.empty(0, dtype=np.int64)
OUR_WEIGHT = 100  # of our scores (0 … 10) in the configuration that we ship
SPREAD_WEIGHT = 2  # kube-scheduler's default weight of PodTopologySpread


class Placer:
    """Places pods by one policy. `filter_best`: how many fitting nodes filter lets pass, 0 for all."""

    def __init__(self, ledger: Ledger, policy: Policy, filter_best: int = 0) -> None:
        self.ledger = ledger
        self.policy = policy
        self.filter_best = filter_best
        self._names: list[str] = []  # by row
        self._names_version = (-1, -1)

    # -- many nodes ----------------------------------------------------------------------------------------

    def rank(self, rows: Rows, pod: Pod, request: Request) -> Ints:
        """The policy's rank of each of these rows; NEVER where `Ledger.why_not` has a reason."""
        self.ledger.flush()
        ranks = self.policy.keys(shape_of(request))
        keys: Ints = ranks.take(rows) if len(ranks) else np.full(len(rows), NEVER)
        keys[rows == UNKNOWN] = NEVER
        _prefer_others(keys, self._rule_out(keys, rows, pod, request))
        return keys

    def rank_making_room(self, rows: Rows, pod: Pod, request: Request) -> Ints:
        """The same, after holds that give way to the pod have ended if it fits nowhere beside them."""
        keys = self.rank(rows, pod, request)
        if not (keys != NEVER).any() and self.ledger.release_nominated(request, pod.priority):
            keys = self.rank(rows, pod, request)
        return keys

    def is_uncertain(self, rows: Rows, pod: Pod, request: Request) -> bool:
        """Whether the pod fits only on nodes from which news is awaited of those that were sent there."""
        row_of = self.ledger.fleet.row_of
        crowded = {
            row_of.get(node)
            for node in self.ledger.kubelets.unconfirmed.crowded(self.ledger.kubelets.now_s())
        }
        if not crowded:
            return False
        keys = self.rank(rows, pod, request)
        return len(keys) > 0 and keys[best := keys.argmin()] != NEVER and int(rows[best]) in crowded

    def _rule_out(self, keys: Ints, rows: Rows, pod: Pod, request: Request) -> Flags | None:
        """NEVER where cards are kept from the pod or kubelet would reject it; returns the last choice."""
        if self.ledger.holds.reserved:
            closed = self.ledger.holds.rows_kept_from(
                request, pod, self.ledger.fleet.row_of, set(rows[keys != NEVER].tolist())
            )
            keys[np.isin(rows, list(closed))] = NEVER
        if not self.ledger.kubelets.rejections and not self.ledger.kubelets.unconfirmed.crowded(
            self.ledger.kubelets.now_s()
        ):
            return None
        in_backoff, last_choice = self.ledger.rows_to_avoid(request, pod)
        keys[np.isin(rows, in_backoff)] = NEVER
        return np.isin(rows, last_choice) if last_choice else None

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
        last_choice = self._rule_out(keys, np.arange(len(keys)), pod, request)
        if np.count_nonzero(keys != NEVER) < max(least, 1):
            return None
        _prefer_others(keys, last_choice)
        if pod.replica_of:
            keys = self._spread(pod, keys, np.arange(len(keys)))
        placement = self.choose_cards(self.name_of(int(keys.argmin())), request, pod)
        return placement if isinstance(placement, Placement) else None

    def name_of(self, row: int) -> str:
        """The node in a row of the fleet."""
        fleet = self.ledger.fleet
        if fleet.nodes_version != self._names_version:
            self._names, self._names_version = [""] * fleet.rows, fleet.nodes_version
            for name, at in fleet.row_of.items():
                self._names[at] = name
        return self._names[row]

    def _spread(self, pod: Pod, keys: Ints, rows: Rows) -> Ints:
        """Ranks for a replica: the nodes that filter would let pass, by our scores and the spread."""
        best = np.flatnonzero(keys != NEVER)
        if 0 < self.filter_best < len(best):
            best = best_of(keys, self.filter_best)
        best = best[np.argsort(keys[best])]
        names = [self.name_of(row) for row in rows[best].tolist()]
        ours, spread = scores(keys.take(best)), self.ledger.replicas.scores(pod.replica_of, names)
        total = OUR_WEIGHT * ours + SPREAD_WEIGHT * spread
        spread_keys = np.full(len(keys), NEVER)
        spread_keys[best[np.argsort(-total, kind="stable")]] = np.arange(len(best))
        return spread_keys

    def hold_best(self, pod: Pod, request: Request, rows: Rows) -> Ints:
        """The position of the best of these rows, with its cards held; empty if the pod fits on none."""
        keys = self.rank_making_room(rows, pod, request)
        if not len(keys) or keys[best := int(keys.argmin())] == NEVER:
            return NOWHERE
        placement = self.choose_cards(self.name_of(int(rows[best])), request, pod)
        if isinstance(placement, Refusal) or self.ledger.hold_for_group(pod, placement) is not None:
            return NOWHERE
        return np.array([best])

    def promise_best(self, pod: Pod, request: Request, rows: Rows, keys: Ints) -> Placement | None:
        """Hold the pod's cards on the best of these rows, which kube-scheduler takes as a rule."""
        best = (self._spread(pod, keys, rows) if pod.replica_of else keys).argmin()
        placement = self.choose_cards(self.name_of(int(rows[best])), request, pod)
        if isinstance(placement, Refusal) or self.ledger.promise(pod, placement) is not None:
            return None
        return placement

    # -- one node ------------------------------------------------------------------------------------------

    def choose_cards(self, node_name: str, request: Request, pod: Pod | None = None) -> Placement | Refusal:
        """The cards on one node for a request; those kept for others are free only without a `pod`."""
        fleet = self.ledger.flush()
        holds, row = self.ledger.holds.on(node_name), fleet.row_of.get(node_name)
        if holds is None or holds.node is None or row is None:
            return not_shared(node_name)
        taken = holds.kept_from(pod.uid, pod.priority) if pod is not None else NOTHING_TAKEN
        if pod is not None and (backoff := self.ledger.kubelets.backoff(node_name, request, pod)) is not None:
            return backoff.place(holds.open_to(taken), request)
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
        return self.ledger.assume(pod, chosen) or chosen


def _prefer_others(keys: Ints, last_choice: Flags | None) -> None:
    """Leave out what is the last choice, where anything else fits."""
    if last_choice is not None and (keys[~last_choice] != NEVER).any():
        keys[last_choice] = NEVER


def best_of(keys: Ints, count: int) -> Ints:
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
    best: Ints = (keys <= least).nonzero()[0]
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
