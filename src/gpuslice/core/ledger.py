"""Which pod holds what on which card: derived from events alone, so that it can be rebuilt at any time.

The API server's objects are the only truth. The ledger adds a placement that was *assumed* because its
binding is in flight. All methods are synchronous and none fails half way: no intermediate state is visible.

What counts against a card, each as a `Hold`:

* a bound pod's placement as its annotations say, until the pod is finished or gone; also while it terminates,
  because its containers still run;
* an assumed placement until the API server shows the pod bound, or refuses (`forget`);
* a tentative one, of a waiting pod, until it is assumed, given up, or gives way;
* what containers hold whose pods are gone, as the node's agent says;
* a bound pod that no annotation places (nodeName set by hand, another scheduler, a corrupt value) counts
  against **every** card of its node: it may be on any of them, and promising the same memory twice is worse
  than leaving some idle until the agent has written where it is.

Cards that are reserved while others still hold them count only against pods that do not come first, and
what a node's kubelet has rejected only against pods that it would reject as well (`why_not`).

A change costs only what changed: the row of a pod's node in the arrays is made again on demand (`flush`).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

from gpuslice.core.hold import NOBODY, Hold, HoldKind, hold_of
from gpuslice.core.holds import Holds
from gpuslice.core.host_resources import NO_HOST_RESOURCES, HostResources, HostUsage
from gpuslice.core.kubelets import Kubelets
from gpuslice.core.model import Node, Placement, Pod, Refusal, Request
from gpuslice.core.placement import Fit, NodeState, not_shared, place, why_not
from gpuslice.core.preemption import LOWEST
from gpuslice.core.replicas import Replicas
from gpuslice.core.shape import Listener, Shape

if TYPE_CHECKING:
    from gpuslice.core.policy.fit import Fits
    from gpuslice.core.policy.fleet import Fleet, Rows

NOBODY_IN_PARTICULAR = Pod("", "", "", priority=LOWEST)
PROMISED_FOR_S = 2.0  # kube-scheduler binds within milliseconds, unless it has changed its mind
REMEMBERED_GONE = 10_000  # uids of pods that ended, so that a late event does not revive one


def shape_of(request: Request) -> Shape:
    """What placement considers of a request."""
    return Shape(
        units=request.units_per_card,
        cards=request.card_count,
        compute_percent=request.compute_percent,
        cpu_milli=request.host.cpu_milli,
        memory_mib=request.host.memory_mib,
        min_tier=request.min_tier,
        names=request.names.memory,
    )


class Ledger:
    """Which pods hold what in a cluster. `fleet` has the same as arrays, up to date after `flush`.

    `now_s`: seconds since the epoch, for what kubelets have rejected, which counts for nothing without.
    """

    def __init__(self, listener: Listener | None = None, *, now_s: Callable[[], float] = lambda: 0.0) -> None:
        self._host_usage = HostUsage()
        self.listener = listener
        self.pods: dict[str, Pod] = {}  # by uid: every living pod that asks for or holds something
        self.replicas = Replicas()
        self.nominated: dict[str, str] = {}  # uid → node, by the status of waiting pods
        self.holds = Holds()
        self.kubelets = Kubelets(now_s)
        self.withdrawn: dict[str, str] = {}  # uid → the node of a nomination that keeps no cards
        self._uid_of: dict[str, str] = {}  # namespace/name → uid
        self._without_cards: dict[str, Shape] = {}  # by uid, on nodes with cards, that the listener knows of
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
            held = self.holds.of(pod.uid)
            now = hold_of(pod, held)
            if now == held:
                return
            if held is not None and now is not None and held.takes_as_much_as(now):
                self.holds.put(now)  # the row of its node stays valid
                self.kubelets.has(now, self.holds.by_node[now.node].node)
            else:
                self._drop(pod.uid)
                if now is not None:
                    self._hold(now)
            if now is not None and not now.kind.is_tentative and (held is None or held.kind.is_tentative):
                self._tell_placed(pod)
        else:
            self._let_go(pod.uid)
            self._use_host(pod.uid, pod.node, pod.host)
            if (at := self.holds.on(pod.node)) and at.node is not None and at.node.divides_cards:
                self._tell_without_cards(pod)

    def remove_pod(self, uid: str) -> None:
        """A pod is gone for good: deleted or finished. It never comes back under this uid."""
        self.gone[uid] = None
        while len(self.gone) > REMEMBERED_GONE:
            self.gone.popitem(last=False)
        self._let_go(uid)
        self._use_host(uid, "", NO_HOST_RESOURCES)
        if (shape := self._without_cards.pop(uid, None)) is not None and self.listener is not None:
            self.listener.departed(shape)

    def apply_node(self, node: Node) -> None:
        """A node as the API server shows it now: cards, their health and labels may all have changed."""
        holds = self.holds.opened(node.name)
        if holds.node == node:
            return
        holds.node = node
        holds.changed()
        self.replicas.node_is_in(node.name, node.zone)
        self._stale[node.name] = None

    def remove_node(self, name: str) -> None:
        """A node is gone; what its pods hold stays in the ledger in case it comes back."""
        holds = self.holds.on(name)
        if holds is None:
            return
        holds.node = None
        holds.changed()
        self.kubelets.unconfirmed.remove_node(name)
        self._stale[name] = None
        self.holds.close_if_empty(holds)

    # -- what we decide ----------------------------------------------------------------------------------

    def assume(self, pod: Pod, placement: Placement) -> Refusal | None:
        """Hold `placement` for `pod` from now on; a Refusal if there is no room for it.

        What the pod held before, if anything, is replaced: no pod is ever placed twice.
        """
        if pod.uid in self.gone:
            return Refusal("The pod is finished or gone", never=True)
        before, after, refusal = self.holds.of(pod.uid), Hold(pod, placement, HoldKind.ASSUMED), None
        if before is not None and before.takes_as_much_as(after):
            self.holds.put(after)  # the row of its node stays valid
            self.kubelets.has(after, self.holds.by_node[after.node].node)
        else:
            refusal = self._replace(before, after)
        if refusal is None and (before is None or before.kind.is_tentative):
            self._tell_placed(pod)
        return refusal

    def nominate(self, pod: Pod, placement: Placement, until_s: float = inf) -> Refusal | None:
        """Hold `placement` for a waiting pod that holds nothing, until a pod comes that has no other room."""
        return self.hold_tentatively(Hold(pod, placement, HoldKind.NOMINATED, pod.priority, until_s))

    def promise(self, pod: Pod, placement: Placement) -> Refusal | None:
        """The same for a pod that filter lets pass: for a moment, until its bind comes; equals must wait."""
        return self.hold_tentatively(
            Hold(pod, placement, HoldKind.PROMISED, pod.priority + 1, self.kubelets.now_s() + PROMISED_FOR_S)
        )

    def hold_for_group(self, pod: Pod, placement: Placement, until_s: float = inf) -> Refusal | None:
        """For a member of a group; it gives way to nobody: one member without cards breaks up its group."""
        return self.hold_tentatively(Hold(pod, placement, HoldKind.GROUP, NOBODY, until_s))

    def release_nominated(self, request: Request, priority: int, only_on: str = "") -> bool:
        """End what is nominated or promised and gives way to a pod of `priority`, where `request` then fits.

        On any node, or on one. False if no hold is in its way.
        """
        in_the_way = defaultdict[str, list[str]](list)
        for hold in (*self.holds.of_kind(HoldKind.NOMINATED), *self.holds.of_kind(HoldKind.PROMISED)):
            if only_on in ("", hold.node) and priority >= hold.gives_way_to:
                in_the_way[hold.node].append(hold.pod.uid)
        freed = [
            name
            for name, uids in in_the_way.items()
            if why_not(self.holds.by_node[name].state_without(uids), request) is Fit.YES
        ]
        for name in freed:
            for uid in in_the_way[name]:
                self._drop(uid)
        return bool(freed)

    def forget(self, uid: str) -> None:
        """The API server has refused what was assumed, or a tentative hold is given up. A bound pod stays."""
        hold = self.holds.of(uid)
        if hold is not None and not hold.is_bound:
            self._drop(uid)

    def grow(self, pod: Pod, kind: HoldKind = HoldKind.GROWING) -> None:
        """Hold for a bound pod what `pod` says while that is being written; as BOUND what is known again."""
        if pod.uid in self.pods:
            self._drop(pod.uid)
            self._hold(Hold(pod, pod.placement, kind))

    def assumed(self) -> list[Hold]:
        """Placements that the API server has not shown as bound yet, oldest first."""
        return self.holds.of_kind(HoldKind.ASSUMED)

    # -- what is asked -----------------------------------------------------------------------------------

    def why_not(
        self, request: Request, rows: Rows, pod: Pod = NOBODY_IN_PARTICULAR, *, host_limits: bool = False
    ) -> Fits:
        """For each of these rows of the fleet, whether it holds a pod now, and if not, why: a `Fit`.

        `host_limits`: CPU and memory count as well, as far as they are known.
        """
        from gpuslice.core.policy.fit import why_not

        found = why_not(self.flush(), shape_of(request), rows, host_limits=host_limits)
        if self.holds.reserved:
            fitting = set(rows[found == Fit.YES].tolist())
            closed = self.holds.rows_kept_from(request, pod, self.fleet.row_of, fitting)
            found[[at for at, row in enumerate(rows.tolist()) if row in closed] if closed else []] = Fit.HELD
        if self.kubelets.rejections and (rejected := set(self.rows_to_avoid(request, pod)[0])):
            fitting = {at for at, row in enumerate(rows.tolist()) if row in rejected}
            found[[at for at in fitting if found[at] == Fit.YES]] = Fit.IN_BACKOFF
        return found

    def why_not_on(self, node_name: str, request: Request, uid: str = "", priority: int = LOWEST) -> Fit:
        """The same for one node, without the arrays, CPU and memory included."""
        holds = self.holds.on(node_name)
        if holds is None or holds.node is None:
            return Fit.NOT_SHARED
        found = why_not(holds.state(), request, self._host_usage.used(node_name))
        return found if found is not Fit.YES else holds.fit_beside_reserved(request, uid, priority)

    def rows_to_avoid(self, request: Request, pod: Pod) -> tuple[list[int], list[int]]:
        """As `Kubelets.rows_to_avoid`."""
        return self.kubelets.rows_to_avoid(request, pod, self.fleet.row_of, self.state)

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
        holds = self.holds.on(node_name)
        return holds.state() if holds is not None and holds.node is not None else None

    def host_used(self, node_name: str) -> HostResources:
        """CPU and memory that the pods of a node ask for."""
        return self._host_usage.used(node_name)

    def node_names(self) -> list[str]:
        """Every known node, sorted."""
        return sorted(name for name, holds in self.holds.by_node.items() if holds.node is not None)

    def node_count(self) -> int:
        """How many nodes the cluster has, with and without cards."""
        return sum(holds.node is not None for holds in self.holds.by_node.values())

    def flush(self) -> Fleet:
        """The fleet arrays, updated with what has changed since the last call; old promises end."""
        now_s = self.kubelets.now_s()
        while (hold := self.holds.oldest(HoldKind.PROMISED)) is not None:
            if 0 < hold.until_s - now_s <= PROMISED_FOR_S:  # more is left if the clock was set back
                break
            self._drop(hold.pod.uid)
        for name in self._stale:
            holds = self.holds.on(name)
            if holds is None or holds.node is None or not holds.node.divides_cards:
                self.fleet.drop(name)
            else:
                self.fleet.put(holds.row(self._host_usage.used(name)))
        self._stale.clear()
        return self.fleet

    def snapshot(self) -> dict[str, NodeState]:
        """The state of every known node. Copies everything: for tests and small clusters."""
        return {name: self.holds.by_node[name].state() for name in self.node_names()}

    def overcommitted(self) -> Iterator[tuple[str, int, int, int]]:
        """Node, card, allocated units and the card's units wherever more is allocated than exists."""
        for name in self.node_names():
            holds = self.holds.by_node[name]
            used = holds.used()
            for card in holds.node.cards if holds.node else ():
                if used.get(card.index, 0) > card.units:
                    yield name, card.index, used[card.index], card.units

    # -- holds -------------------------------------------------------------------------------------------

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
        tentative = self.holds.tentative(uid) is not None
        held = self._drop(uid) and not tentative
        self.holds.end_reservation(uid)
        self.nominated.pop(uid, None)
        pod = self.pods.pop(uid, None)
        if pod is None:
            return
        if self._uid_of.get(pod.key) == uid:
            del self._uid_of[pod.key]
        if held and self.listener is not None and pod.request is not None:
            self.listener.departed(shape_of(pod.request))

    def hold_tentatively(self, hold: Hold) -> Refusal | None:
        if hold.pod.uid in self.gone or self.holds.of(hold.pod.uid) is not None:
            return Refusal("The pod is gone, or has its cards already")
        return self._replace(None, hold)

    def _hold(self, hold: Hold) -> None:
        self.holds.put(hold)
        holds = self.holds.by_node[hold.node]
        holds.changed()
        self._use_host(hold.pod.uid, hold.node, hold.pod.host)
        self.replicas.put(hold.pod.uid, hold.pod.replica_of, hold.node)
        self.kubelets.has(hold, holds.node)
        self._stale[hold.node] = None
        if hold.is_bound and self.holds.tentative_count and holds.crowded:  # it was not expected there
            for uid in [uid for uid, each in holds.by_uid.items() if each.kind.is_tentative]:
                self._drop(uid)

    def _drop(self, uid: str) -> bool:
        hold = self.holds.drop(uid)
        if hold is None:
            return False
        self._use_host(uid, "", NO_HOST_RESOURCES)
        self.replicas.drop(uid)
        self.kubelets.has_not(uid)
        self._stale[hold.node] = None
        return True

    def _use_host(self, uid: str, node: str, host: HostResources) -> None:
        """A pod uses CPU and memory of this node and of no other; of none if `node` is ""."""
        for name in self._host_usage.put(uid, node, host):
            if name in self.holds.by_node:
                self._stale[name] = None

    def _tell_placed(self, pod: Pod) -> None:
        if self.listener is not None and pod.request is not None:
            self.listener.placed(shape_of(pod.request))

    def _tell_without_cards(self, pod: Pod) -> None:
        """The CPU and memory that it takes is lost to the cards of its node, and more of them will come.

        Those that come with each node never become more.
        """
        listener, host = self.listener, pod.host
        if listener is None or not host or pod.comes_with_node or pod.uid in self._without_cards:
            return
        self._without_cards[pod.uid] = shape = Shape(0, 0, host.cpu_milli, host.memory_mib)
        listener.arrived(shape)
        listener.placed(shape)

    # -- room --------------------------------------------------------------------------------------------

    def _replace(self, before: Hold | None, after: Hold) -> Refusal | None:
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
        if pod.uid not in self.pods and after.kind is not HoldKind.ADMITTED:  # those may not exist
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
