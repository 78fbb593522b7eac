"""Which pod holds what on which card: derived from events alone, so that it can be rebuilt at any time.

The API server's objects are the only truth. The ledger adds one thing that they do not show yet: a placement
that was *assumed* because its binding is in flight. All methods are synchronous and none fails half way, so
that no intermediate state is ever visible.

What counts against a card:

* a bound pod's placement as its annotations say, until the pod is finished or gone; also while it terminates,
  because its containers still run;
* an assumed placement until the API server shows the pod bound, or refuses (`forget`);
* a planned placement, of a waiting pod with a nominated node, until it is assumed, given up, or gives way to
  a pod without other room (`make_way`): a plan is no promise, unless it was made as one;
* what containers hold whose pods are gone, as the node's agent says;
* a bound pod that no annotation places (nodeName set by hand, another scheduler, a corrupt value) counts
  against **every** card of its node: it may be on any of them, and promising the same memory twice is worse
  than leaving some idle until the agent has written where it is.

A change costs only what changed: a pod affects only its own node, and the node's row in the fleet's arrays is
computed again when somebody next asks (`flush`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from gpuslice.core.guests import Guests
from gpuslice.core.host_resources import NO_HOST_RESOURCES, HostResources, HostUsage
from gpuslice.core.model import Node, Placement, Pod, Refusal, Request, Tier
from gpuslice.core.node_allocations import Allocation, NodeAllocations, allocation_of
from gpuslice.core.placement import NodeState, not_shared, place
from gpuslice.core.replicas import Replicas
from gpuslice.core.reservation import Reservations
from gpuslice.core.shape import Shape

if TYPE_CHECKING:
    from gpuslice.core.policy.fleet import Fleet

REMEMBERED_GONE = 10_000  # uids of pods that ended, so that a late event does not revive one


class Listener(Protocol):
    """Called once for each of these events of a pod: a policy that learns what to expect."""

    def arrived(self, shape: Shape) -> None: ...
    def placed(self, shape: Shape) -> None: ...
    def departed(self, shape: Shape) -> None: ...


def shape_of(request: Request) -> Shape:
    """What placement considers of a request."""
    return Shape(
        units=request.units_per_card,
        cards=request.card_count,
        compute_percent=request.compute_percent,
        cpu_milli=request.host.cpu_milli,
        memory_mib=request.host.memory_mib,
    )


class Ledger:
    """Which pods hold what in a cluster. `fleet` has the same as arrays, up to date after `flush`."""

    def __init__(self, listener: Listener | None = None) -> None:
        self._host_usage = HostUsage()
        self.listener = listener
        self.pods: dict[str, Pod] = {}  # by uid: every living pod that asks for or holds something
        self.compute_required: set[str] = set()  # nodes that take only pods that ask for compute
        self.tiers: dict[str, Tier] = {}  # what enforces limits on each node
        self.avoided: set[str] = set()  # nodes with a taint that keeps away pods that have a choice
        self.replicas = Replicas()
        self.reservations = Reservations()
        self.nominated: dict[str, str] = {}  # uid → node, by the status of waiting pods
        self._nodes: dict[str, NodeAllocations] = {}
        self._where: dict[str, str] = {}  # uid → node name of its allocation
        self._assumed: dict[str, None] = {}  # uids of assumed allocations, in order
        self._planned: dict[str, None] = {}  # and of those that are only planned
        self._kept: set[str] = set()  # planned ones that do not give way
        self._uid_of: dict[str, str] = {}  # namespace/name → uid
        self._guests = Guests()
        self.gone: OrderedDict[str, None] = OrderedDict()  # uids of deleted and finished pods, the newest
        self._stale: dict[str, None] = {}  # nodes whose row is out of date, in order of change

    @cached_property
    def fleet(self) -> Fleet:
        """The arrays. Code that needs single nodes, such as the command line, does without them and NumPy."""
        from gpuslice.core.policy.fleet import Fleet

        return Fleet(host_limits=False)  # CPU and memory are checked by kube-scheduler

    # -- what happened -----------------------------------------------------------------------------------

    def apply_pod(self, pod: Pod) -> None:
        """A pod as the API server showed it. Old, repeated and late news change nothing."""
        known, namesake = self.pods.get(pod.uid), self.pod_named(pod.namespace, pod.name)
        before = known or namesake
        if pod.uid in self.gone or (before is not None and 0 < pod.version < before.version):
            return
        if namesake is not None and namesake.uid != pod.uid:
            self.remove_pod(namesake.uid)  # names are unique: the old pod is gone, whether or not we saw it
        if pod.finished:
            self.remove_pod(pod.uid)
        elif pod.request is not None or pod.placement is not None or pod.problem:
            self._remember(pod)
            held = self.allocation(pod.uid)
            now = allocation_of(pod, held)
            if now == held:
                return
            if held is not None and now is not None and held.takes_as_much_as(now):
                self._write_down(now)  # the row of its node stays valid
            else:
                self._drop(pod.uid)
                if now is not None:
                    self._hold(now)
            if now is not None and not now.planned and (held is None or held.planned):
                self._tell_placed(pod)
        else:
            self._let_go(pod.uid)
            self._use_host(pod.uid, pod.node, pod.host)
            if (at := self._nodes.get(pod.node)) and at.node is not None and at.node.divides_cards:
                self._guests.came(pod, self.listener)

    def remove_pod(self, uid: str) -> None:
        """A pod is gone for good: deleted or finished. It never comes back under this uid."""
        self.gone[uid] = None
        while len(self.gone) > REMEMBERED_GONE:
            self.gone.popitem(last=False)
        self._let_go(uid)
        self._use_host(uid, "", NO_HOST_RESOURCES)
        self._guests.went(uid, self.listener)

    def apply_node(self, node: Node) -> None:
        """A node as the API server shows it now: cards, their health and labels may all have changed."""
        allocations = self._allocations_on(node.name)
        if allocations.node == node:
            return
        allocations.node = node
        allocations.changed()
        (self.compute_required.add if node.compute_required else self.compute_required.discard)(node.name)
        self.tiers[node.name] = node.tier
        (self.avoided.add if node.avoided else self.avoided.discard)(node.name)
        self.replicas.node_is_in(node.name, node.zone)
        self._stale[node.name] = None

    def remove_node(self, name: str) -> None:
        """A node is gone; what its pods hold stays in the ledger in case it comes back."""
        allocations = self._nodes.get(name)
        if allocations is None:
            return
        allocations.node = None
        allocations.changed()
        self.compute_required.discard(name)
        self.tiers.pop(name, None)
        self.avoided.discard(name)
        self._stale[name] = None
        self._close_if_empty(allocations)

    # -- what we decide ----------------------------------------------------------------------------------

    def assume(self, pod: Pod, placement: Placement) -> Refusal | None:
        """Hold `placement` for `pod` from now on; a Refusal if there is no room for it.

        The pod's earlier allocation, if any, is replaced: no pod is ever placed twice.
        """
        if pod.uid in self.gone:
            return Refusal("The pod is finished or gone", never=True)
        before = self.allocation(pod.uid)
        refusal = self._replace(before, Allocation(pod, placement.node, placement, assumed=True))
        if refusal is None and (before is None or before.planned):
            self._tell_placed(pod)
        return refusal

    def plan(self, pod: Pod, placement: Placement, *, makes_way: bool = True) -> Refusal | None:
        """Hold `placement` temporarily for a waiting pod that holds nothing."""
        if pod.uid in self.gone or self.allocation(pod.uid) is not None:
            return Refusal("The pod is gone, or has its cards already")
        allocation = Allocation(pod, placement.node, placement, assumed=True, planned=True)
        refusal = self._replace(None, allocation)
        if refusal is None and not makes_way:
            self._kept.add(pod.uid)
        return refusal

    def planned(self, uid: str) -> Placement | None:
        """What is planned for a pod."""
        allocation = self.allocation(uid) if uid in self._planned else None
        return allocation.placement if allocation is not None else None

    @property
    def plans(self) -> int:
        """How many pods have a plan."""
        return len(self._planned)

    def make_way(self, request: Request, priority: int, only_on: str = "") -> bool:
        """Give up plans of pods that are not more important than `priority`, where `request` then fits.

        On any node, or on one. False if no plan is in its way.
        """
        in_the_way: dict[str, list[str]] = {}
        for uid in [uid for uid in self._planned if uid not in self._kept]:
            name = self._where[uid]
            if only_on in ("", name) and self._nodes[name].by_uid[uid].pod.priority <= priority:
                in_the_way.setdefault(name, []).append(uid)
        made = [
            name
            for name, uids in in_the_way.items()
            if not isinstance(place(self._nodes[name].state_without(uids), request), Refusal)
        ]
        for name in made:
            for uid in in_the_way[name]:
                self._drop(uid)
        return bool(made)

    def forget(self, uid: str) -> None:
        """The API server has refused an assumed placement. A bound one is not affected."""
        allocation = self.allocation(uid)
        if allocation is not None and allocation.assumed:
            self._drop(uid)

    def assumed(self) -> list[Allocation]:
        """Placements that the API server has not shown as bound yet, oldest first."""
        return [self._nodes[self._where[uid]].by_uid[uid] for uid in self._assumed]

    # -- what is asked -----------------------------------------------------------------------------------

    def allocation(self, uid: str) -> Allocation | None:
        name = self._where.get(uid)
        return self._nodes[name].by_uid[uid] if name is not None else None

    def pod_named(self, namespace: str, name: str) -> Pod | None:
        """The living pod of this name, if it asks for or holds something of ours."""
        uid = self._uid_of.get(f"{namespace}/{name}")
        return self.pods.get(uid) if uid is not None else None

    def waiting_after(self, uid: str) -> Iterator[str]:
        """The uids of waiting pods that came after this one, which is usually kube-scheduler's order."""
        pods = iter(self.pods.values())
        next((pod for pod in pods if pod.uid == uid), None)
        return (pod.uid for pod in pods if not pod.node and pod.request is not None)

    def state(self, node_name: str) -> NodeState | None:
        """The current state of one node; None if it is not known."""
        allocations = self._nodes.get(node_name)
        return allocations.state() if allocations is not None and allocations.node is not None else None

    def allocations(self, node_name: str) -> NodeAllocations | None:
        """A node's allocations, for reading only."""
        return self._nodes.get(node_name)

    def host_used(self, node_name: str) -> HostResources:
        """CPU and memory that the pods of a node ask for."""
        return self._host_usage.used(node_name)

    def host_used_without_cards(self, node_name: str) -> HostResources:
        """CPU and memory that a node's pods without cards ask for."""
        all_of_it, allocations = self._host_usage.used(node_name), self._nodes.get(node_name)
        held = allocations.by_uid.values() if allocations is not None else ()
        mine = [allocation.pod.host for allocation in held]
        return HostResources(
            all_of_it.cpu_milli - sum(host.cpu_milli for host in mine),
            all_of_it.memory_mib - sum(host.memory_mib for host in mine),
        )

    def rows_below(self, tier: Tier) -> list[int]:
        """The rows of nodes with cards whose limits are enforced by less than this."""
        row_of = self.fleet.row_of
        return [row_of[name] for name, found in self.tiers.items() if found < tier and name in row_of]

    def node_names(self) -> list[str]:
        """Every known node, sorted."""
        return sorted(name for name, allocations in self._nodes.items() if allocations.node is not None)

    def node_count(self) -> int:
        """How many nodes the cluster has, with and without cards."""
        return sum(allocations.node is not None for allocations in self._nodes.values())

    def flush(self) -> Fleet:
        """The fleet arrays, updated with what has changed since the last call."""
        for name in self._stale:
            allocations = self._nodes.get(name)
            if allocations is None or allocations.node is None or not allocations.node.divides_cards:
                self.fleet.drop(name)
            else:
                self.fleet.put(allocations.row(self._host_usage.used(name)))
        self._stale.clear()
        return self.fleet

    def snapshot(self) -> dict[str, NodeState]:
        """The state of every known node. Copies everything: for tests and small clusters."""
        return {name: self._nodes[name].state() for name in self.node_names()}

    def overcommitted(self) -> Iterator[tuple[str, int, int, int]]:
        """Node, card, allocated units and the card's units wherever more is allocated than exists."""
        for name in self.node_names():
            allocations = self._nodes[name]
            used = allocations.used()
            for card in allocations.node.cards if allocations.node else ():
                if used.get(card.index, 0) > card.units:
                    yield name, card.index, used[card.index], card.units

    # -- allocations -------------------------------------------------------------------------------------

    def _remember(self, pod: Pod) -> None:
        if pod.uid not in self.pods and self.listener is not None and pod.request is not None:
            self.listener.arrived(shape_of(pod.request))
        self.pods[pod.uid] = pod
        self._uid_of[pod.key] = pod.uid
        if pod.nominated and not pod.node:
            self.nominated[pod.uid] = pod.nominated
        else:
            self.nominated.pop(pod.uid, None)

    def _let_go(self, uid: str) -> None:
        planned = uid in self._planned
        held = self._drop(uid) and not planned
        self.reservations.drop(uid)
        self.nominated.pop(uid, None)
        pod = self.pods.pop(uid, None)
        if pod is None:
            return
        if self._uid_of.get(pod.key) == uid:
            del self._uid_of[pod.key]
        if held and self.listener is not None and pod.request is not None:
            self.listener.departed(shape_of(pod.request))

    def _hold(self, allocation: Allocation) -> None:
        self._write_down(allocation)
        self._allocations_on(allocation.node).changed()
        self._use_host(allocation.pod.uid, allocation.node, allocation.pod.host)
        self._where[allocation.pod.uid] = allocation.node
        self.replicas.put(allocation.pod.uid, allocation.pod.replica_of, allocation.node)
        self._stale[allocation.node] = None
        if self._planned and not allocation.assumed:
            allocations = self._nodes[allocation.node]
            if allocations.crowded:  # an unexpected pod took the room: plans give way
                for uid in [uid for uid, each in allocations.by_uid.items() if each.planned]:
                    self._drop(uid)

    def _write_down(self, allocation: Allocation) -> None:
        uid = allocation.pod.uid
        self._allocations_on(allocation.node).by_uid[uid] = allocation
        self.reservations.drop(uid)
        self._planned.pop(uid, None)
        self._assumed.pop(uid, None)
        if allocation.assumed:
            (self._planned if allocation.planned else self._assumed)[uid] = None

    def _drop(self, uid: str) -> bool:
        name = self._where.pop(uid, None)
        if name is None:
            return False
        self._use_host(uid, "", NO_HOST_RESOURCES)
        self.replicas.drop(uid)
        self._assumed.pop(uid, None)
        self._planned.pop(uid, None)
        self._kept.discard(uid)
        allocations = self._nodes[name]
        del allocations.by_uid[uid]
        allocations.changed()
        self._stale[name] = None
        self._close_if_empty(allocations)
        return True

    def _use_host(self, uid: str, node: str, host: HostResources) -> None:
        """A pod uses CPU and memory of this node and of no other; of none if `node` is ""."""
        for name in self._host_usage.put(uid, node, host):
            if name in self._nodes:
                self._stale[name] = None

    def _allocations_on(self, name: str) -> NodeAllocations:
        allocations = self._nodes.get(name)
        if allocations is None:
            allocations = self._nodes[name] = NodeAllocations(name)
        return allocations

    def _close_if_empty(self, allocations: NodeAllocations) -> None:
        if allocations.node is None and not allocations.by_uid:
            del self._nodes[allocations.name]

    def _tell_placed(self, pod: Pod) -> None:
        if self.listener is not None and pod.request is not None:
            self.listener.placed(shape_of(pod.request))

    # -- room --------------------------------------------------------------------------------------------

    def _replace(self, before: Allocation | None, after: Allocation) -> Refusal | None:
        """Hold `after` instead of `before`, if there is room for it without that."""
        pod, placement = after.pod, after.placement
        assert placement is not None
        self._drop(pod.uid)
        state, refusal = self.state(placement.node), None
        if state is None or pod.request is None:
            refusal = not_shared(placement.node)
        elif not _has_room(state, placement):
            found = place(state, pod.request)
            if isinstance(found, Refusal):
                refusal = found
            else:
                cards = ", ".join(str(part.card) for part in found.slices)
                detail = f"card {cards} would still fit"
                refusal = Refusal("The chosen card was taken meanwhile", detail=detail)
        if refusal is not None:
            if before is not None:
                self._hold(before)
            return refusal
        if pod.uid not in self.pods:
            self._remember(pod)
        self._hold(after)
        return None


def _has_room(state: NodeState, placement: Placement) -> bool:
    slot_of = {card.index: slot for slot, card in enumerate(state.node.cards)}
    for part in placement.slices:
        slot = slot_of.get(part.card, -1)
        if slot < 0 or state.left[slot] < part.units or state.compute_left[slot] < part.compute_percent:
            return False
    return True
