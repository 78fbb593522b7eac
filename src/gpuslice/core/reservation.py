"""Cards kept for pods whose room is being made: the ledger's side of ``status.nominatedNodeName``.

kube-scheduler subtracts a nominated pod's amounts from a node's *sum* for pods of equal or lower priority,
but does not know from which card. Here the cards themselves are kept. A reservation is a courtesy, not a
promise: a pod of higher priority may take the cards, and it ends when its pod holds cards or is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gpuslice.core.model import Placement
from gpuslice.core.node_allocations import NodeAllocations
from gpuslice.core.placement import NodeState
from gpuslice.core.preemption import NOTHING_TAKEN, Taken


@dataclass(frozen=True, slots=True)
class Reservation:
    """Cards that the pod `uid` should get when those on them are gone."""

    uid: str
    priority: int
    placement: Placement

    def weighs_on(self, uid: str, priority: int) -> bool:
        """Whether a pod must not take these cards; kube-scheduler's rule for nominated pods."""
        return self.uid != uid and self.priority >= priority


class Reservations:
    """All reservations of a cluster: usually few, but one for each pod where thousands preempt at once."""

    def __init__(self) -> None:
        self._by_uid: dict[str, Reservation] = {}
        self._by_node: dict[str, dict[str, Reservation]] = {}  # the same by node

    def __len__(self) -> int:
        return len(self._by_uid)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(tuple(self._by_uid.values()))

    def of(self, uid: str) -> Reservation | None:
        return self._by_uid.get(uid)

    def on(self, node: str) -> tuple[Reservation, ...]:
        """The reservations of one node's cards."""
        return tuple(self._by_node.get(node, {}).values())

    def keep(self, reservation: Reservation) -> None:
        """Keep these cards. Reservations of lower priority for the same cards end."""
        uid, placement = reservation.uid, reservation.placement
        for other in self.on(placement.node):
            cards = {part.card for part in other.placement.slices} & {part.card for part in placement.slices}
            if other.priority < reservation.priority and cards:
                self.drop(other.uid)
        self.drop(uid)
        self._by_uid[uid] = reservation
        self._by_node.setdefault(placement.node, {})[uid] = reservation

    def drop(self, uid: str) -> None:
        dropped = self._by_uid.pop(uid, None)
        if dropped is None:
            return
        node = dropped.placement.node
        del self._by_node[node][uid]
        if not self._by_node[node]:
            del self._by_node[node]

    def nodes_closed_to(self, uid: str, priority: int) -> set[str]:
        """Nodes on which this pod may not take some of the cards."""
        return {
            node
            for node, own in self._by_node.items()
            if any(each.weighs_on(uid, priority) for each in own.values())
        }

    def taken(self, node: str, uid: str, priority: int) -> Taken:
        """Units and compute percent that a pod must leave free, by card of one node."""
        return taken_by(self.on(node), uid, priority) if node in self._by_node else NOTHING_TAKEN


def taken_by(of_one_node: Iterable[Reservation], uid: str, priority: int) -> Taken:
    """What these reservations keep of one node's cards from a pod."""
    return _by_card(each.placement for each in of_one_node if each.weighs_on(uid, priority))


def _by_card(placements: Iterable[Placement]) -> dict[int, tuple[int, int]]:
    sums: dict[int, tuple[int, int]] = {}
    for part in (part for placement in placements for part in placement.slices):
        units, core = sums.get(part.card, (0, 0))
        sums[part.card] = (units + part.units, core + part.compute_percent)
    return sums


def comes_free(allocations: NodeAllocations, reservation: Reservation) -> bool:
    """Whether a pod that is leaving is still on one of the cards."""
    cards = {part.card for part in reservation.placement.slices}
    return any(
        allocation.pod.terminating
        and allocation.placement is not None
        and not cards.isdisjoint(part.card for part in allocation.placement.slices)
        for allocation in allocations.by_uid.values()
    )


def open_to(allocations: NodeAllocations, taken: Taken) -> NodeState:
    """A node's state for a pod that must leave `taken` free.

    What leaving pods still hold serves the nominated pods first; only what these need beyond that is
    subtracted from what is free now.
    """
    state = allocations.state()
    if not taken:
        return state
    leaving = _by_card(
        each.placement for each in allocations.by_uid.values() if each.pod.terminating and each.placement
    )
    left, compute_left = list(state.left), list(state.compute_left)
    for slot, card in enumerate(state.node.cards):
        if card.index in taken:
            units, core = taken[card.index]
            units_soon, core_soon = leaving.get(card.index, (0, 0))
            left[slot] -= min(left[slot], max(0, units - units_soon))
            compute_left[slot] -= min(compute_left[slot], max(0, core - core_soon))
    return replace(state, left=tuple(left), compute_left=tuple(compute_left))
