"""Which groups of nodes there are, what a new node of each would have, and which pods it would take."""

from __future__ import annotations

import msgspec

from gpuslice.adapters.kube.slim import SlimNode
from gpuslice.adapters.kube.terms import Terms
from gpuslice.apps.extender.subscriber import Subscriber
from gpuslice.core.contract import LABEL_SHARED
from gpuslice.core.ledger import Ledger
from gpuslice.core.mode import wants_agent
from gpuslice.core.model import Request
from gpuslice.core.node_affinity import REQUIRED
from gpuslice.core.node_filters import NodeFilters, Place, Taint, Toleration, Wish
from gpuslice.core.node_group import NodeGroup, group_of, is_leaving, lasting
from gpuslice.core.policy.fleet import FleetNode
from gpuslice.core.simulation.capacity import empty

NO_REQUEST = Request(0)
REMEMBERED = 10_000  # answers


class NodeGroups(Subscriber):
    """Learns from each node with shared cards. A group is remembered when its last node is gone.

    `of`: the group of each node that shares its cards, or is about to; `nodes`, `places`: a new node of each
    group, by its cards and as kube-scheduler's filters see it; `leaving`: nodes without room for anybody.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.of: dict[str, NodeGroup] = {}
        self.nodes: dict[NodeGroup, FleetNode] = {}
        self.places: dict[NodeGroup, Place] = {}
        self.leaving: set[str] = set()
        self._open: dict[tuple[NodeGroup, Terms], bool] = {}
        self._ledger = ledger

    def node_changed(self, node: SlimNode) -> None:
        name, labels = node.metadata.name, node.metadata.labels or {}
        group, holds = group_of(labels), self._ledger.holds.on(name)
        known = holds.node if holds is not None else None
        taints = tuple(Taint(each.key, each.value, each.effect) for each in node.spec.taints or ())
        (self.leaving.add if is_leaving(taints) else self.leaving.discard)(name)
        if group is None or known is None or not known.shared:
            self.of.pop(name, None)
        elif known.cards:
            self.of[name] = group
            self.nodes[group] = empty(holds.row(self._ledger.host_used(name)))  # type: ignore[union-attr]
            place = Place(group.name, labels=labels, taints=lasting(taints))
            if self.places.get(group) != place:
                self.places[group] = place
                self._open.clear()
        elif group in self.nodes and wants_agent(labels, LABEL_SHARED):
            self.of[name] = group

    def node_gone(self, name: str) -> None:
        self.of.pop(name, None)
        self.leaving.discard(name)

    def open_to(self, terms: Terms) -> frozenset[NodeGroup]:
        """Those whose nodes a pod with these terms may use."""
        return frozenset(group for group in self.nodes if self._takes(group, terms))

    def _takes(self, group: NodeGroup, terms: Terms) -> bool:
        known = self._open.get((group, terms))
        if known is None:
            required = msgspec.json.decode(terms.node_affinity) if terms.node_affinity else None
            wish = Wish(
                NO_REQUEST,
                selector=dict(terms.node_selector),
                tolerations=tuple(
                    Toleration(each.key, each.operator or "Equal", each.value, each.effect)
                    for each in terms.tolerations
                ),
                affinity={"nodeAffinity": {REQUIRED: required}} if required else None,
            )
            place = self.places[group]
            if len(self._open) >= REMEMBERED:
                self._open.clear()
            known = self._open[group, terms] = not NodeFilters([place], wish).obstacle(place)
        return known
