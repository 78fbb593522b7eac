"""The node for a pod that kube-scheduler has not asked about yet: what it would find if it asked now."""

from __future__ import annotations

import numpy as np

from gpuslice.apps.extender.decisions import Decisions, rows_of
from gpuslice.apps.extender.ranked import scores
from gpuslice.core.model import Placement, Pod
from gpuslice.core.policy import NEVER
from gpuslice.core.policy.fleet import Flags, Ints

TRIES = 4  # nodes, where the cards of the best are kept for somebody else
OUR_WEIGHT = 100  # of 0 … 10, as the shipped configuration weighs them against kube-scheduler's 0 … 100
SPREAD_WEIGHT = 2  # of PodTopologySpread, by default


class Ahead:
    """Chooses beside the plans made before. `room` nodes must fit, and `spare` for each plan."""

    def __init__(self, decisions: Decisions, room: int, spare: int) -> None:
        self._decisions = decisions
        self._ledger = decisions.ledger
        self._room = room
        self._spare = spare
        self._names: list[str] = []
        self._names_version = (-1, -1)

    def choose(self, pod: Pod, open_rows: Flags) -> Placement | None:
        """Node and cards, the node one of `open_rows`; None where those that fit are few."""
        request, fleet = pod.request, self._ledger.fleet
        assert request is not None
        keys = self._decisions.ranks(request)
        keys[~open_rows] = NEVER
        keys[fleet.cpu_left < request.host.cpu_milli] = NEVER
        keys[fleet.memory_left < request.host.memory_mib] = NEVER
        keys[rows_of(self._ledger.avoided, fleet)] = NEVER
        if np.count_nonzero(keys != NEVER) < max(self._room, self._spare * self._ledger.plans, 1):
            return None
        if pod.replica_of:
            keys = self._spread(pod, keys, self._decisions.best(keys))
        for _ in range(TRIES):
            row = int(keys.argmin())
            placement = self._decisions.choose(self._name(row), request, pod)
            if isinstance(placement, Placement):
                return placement
            keys[row] = NEVER
        return None

    def _spread(self, pod: Pod, keys: Ints, best: Ints) -> Ints:
        """New keys for the `best` alone, by what kube-scheduler would add up of our scores and of its own."""
        names = [self._name(row) for row in best.tolist()]
        ours, spread = scores(keys.take(best)), self._ledger.replicas.scores(pod.replica_of, names)
        total = OUR_WEIGHT * ours + SPREAD_WEIGHT * spread
        spread_keys = np.full(len(keys), NEVER)
        spread_keys[best[np.argsort(-total, kind="stable")]] = np.arange(len(best))
        return spread_keys

    def _name(self, row: int) -> str:
        fleet = self._ledger.fleet
        if fleet.nodes_version != self._names_version:
            self._names = [""] * fleet.rows
            for name, each in fleet.row_of.items():
                self._names[each] = name
            self._names_version = fleet.nodes_version
        return self._names[row]
