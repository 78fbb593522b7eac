"""What is kept of each node, and what that leaves for others: all holds of a cluster in one structure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter

from gpuslice.core.hold import NOTHING_TAKEN, Hold, HoldKind, Taken, by_card, kept_from, reservation
from gpuslice.core.host_resources import HostResources
from gpuslice.core.model import CardSlice, Node, Placement, Pod, Request
from gpuslice.core.placement import Fit, NodeState, why_not
from gpuslice.core.shape import UNLIMITED, FleetNode

UNITS, COMPUTE_PERCENT = attrgetter("units"), attrgetter("compute_percent")  # of a slice


class Holds:
    """By pod, by node and by kind. What counts as placed is for the `Ledger` alone to put and drop."""

    def __init__(self) -> None:
        self.by_node: dict[str, NodeHolds] = {}
        self.reserved: dict[str, Hold] = {}  # by uid
        self._placed: dict[str, Hold] = {}  # by uid, what counts as placed
        self._unbound: dict[HoldKind, dict[str, None]] = {kind: {} for kind in HoldKind}  # uids, in order

    def of(self, uid: str) -> Hold | None:
        """What a pod holds, unless it is only reserved."""
        return self._placed.get(uid)

    def on(self, node: str) -> NodeHolds | None:
        """What is held on a node, for reading only."""
        return self.by_node.get(node)

    def opened(self, node: str) -> NodeHolds:
        """The same, to put something there."""
        holds = self.by_node.get(node)
        if holds is None:
            holds = self.by_node[node] = NodeHolds(node)
        return holds

    def close_if_empty(self, holds: NodeHolds) -> None:
        """Forget a node that is gone once nothing is held there."""
        if holds.node is None and not holds.by_uid and not holds.reserved:
            del self.by_node[holds.name]

    def put(self, hold: Hold) -> None:
        """Hold this instead of what the pod holds on this node and counts in the same way, if anything."""
        uid, holds = hold.pod.uid, self.opened(hold.node)
        if not hold.kind.counts_as_placed:
            self.reserved[uid] = holds.reserved[uid] = hold
            return
        before, self._placed[uid] = self._placed.get(uid), hold
        holds.by_uid[uid] = hold
        if uid in self.reserved:
            self.end_reservation(uid)
        if before is not None:
            self._unbound[before.kind].pop(uid, None)
        if not hold.is_bound:
            self._unbound[hold.kind][uid] = None

    def drop(self, uid: str) -> Hold | None:
        """End what a pod holds; returns that."""
        hold = self._placed.pop(uid, None)
        if hold is not None:
            self._unbound[hold.kind].pop(uid, None)
            holds = self.by_node[hold.node]
            del holds.by_uid[uid]
            holds.changed()
            self.close_if_empty(holds)
        return hold

    def oldest(self, kind: HoldKind) -> Hold | None:
        """The oldest of one kind of those that are not bound."""
        uid = next(iter(self._unbound[kind]), None)
        return self._placed[uid] if uid is not None else None

    def of_kind(self, kind: HoldKind) -> list[Hold]:
        """All of one kind of those that are not bound, the oldest first."""
        return [self._placed[uid] for uid in self._unbound[kind]]

    def tentative(self, uid: str) -> Placement | None:
        """What is held for a waiting pod that is not being bound."""
        hold = self._placed.get(uid)
        return hold.placement if hold is not None and hold.kind.is_tentative else None

    @property
    def tentative_count(self) -> int:
        """For how many pods something is held tentatively."""
        return sum(len(uids) for kind, uids in self._unbound.items() if kind.is_tentative)

    def reserve(self, pod: Pod, placement: Placement, until_s: float = inf) -> None:
        """Keep these cards for a pod once they are free. Reservations of less important pods for them end."""
        hold, cards = reservation(pod, placement, until_s), {part.card for part in placement.slices}
        for other in tuple(self.opened(hold.node).reserved.values()):
            its_cards = {part.card for part in other.placement.slices} if other.placement else set()
            if hold.gives_way_to > other.gives_way_to and cards & its_cards:
                self.end_reservation(other.pod.uid)
        self.end_reservation(pod.uid)
        self.put(hold)

    def rows_kept_from(
        self, request: Request, pod: Pod, row_of: Mapping[str, int], fitting: Collection[int]
    ) -> set[int]:
        """Those of the `fitting` rows whose cards are reserved for pods that come before this one."""
        uid, priority, found = pod.uid, pod.priority, set[int]()
        for name in {each.node for each in self.reserved.values() if each.is_kept_from(uid, priority)}:
            row, holds = row_of.get(name, -1), self.by_node[name]
            if row in fitting and holds.fit_beside_reserved(request, uid, priority) is Fit.HELD:
                found.add(row)
        return found

    def extend_reservation(self, uid: str, until_s: float) -> None:
        """The cards are kept until then, on the same terms as so far."""
        self.put(replace(self.reserved[uid], until_s=until_s))

    def end_reservation(self, uid: str) -> None:
        """The cards are kept no longer; an unknown pod is ignored."""
        if (hold := self.reserved.pop(uid, None)) is not None:
            holds = self.by_node[hold.node]
            del holds.reserved[uid]
            self.close_if_empty(holds)


@dataclass(slots=True)
class NodeHolds:
    """A node and what is kept of it. `node` is None while only its pods are known.

    Code that changes them must call `changed`: what is free is computed once for all readers in between.
    """

    name: str
    node: Node | None = None
    by_uid: dict[str, Hold] = field(default_factory=dict)  # what counts as placed
    reserved: dict[str, Hold] = field(default_factory=dict)  # by uid
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
        used, unplaced = self.used(), self.unplaced_units()
        cards = self.node.cards if self.node is not None else ()
        return any(used.get(card.index, 0) + unplaced > card.units for card in cards)

    def state(self) -> NodeState:
        """What is free now; never negative, whatever is held."""
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
        others = {uid: each for uid, each in self.by_uid.items() if uid not in uids}
        return NodeHolds(self.name, self.node, others).state()

    def kept_from(self, uid: str, priority: int) -> Taken:
        """What a pod must leave free for others."""
        return kept_from(self.reserved.values(), uid, priority) if self.reserved else NOTHING_TAKEN

    def open_to(self, taken: Taken) -> NodeState:
        """The state for a pod that must leave `taken` free.

        What leaving pods still hold serves the owners of that first; only what these need beyond it is
        subtracted from what is free now.
        """
        state = self.state()
        if not taken:
            return state
        leaving = by_card(each for each in self.by_uid.values() if each.pod.terminating)
        left, compute_left = list(state.left), list(state.compute_left)
        for slot, card in enumerate(state.node.cards):
            if card.index in taken:
                units, core = taken[card.index]
                units_soon, core_soon = leaving.get(card.index, (0, 0))
                left[slot] -= min(left[slot], max(0, units - units_soon))
                compute_left[slot] -= min(compute_left[slot], max(0, core - core_soon))
        return replace(state, left=tuple(left), compute_left=tuple(compute_left))

    def fit_beside_reserved(self, request: Request, uid: str, priority: int) -> Fit:
        """Whether a node with room has some that is not kept for pods that come before this one."""
        fits = why_not(self.open_to(self.kept_from(uid, priority)), request) is Fit.YES
        return Fit.YES if fits else Fit.HELD

    def beside(self, pod: Pod) -> tuple[tuple[str, int], ...]:
        """The other pods on its cards, by name, with the units that they hold there."""
        cards = {part.card for part in pod.placement.slices} if pod.placement is not None else set()
        found = []
        for each in self.by_uid.values():
            if each.placement is not None and each.pod.uid != pod.uid:
                units = sum(part.units for part in each.placement.slices if part.card in cards)
                found += [(each.pod.key, units)] if units else []
        return tuple(sorted(found))

    def comes_free(self, placement: Placement) -> bool:
        """Whether a pod that is leaving is still on one of these cards."""
        cards = {part.card for part in placement.slices}
        return any(
            each.pod.terminating
            and each.placement is not None
            and not cards.isdisjoint(part.card for part in each.placement.slices)
            for each in self.by_uid.values()
        )

    def row(self, host_used: HostResources) -> FleetNode:
        """The node for a `Fleet`, if its pods use this much CPU and memory."""
        state = self.state()
        node = state.node
        cpu, memory = node.host.cpu_milli or UNLIMITED, node.host.memory_mib or UNLIMITED
        models = {card.model for card in node.cards}
        return FleetNode(
            node.name,
            [card.units if card.index not in node.unhealthy else 0 for card in node.cards],
            state.left,
            state.compute_left,
            models.pop() if len(models) == 1 else "",
            cpu,
            memory,
            max(0.0, cpu - host_used.cpu_milli),
            max(0.0, memory - host_used.memory_mib),
            node.links,
            node.compute_percent,
            node.tier,
            node.names.memory,
            node.packing,
            node.compute_required,
            node.avoided,
            node.kubelet_away,
        )

    def _sum(self, amount: Callable[[CardSlice], int]) -> dict[int, int]:
        sums: dict[int, int] = {}
        for each in self.by_uid.values():
            for part in each.placement.slices if each.placement else ():
                sums[part.card] = sums.get(part.card, 0) + amount(part)
        for part in (part for orphan in (self.node.orphans if self.node else ()) for part in orphan.slices):
            sums[part.card] = sums.get(part.card, 0) + amount(part)
        return sums
