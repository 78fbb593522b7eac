"""The allocations of one node: who holds what on its cards."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from operator import attrgetter

from gpuslice.core.host_resources import HostResources
from gpuslice.core.model import CardSlice, Node, Placement, Pod
from gpuslice.core.placement import NodeState
from gpuslice.core.shape import UNLIMITED, FleetNode

UNITS, COMPUTE_PERCENT = attrgetter("units"), attrgetter("compute_percent")  # of a share


@dataclass(frozen=True, slots=True)
class Allocation:
    """A pod that holds something. `placement` is None if it is not known on which cards of its node it is.

    `assumed`: we decided it and the API server has not shown it yet. `planned`: we decided it and
    kube-scheduler has not agreed yet; nothing is bound that way, and the first to come takes the room.
    """

    pod: Pod
    node: str
    placement: Placement | None
    assumed: bool = False
    planned: bool = False

    @property
    def unplaced_units(self) -> int:
        if self.placement is not None or self.pod.request is None:
            return 0
        return self.pod.request.units

    def takes_as_much_as(self, other: Allocation) -> bool:
        """Whether the node has the same left with one instead of the other."""
        return (
            self.node == other.node
            and self.placement == other.placement
            and self.unplaced_units == other.unplaced_units
            and self.pod.host == other.pod.host
        )


def allocation_of(pod: Pod, before: Allocation | None) -> Allocation | None:
    """What `pod` holds by its own annotations; before it is bound only an assumption counts."""
    if not pod.node:
        return replace(before, pod=pod) if before is not None and before.assumed else None
    if pod.placement is not None:
        return Allocation(pod, pod.node, pod.placement)
    return Allocation(pod, pod.node, None) if pod.request is not None else None


@dataclass(slots=True)
class NodeAllocations:
    """A node and the pods on it. `node` is None while only its pods are known.

    Code that changes them must call `changed`: what is free is computed once for all readers in between.
    """

    name: str
    node: Node | None = None
    by_uid: dict[str, Allocation] = field(default_factory=dict)  # by uid
    _state: NodeState | None = None

    def changed(self) -> None:
        self._state = None

    def used(self) -> dict[int, int]:
        """Units promised per card index, including cards that do not exist (any more)."""
        return self._sum(UNITS)

    def compute_used(self) -> dict[int, int]:
        return self._sum(COMPUTE_PERCENT)

    def unplaced_units(self) -> int:
        return sum([each.unplaced_units for each in self.by_uid.values() if each.placement is None])

    @property
    def crowded(self) -> bool:
        """Whether a card is promised beyond its units."""
        used = self.used()
        return any(used.get(card.index, 0) > card.units for card in (self.node.cards if self.node else ()))

    def state(self) -> NodeState:
        """What is free now; never negative, whatever is allocated."""
        if self._state is None:
            node = self.node or Node(self.name, ())
            used, unplaced = self.used(), self.unplaced_units()
            left = [
                0 if card.index in node.unhealthy else max(0, card.units - used.get(card.index, 0) - unplaced)
                for card in node.cards
            ]
            compute_left = [0] * len(node.cards)
            if node.compute_percent:  # most nodes do not divide compute
                compute = self.compute_used()
                compute_left = [
                    max(0, node.compute_percent - compute.get(card.index, 0)) for card in node.cards
                ]
            self._state = NodeState(node, tuple(left), tuple(compute_left))
        return self._state

    def state_without(self, uids: Collection[str]) -> NodeState:
        """What would be free without these pods."""
        others = {uid: allocation for uid, allocation in self.by_uid.items() if uid not in uids}
        return NodeAllocations(self.name, self.node, others).state()

    def row(self, host_used: HostResources) -> FleetNode:
        """The node for a `Fleet`, if its pods use this much CPU and memory."""
        state = self.state()
        node = state.node
        cpu, memory = node.host.cpu_milli or UNLIMITED, node.host.memory_mib or UNLIMITED
        usable = [card.units if card.index not in node.unhealthy else 0 for card in node.cards]
        models = {card.model for card in node.cards}
        model = models.pop() if len(models) == 1 else ""
        return FleetNode(
            node.name,
            usable,
            state.left,
            state.compute_left,
            model,
            cpu,
            memory,
            max(0.0, cpu - host_used.cpu_milli),
            max(0.0, memory - host_used.memory_mib),
            node.links,
        )

    def _sum(self, amount: Callable[[CardSlice], int]) -> dict[int, int]:
        sums: dict[int, int] = {}
        for allocation in self.by_uid.values():
            for part in allocation.placement.slices if allocation.placement else ():
                sums[part.card] = sums.get(part.card, 0) + amount(part)
        for part in (part for orphan in (self.node.orphans if self.node else ()) for part in orphan.slices):
            sums[part.card] = sums.get(part.card, 0) + amount(part)
        return sums
