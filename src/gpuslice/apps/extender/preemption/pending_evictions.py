"""The verb preempt: of kube-scheduler's victims on each node, those whose leaving makes room on a card.

kube-scheduler evicts and nominates a moment after our answer, and asks about the next pod in between. Two
pods that were told to make room on the same card would both find it taken by the other, and others evicted in
vain: so what was answered counts until the API server shows that it is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from gpuslice.adapters.wire.extender import MetaVictims, PodIdentifier
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod, Refusal, Request
from gpuslice.core.placement import on_cards, place
from gpuslice.core.preemption import Victims, victims
from gpuslice.core.reservation import Reservation, comes_free, open_to, taken_by

PENDING_S = 10.0  # kube-scheduler evicts within milliseconds, if the API server lets it


@dataclass(frozen=True, slots=True)
class _Pending:
    """What one pod was told for each node that would do; it takes one of them."""

    by_node: Mapping[str, Reservation]
    until_s: float


class PendingEvictions:
    """Answers for a ledger, and remembers what it answered, beside the reservations of the ledger."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._by_uid: dict[str, _Pending] = {}

    def victims(
        self, pod: Pod, request: Request, proposed: Mapping[str, MetaVictims]
    ) -> dict[str, MetaVictims]:
        """Nodes with whom to evict there; those where nobody's leaving helps are left out."""
        ledger, now = self._ledger, self._clock()
        self._by_uid = {  # without those that came true, and those that nobody has heard of for a while
            uid: pending
            for uid, pending in self._by_uid.items()
            if pending.until_s > now
            and ledger.allocation(uid) is None
            and ledger.reservations.of(uid) is None
        }
        if self._room_is_coming(pod, request, proposed):
            return {}
        found: dict[str, Victims] = {}
        for name, each in proposed.items():
            chosen = self._victims_on(name, pod, request, {victim.uid for victim in each.pods or ()})
            if chosen is not None and chosen.uids:
                found[name] = chosen
        by_node = {
            name: Reservation(pod.uid, pod.priority, on_cards(name, each.cards, request))
            for name, each in found.items()
        }
        self._by_uid[pod.uid] = _Pending(by_node, now + PENDING_S)
        return {
            name: MetaVictims(
                [PodIdentifier(uid) for uid in sorted(each.uids)], proposed[name].num_pdb_violations
            )
            for name, each in found.items()
        }

    def _room_is_coming(self, pod: Pod, request: Request, proposed: Collection[str]) -> bool:
        """Whether others leave, or have left, a card for this pod already.

        kube-scheduler may hear before us that the last of them is gone: filter then refuses the pod by what
        we know, and it asks whom to evict elsewhere, since by the sum the nominated node has room. Where it
        would evict there as well, it has other reasons.
        """
        ledger, pending = self._ledger, self._by_uid.get(pod.uid)
        kept = ledger.reservations.of(pod.uid)
        meant = {kept.placement.node: kept} if kept is not None else pending.by_node if pending else {}
        shown = ledger.nominated.get(pod.uid)
        for node, reservation in meant.items():
            allocations = ledger.allocations(node)
            if allocations is None or node in proposed or shown not in (None, node):
                continue
            taken = ledger.reservations.taken(node, pod.uid, pod.priority)
            has_room = not isinstance(place(open_to(allocations, taken), request), Refusal)
            was_told = kept is None and shown == node  # and took it; who is to leave is not seen leaving yet
            if was_told or has_room or comes_free(allocations, reservation):
                return True
        return False

    def _victims_on(self, name: str, pod: Pod, request: Request, proposed: Collection[str]) -> Victims | None:
        allocations, pods = self._ledger.allocations(name), self._ledger.pods
        if allocations is None:
            return None
        # what a pod must leave alone: reservations, and evictions under way that may become some
        under_way = [
            each.by_node[name]
            for uid, each in self._by_uid.items()
            if name in each.by_node and self._ledger.nominated.get(uid, name) == name
        ]
        before_it = [
            each
            for each in (*self._ledger.reservations, *under_way)
            if each.placement.node == name and each.weighs_on(pod.uid, pod.priority)
        ]

        def suffices(gone: Iterable[str]) -> bool:
            """Whether CPU and memory of the node are enough without these pods, and with those before it."""
            if allocations.node is None:
                return False
            coming = [pods[each.uid].host for each in before_it if each.uid in pods]
            going = [pods[uid].host for uid in gone if uid in pods]
            used = self._ledger.host_used(name)
            return allocations.node.host.holds(used, [request.host, *coming], going)

        taken = taken_by(before_it, name, pod.uid, pod.priority)
        return victims(allocations, request, pod.priority, proposed, taken=taken, suffices=suffices)
