"""Which nodes hold the pods of one owner, so that they can be spread as kube-scheduler spreads them.

If the pods of a ReplicaSet have no constraints of their own, kube-scheduler prefers nodes and zones with few
others of it (``PodTopologySpread``, system defaults). Whoever nominates a node instead of kube-scheduler must
do the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import log
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuslice.core.policy.fleet import Floats

NODE_SKEW, ZONE_SKEW = 3, 5  # maxSkew of the system's default constraints


class Replicas:
    """Pods that hold cards, by owner, node and zone."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, str]] = {}  # uid → owner, node
        self._on: dict[str, Counter[str]] = {}  # owner → node → pods
        # owner → zone → pods, of those asked about since a zone changed
        self._in: dict[str, Counter[str]] = {}
        self._zone: dict[str, str] = {}

    def put(self, uid: str, owner: str, node: str) -> None:
        """A pod of `owner` is on `node` from now on."""
        self.drop(uid)
        if owner:
            self._of[uid] = owner, node
            self._add(owner, node, 1)

    def drop(self, uid: str) -> None:
        """It is on no node any more; unknown pods are ignored."""
        if (known := self._of.pop(uid, None)) is not None:
            self._add(*known, -1)

    def node_is_in(self, node: str, zone: str) -> None:
        """The zone of a node, "" for none."""
        if self._zone.get(node, "") != zone:
            self._zone[node] = zone
            self._in.clear()

    def scores(self, owner: str, nodes: Sequence[str]) -> Floats:
        """kube-scheduler's scores of `nodes` for a pod of `owner`: 100 where the fewest others are.

        Source: ``Score``, ``scoreForCount``, ``topologyNormalizingWeight`` and ``NormalizeScore`` in
        pkg/scheduler/framework/plugins/podtopologyspread/scoring.go, the constraints in plugin.go (1.36).
        """
        import numpy as np  # not needed by those who only count

        zone_of = [self._zone.get(node, "") for node in nodes]
        by_node, by_zone = log(len(nodes) + 2), log(len({*zone_of} - {""}) + 2)
        on, within = self._on.get(owner, _NOBODY), self._in.get(owner)
        if within is None:
            within = self._in[owner] = Counter()
            for node, pods in on.items():
                within[self._zone.get(node, "")] += pods
        crowd = np.array([on[node] for node in nodes]) * by_node + NODE_SKEW - 1
        crowd += [within[zone] * by_zone + ZONE_SKEW - 1 if zone else 0.0 for zone in zone_of]
        scores: Floats = 100 * (crowd.max() + crowd.min() - crowd) / crowd.max()
        return scores

    def _add(self, owner: str, node: str, pods: int) -> None:
        on, zone = self._on.setdefault(owner, Counter()), self._zone.get(node, "")
        on[node] += pods
        if not on[node]:
            del on[node]
        if not on:
            del self._on[owner]
        if zone and (within := self._in.get(owner)) is not None:
            within[zone] += pods
        if owner not in self._on:
            self._in.pop(owner, None)


_NOBODY: Counter[str] = Counter()
