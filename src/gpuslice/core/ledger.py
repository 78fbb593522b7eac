"""Who holds what on which card: kept from events alone, and the same as if rebuilt from them at any time.

The API server's objects are the only truth. The ledger adds one thing that they do not know yet: a placement
that was *assumed* because a binding is on its way. All methods are synchronous and none fails half way, so
that nothing is ever seen between two of them.

What is counted against a card:

* a bound pod's placement as its annotations say, until the pod is finished or gone; also while it terminates,
  because its containers still run;
* an assumed placement until the API server shows the pod bound, or says no (`forget`);
* a planned placement, of a pod that waits with its node nominated, until it is assumed, given up, or makes
  way for a pod that finds no other room (`make_way`): a plan is no promise;
* a bound pod that no annotation places (nodeName set by hand, another scheduler, a corrupt value) counts
  against **every** card of its node: it may sit on any of them, and to promise the same memory twice is worse
  than to leave some idle until the agent has written where it sits.

One change costs what changed: a pod touches its node's book only, and the node's row of the fleet arrays is
computed again when somebody next asks (`flush`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from gpuslice.core.book import Holding, NodeBook, holding_of
from gpuslice.core.feed import NO_FEED, Fed, Feed
from gpuslice.core.model import Node, Placement, Pod, Refusal, Request
from gpuslice.core.nomination import Nominations
from gpuslice.core.placement import NodeState, not_shared, place
from gpuslice.core.policy.fleet import Fleet, Shape
from gpuslice.core.replicas import Replicas

REMEMBERED_GONE = 10_000  # uids of pods that ended: a late event must not bring one back


class Witness(Protocol):
    """Hears of pods, each of these once for a pod: a policy that learns what to expect."""

    def arrived(self, shape: Shape) -> None: ...
    def placed(self, shape: Shape) -> None: ...
    def departed(self, shape: Shape) -> None: ...


def shape_of(request: Request) -> Shape:
    """What placement sees of a request."""
    return Shape(
        units=request.units_per_gpu,
        cards=request.gpu_count,
        core_percent=request.core_percent,
        cpu_milli=request.feed.cpu_milli,
        memory_mib=request.feed.memory_mib,
    )


class Ledger:
    """The book of a cluster. `fleet` holds the same as arrays, up to date after `flush`."""

    def __init__(self, witness: Witness | None = None) -> None:
        self.fleet = Fleet(feed_limits=False)  # CPU and memory are kube-scheduler's to refuse for
        self._fed = Fed()
        self.witness = witness
        self.pods: dict[str, Pod] = {}  # by uid: every living pod that asks for or holds something
        self.core_required: set[str] = set()  # nodes that take only pods that ask for compute
        self.avoided: set[str] = set()  # nodes that a taint keeps for those who have no other
        self.replicas = Replicas()
        self.nominations = Nominations()
        self.nominated: dict[str, str] = {}  # uid → node, of waiting pods whose status names one
        self._books: dict[str, NodeBook] = {}
        self._where: dict[str, str] = {}  # uid → node name of its holding
        self._assumed: dict[str, None] = {}  # uids of holdings that are assumed, in order
        self._planned: dict[str, None] = {}  # and of those that are only planned
        self._uid_of: dict[str, str] = {}  # namespace/name → uid
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._stale: dict[str, None] = {}  # nodes whose row is not what their book says, in order of change

    # -- what happened -----------------------------------------------------------------------------------

    def apply_pod(self, pod: Pod) -> None:
        """A pod as the API server showed it. Old, repeated and late news change nothing."""
        if pod.uid in self._gone or self._is_old(pod):
            return
        self._end_namesake(pod)
        if pod.finished:
            self.remove_pod(pod.uid)
        elif _concerns_us(pod):
            self._keep(pod)
        else:
            self._let_go(pod.uid)
            self._feed(pod.uid, pod.node, pod.feed)

    def remove_pod(self, uid: str) -> None:
        """A pod is gone for good: deleted or finished. It never comes back under this uid."""
        self._gone[uid] = None
        while len(self._gone) > REMEMBERED_GONE:
            self._gone.popitem(last=False)
        self._let_go(uid)
        self._feed(uid, "", NO_FEED)

    def apply_node(self, node: Node) -> None:
        """A node as the API server shows it now: cards, their health and labels may all have changed."""
        book = self._book(node.name)
        if book.node == node:
            return
        book.node = node
        book.changed()
        (self.core_required.add if node.core_required else self.core_required.discard)(node.name)
        (self.avoided.add if node.avoided else self.avoided.discard)(node.name)
        self.replicas.node_is_in(node.name, node.zone)
        self._stale[node.name] = None

    def remove_node(self, name: str) -> None:
        """A node is gone; what its pods hold stays in the book in case it comes back."""
        book = self._books.get(name)
        if book is None:
            return
        book.node = None
        book.changed()
        self.core_required.discard(name)
        self.avoided.discard(name)
        self._stale[name] = None
        self._close_if_empty(book)

    # -- what we decide ----------------------------------------------------------------------------------

    def assume(self, pod: Pod, placement: Placement) -> Refusal | None:
        """Hold `placement` for `pod` from now on; a Refusal when there is no room for it.

        The pod's earlier holding, if any, makes way: nobody is ever placed twice.
        """
        if pod.uid in self._gone:
            return Refusal("The pod is finished or gone", never=True)
        before = self.holding(pod.uid)
        refusal = self._replace(before, Holding(pod, placement.node, placement, assumed=True))
        if refusal is None and (before is None or before.planned):
            self._tell_placed(pod)
        return refusal

    def plan(self, pod: Pod, placement: Placement) -> Refusal | None:
        """Hold `placement` for a waiting pod that holds nothing, for the time being."""
        if pod.uid in self._gone or self.holding(pod.uid) is not None:
            return Refusal("The pod is gone, or has its cards already")
        return self._replace(None, Holding(pod, placement.node, placement, assumed=True, planned=True))

    def planned(self, uid: str) -> Placement | None:
        """What is planned for a pod."""
        holding = self.holding(uid) if uid in self._planned else None
        return holding.placement if holding is not None else None

    @property
    def plans(self) -> int:
        """How many pods have a plan."""
        return len(self._planned)

    def make_way(self, request: Request, priority: int, only_on: str = "") -> bool:
        """Give up plans where `request` then fits, of pods that are not more important than `priority`.

        On any node, or on one. False when no plan is in its way.
        """
        in_the_way: dict[str, list[str]] = {}
        for uid in self._planned:
            name = self._where[uid]
            if only_on in ("", name) and self._books[name].holdings[uid].pod.priority <= priority:
                in_the_way.setdefault(name, []).append(uid)
        made = [
            name
            for name, uids in in_the_way.items()
            if not isinstance(place(self._books[name].state_without(uids), request), Refusal)
        ]
        for name in made:
            for uid in in_the_way[name]:
                self._drop_holding(uid)
        return bool(made)

    def forget(self, uid: str) -> None:
        """The API server has said no to an assumed placement. What is bound is not touched."""
        holding = self.holding(uid)
        if holding is not None and holding.assumed:
            self._drop_holding(uid)

    def assumed(self) -> list[Holding]:
        """Placements that the API server has not shown bound yet, oldest first."""
        return [self._books[self._where[uid]].holdings[uid] for uid in self._assumed]

    # -- what is asked -----------------------------------------------------------------------------------

    def holding(self, uid: str) -> Holding | None:
        name = self._where.get(uid)
        return self._books[name].holdings[uid] if name is not None else None

    def pod_named(self, namespace: str, name: str) -> Pod | None:
        """The living pod of this name, if it asks for or holds something of ours."""
        uid = self._uid_of.get(f"{namespace}/{name}")
        return self.pods.get(uid) if uid is not None else None

    def state(self, node_name: str) -> NodeState | None:
        """One node as it stands; None when it is not known."""
        book = self._books.get(node_name)
        return book.state() if book is not None and book.node is not None else None

    def book(self, node_name: str) -> NodeBook | None:
        """A node's book, to be read only."""
        return self._books.get(node_name)

    def eaten(self, node_name: str) -> Feed:
        """CPU and memory of a node that its pods ask for."""
        return self._fed.used(node_name)

    def eaten_by_guests(self, node_name: str) -> Feed:
        """CPU and memory of a node that pods eat which hold no card."""
        all_of_it, book = self._fed.used(node_name), self._books.get(node_name)
        mine = [holding.pod.feed for holding in book.holdings.values()] if book is not None else []
        return Feed(
            all_of_it.cpu_milli - sum(feed.cpu_milli for feed in mine),
            all_of_it.memory_mib - sum(feed.memory_mib for feed in mine),
        )

    def node_names(self) -> list[str]:
        """Every known node, sorted."""
        return sorted(name for name, book in self._books.items() if book.node is not None)

    def node_count(self) -> int:
        """How many nodes the cluster has, with and without cards."""
        return sum(book.node is not None for book in self._books.values())

    def flush(self) -> Fleet:
        """The fleet arrays, brought up to date with what changed since the last call."""
        for name in self._stale:
            self._write_row(name)
        self._stale.clear()
        return self.fleet

    def snapshot(self) -> dict[str, NodeState]:
        """Every known node as it stands: for tests and small clusters, the whole world is copied."""
        return {name: self._books[name].state() for name in self.node_names()}

    def overcommitted(self) -> Iterator[tuple[str, int, int, int]]:
        """Node, card, promised units and the card's units wherever more is promised than there is."""
        for name in self.node_names():
            book = self._books[name]
            used = book.used()
            for gpu in book.node.gpus if book.node else ():
                if used.get(gpu.index, 0) > gpu.units:
                    yield name, gpu.index, used[gpu.index], gpu.units

    # -- the book ----------------------------------------------------------------------------------------

    def _is_old(self, pod: Pod) -> bool:
        known = self.pods.get(pod.uid)
        if known is None:
            namesake = self.pod_named(pod.namespace, pod.name)
            return namesake is not None and 0 < pod.version < namesake.version
        return 0 < pod.version < known.version

    def _end_namesake(self, pod: Pod) -> None:
        """Names are unique: a new uid under a name means that the old pod is gone, seen or not."""
        uid = self._uid_of.get(pod.key)
        if uid is not None and uid != pod.uid:
            self.remove_pod(uid)

    def _keep(self, pod: Pod) -> None:
        self._remember(pod)
        before = self.holding(pod.uid)
        after = holding_of(pod, before)
        if after == before:
            return
        if before is not None and after is not None and before.takes_as_much_as(after):
            self._write_down(after)  # the row of its node stays as it is
        else:
            self._drop_holding(pod.uid)
            if after is not None:
                self._hold(after)
        if after is not None and not after.planned and (before is None or before.planned):
            self._tell_placed(pod)

    def _remember(self, pod: Pod) -> None:
        if pod.uid not in self.pods and self.witness is not None and pod.request is not None:
            self.witness.arrived(shape_of(pod.request))
        self.pods[pod.uid] = pod
        self._uid_of[pod.key] = pod.uid
        if pod.nominated and not pod.node:
            self.nominated[pod.uid] = pod.nominated
        else:
            self.nominated.pop(pod.uid, None)

    def _let_go(self, uid: str) -> None:
        planned = uid in self._planned
        held = self._drop_holding(uid) and not planned
        self.nominations.drop(uid)
        self.nominated.pop(uid, None)
        pod = self.pods.pop(uid, None)
        if pod is None:
            return
        if self._uid_of.get(pod.key) == uid:
            del self._uid_of[pod.key]
        if held and self.witness is not None and pod.request is not None:
            self.witness.departed(shape_of(pod.request))

    def _hold(self, holding: Holding) -> None:
        self._write_down(holding)
        self._book(holding.node).changed()
        self._feed(holding.pod.uid, holding.node, holding.pod.feed)
        self._where[holding.pod.uid] = holding.node
        self.replicas.put(holding.pod.uid, holding.pod.replica_of, holding.node)
        self._stale[holding.node] = None
        if self._planned and not holding.assumed:
            self._crowd_out(self._books[holding.node])

    def _write_down(self, holding: Holding) -> None:
        uid = holding.pod.uid
        self._book(holding.node).holdings[uid] = holding
        self.nominations.drop(uid)
        self._planned.pop(uid, None)
        self._assumed.pop(uid, None)
        if holding.assumed:
            (self._planned if holding.planned else self._assumed)[uid] = None

    def _crowd_out(self, book: NodeBook) -> None:
        """Give up a node's plans where a pod that we did not expect took the room."""
        if book.crowded:
            for uid in [uid for uid, holding in book.holdings.items() if holding.planned]:
                self._drop_holding(uid)

    def _drop_holding(self, uid: str) -> bool:
        name = self._where.pop(uid, None)
        if name is None:
            return False
        self._feed(uid, "", NO_FEED)
        self.replicas.drop(uid)
        self._assumed.pop(uid, None)
        self._planned.pop(uid, None)
        book = self._books[name]
        del book.holdings[uid]
        book.changed()
        self._stale[name] = None
        self._close_if_empty(book)
        return True

    def _feed(self, uid: str, node: str, feed: Feed) -> None:
        """A pod eats of this node and of no other; of none without `node`."""
        for name in self._fed.put(uid, node, feed):
            if name in self._books:
                self._stale[name] = None

    def _book(self, name: str) -> NodeBook:
        book = self._books.get(name)
        if book is None:
            book = self._books[name] = NodeBook(name)
        return book

    def _close_if_empty(self, book: NodeBook) -> None:
        if book.node is None and not book.holdings:
            del self._books[book.name]

    def _tell_placed(self, pod: Pod) -> None:
        if self.witness is not None and pod.request is not None:
            self.witness.placed(shape_of(pod.request))

    # -- room --------------------------------------------------------------------------------------------

    def _replace(self, before: Holding | None, after: Holding) -> Refusal | None:
        """Hold `after` instead of `before` if there is room for it without that."""
        pod, placement = after.pod, after.placement
        assert placement is not None
        self._drop_holding(pod.uid)
        refusal = self._no_room(pod, placement)
        if refusal is not None:
            if before is not None:
                self._hold(before)
            return refusal
        if pod.uid not in self.pods:
            self._remember(pod)
        self._hold(after)
        return None

    def _no_room(self, pod: Pod, placement: Placement) -> Refusal | None:
        state = self.state(placement.node)
        if state is None or pod.request is None:
            return not_shared(placement.node)
        slot_of = {gpu.index: slot for slot, gpu in enumerate(state.node.gpus)}
        for share in placement.shares:
            slot = slot_of.get(share.gpu, -1)
            if slot < 0 or state.left[slot] < share.units or state.core_left[slot] < share.core_percent:
                return _refusal(state, pod.request)
        return None

    def _write_row(self, name: str) -> None:
        book = self._books.get(name)
        if book is None or book.node is None or not book.node.divides_cards:
            self.fleet.drop(name)
            return
        self.fleet.put(book.row(self._fed.used(name)))


def _concerns_us(pod: Pod) -> bool:
    return pod.request is not None or pod.placement is not None or bool(pod.problem)


def _refusal(state: NodeState, request: Request) -> Refusal:
    answer = place(state, request)
    if isinstance(answer, Refusal):
        return answer
    cards = ", ".join(str(share.gpu) for share in answer.shares)
    return Refusal("The chosen card was taken meanwhile", detail=f"card {cards} would still fit")
