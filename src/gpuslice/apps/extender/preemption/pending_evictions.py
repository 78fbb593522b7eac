"""The verb preempt: of kube-scheduler's victims on each node, those that free enough of a card.

kube-scheduler evicts and nominates a moment after our answer, and asks about the next pod in between. Two
pods that were told to make room on the same card would each find it taken by the other, with the evictions in
vain. So an answer counts until the API server shows that it was carried out.

kube-scheduler weighs disruption budgets only for the victims that it chose itself. Where others have to go,
the budgets are read here and decide whom to evict.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuslice.adapters.kube.budgets import read_budgets
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.wire.extender import MetaVictims, PodIdentifier
from gpuslice.apps.extender.subscriber import FilterVerdict, Subscriber
from gpuslice.core.hold import Hold, kept_from, reservation
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod, Request
from gpuslice.core.placement import Fit, on_cards
from gpuslice.core.preemption import Budget, Cost, Victims, cost, victims

_log = logging.getLogger(__name__)

BUDGETS_S = 1.0  # for reading them, while kube-scheduler waits
PENDING_S = 10.0  # kube-scheduler evicts within milliseconds if the API server is available


@dataclass(frozen=True, slots=True)
class _Pending:
    """What one pod was told for each suitable node, of which it takes one."""

    by_node: Mapping[str, Hold]
    until_s: float
    refused: set[str] = field(default_factory=set)  # nodes on which filter refused the pod since then


class PendingEvictions(Subscriber):
    """Answers for a ledger, and remembers the answers in addition to the ledger's reservations.

    `ahead` is told, after each answer, what else kube-scheduler proposed.
    """

    ahead: Callable[[Pod, Request, Mapping[str, MetaVictims]], Awaitable[None]] | None = None

    def __init__(
        self,
        client: KubeClient,
        ledger: Ledger,
        victims_for: Callable[[str], Collection[str]] = lambda _: (),
        answered: Callable[[str], None] = lambda _: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._victims_for = victims_for  # uids of those whom we evicted for a pod ourselves
        self._answered = answered  # called with the pod's uid
        self._clock = clock
        self._by_uid: dict[str, _Pending] = {}

    async def victims(
        self, pod: Pod, request: Request, proposed: Mapping[str, MetaVictims]
    ) -> dict[str, MetaVictims]:
        """Nodes with whom to evict there, without nodes where no eviction helps.

        None while budgets count and cannot be read: the preemptor looks at the pod soon.
        """
        ledger, now = self._ledger, self._clock()
        if ledger.kubelets.rejections:
            proposed = {
                name: each for name, each in proposed.items() if not ledger.kubelets.reject(name, pod)
            }
        self._by_uid = {  # without those that came true and those that nobody has asked about for a while
            uid: pending
            for uid, pending in self._by_uid.items()
            if pending.until_s > now and ledger.holds.of(uid) is None and uid not in ledger.holds.reserved
        }
        if self._room_is_coming(pod, request, proposed):
            return {}
        found = self._choose(pod, request, proposed)
        if any(each.uids != _uids(proposed[name]) for name, each in found.items()):
            held = [node for name in proposed if (node := ledger.holds.on(name)) is not None]
            holders = [each.pod for node in held for each in node.by_uid.values()]
            below = {each.namespace for each in holders if each.priority < pod.priority}
            try:
                async with asyncio.timeout(BUDGETS_S):
                    budgets = await read_budgets(self._client, below)
            except (KubeError, TimeoutError) as error:
                _log.warning("budgets not read", extra={"pod": pod.key, "error": str(error)})
                return {}
            if self._room_is_coming(pod, request, proposed):
                return {}
            found = self._choose(pod, request, proposed, budgets)
        by_node = {
            name: reservation(pod, on_cards(name, each.cards, request)) for name, each in found.items()
        }
        self._by_uid[pod.uid] = _Pending(by_node, now + PENDING_S)
        if found:
            self._answered(pod.uid)
        if found and self.ahead is not None:
            await self.ahead(
                pod, request, {name: each for name, each in proposed.items() if name not in found}
            )
        return {
            name: MetaVictims([PodIdentifier(uid) for uid in sorted(each.uids)], each.violations)
            for name, each in found.items()
        }

    def decided(self, verdict: FilterVerdict) -> None:
        """filter refuses a pod: where it was told whom to evict, kube-scheduler sees the victims as gone."""
        pending = self._by_uid.get(verdict.pod.uid) if verdict.is_refusal else None
        if pending is not None:
            row_of, rows = self._ledger.fleet.row_of, set(verdict.asked.tolist())
            pending.refused.update(node for node in pending.by_node if row_of.get(node) in rows)

    def knows(self, uid: str) -> bool:
        """Whether others leave for this pod, or kube-scheduler was told whom to evict for it."""
        return uid in self._by_uid or uid in self._ledger.holds.reserved

    def is_taken(self, node: str) -> bool:
        """Whether pods are leaving this node, or may do so soon."""
        return bool(self._reserved_on(node) or self._under_way((node,)))

    def _reserved_on(self, node: str) -> Collection[Hold]:
        holds = self._ledger.holds.on(node)
        return holds.reserved.values() if holds is not None else ()

    def _choose(
        self,
        pod: Pod,
        request: Request,
        proposed: Mapping[str, MetaVictims],
        budgets: Sequence[Budget] = (),
    ) -> Mapping[str, Victims]:
        """The node where the eviction costs least by kube-scheduler's own rules, and whom to evict there.

        Only one, so that the next pod is offered other nodes, and so that no more nodes are examined than
        necessary. All suitable ones if a victim has no part of a card: only kube-scheduler knows what
        evicting that one costs.
        """
        pods, under_way = self._ledger.pods, self._under_way(proposed)
        going = {name: _uids(each) for name, each in proposed.items()}
        knows_all = all(uid in pods for uids in going.values() for uid in uids)
        waiting: list[tuple[Cost, str]] = []
        for name, uids in going.items():
            violations, most = proposed[name].num_pdb_violations, [pods[uid] for uid in uids if uid in pods]
            least = cost(most, violations)
            if most and (name in under_way or self._reserved_on(name)):
                # some of these may leave for pods that come first
                least = min(cost([one], violations) for one in most)
            waiting.append((least, name))
        found: dict[str, Victims] = {}
        best: Cost | None = None
        for least, name in sorted(waiting):
            if knows_all and best is not None and best[:-1] <= least[:-1]:
                break
            chosen = self._victims_on(
                name, pod, request, going[name], under_way.get(name, ()), budgets=budgets
            )
            if chosen is None or not chosen.uids:
                continue
            if chosen.uids == going[name]:
                chosen = replace(chosen, violations=proposed[name].num_pdb_violations)
            leaving = [pods[uid] for uid in chosen.uids if uid in pods]
            its_cost = cost(leaving, chosen.violations)
            if not knows_all:
                found[name] = chosen
            elif best is None or its_cost < best:
                found, best = {name: chosen}, its_cost
        return found

    def _under_way(self, proposed: Collection[str]) -> dict[str, list[Hold]]:
        """By node, evictions that were answered and may become reservations; not more is known of them."""
        found: dict[str, list[Hold]] = {}
        for uid, pending in self._by_uid.items():
            shown = self._ledger.nominated.get(uid)
            for node in pending.by_node if shown is None else (shown,):
                if node in proposed and node in pending.by_node:
                    found.setdefault(node, []).append(pending.by_node[node])
        return found

    def _room_is_coming(self, pod: Pod, request: Request, proposed: Mapping[str, MetaVictims]) -> bool:
        """Whether pods leave a card, or have left one, for this pod already.

        kube-scheduler may see before us that the last of them is gone. filter then refuses the pod by what we
        know, and kube-scheduler asks whom to evict elsewhere, since by the node's sum the nominated node has
        room. If it would evict on that node as well, it has other reasons.
        """
        ledger, pending = self._ledger, self._by_uid.get(pod.uid)
        kept = ledger.holds.reserved.get(pod.uid)
        if ours := self._victims_for(pod.uid):
            named = {victim.uid for each in proposed.values() for victim in each.pods or ()}
            if not named.isdisjoint(ours) or any(ledger.holds.of(uid) is not None for uid in ours):
                return True  # kube-scheduler does not see yet that they are leaving or are gone
        meant = {kept.node: kept} if kept is not None else pending.by_node if pending else {}
        shown = ledger.nominated.get(pod.uid)
        for node, hold in meant.items():
            holds = ledger.holds.on(node)
            if holds is None or node in proposed or shown not in (None, node):
                continue
            has_room = holds.fit_beside_reserved(request, pod.uid, pod.priority) is Fit.YES
            # and took it; the victims may not be seen leaving yet, nor the nomination
            was_told = kept is None and pending is not None and (shown == node or node in pending.refused)
            if was_told or has_room or (hold.placement and holds.comes_free(hold.placement)):
                return True
        return False

    def _victims_on(
        self,
        name: str,
        pod: Pod,
        request: Request,
        going: Collection[str],
        under_way: Iterable[Hold],
        *,
        budgets: Sequence[Budget],
    ) -> Victims | None:
        holds, pods = self._ledger.holds.on(name), self._ledger.pods
        if holds is None:
            return None
        # what the pod must not take: reservations, and pending evictions that may become some
        before_it = [
            each
            for each in (*self._reserved_on(name), *under_way)
            if each.is_kept_from(pod.uid, pod.priority)
        ]

        def suffices(gone: Iterable[str]) -> bool:
            """Whether the node has enough CPU and memory without these pods, and with those before it."""
            if holds.node is None:
                return False
            coming = [pods[each.pod.uid].host for each in before_it if each.pod.uid in pods]
            freed = [pods[uid].host for uid in gone if uid in pods]
            used = self._ledger.host_used(name)
            return holds.node.host.holds(used, [request.host, *coming], freed)

        taken = kept_from(before_it, pod.uid, pod.priority)
        return victims(holds, request, pod.priority, going, budgets, taken=taken, suffices=suffices)


def _uids(victims: MetaVictims) -> frozenset[str]:
    return frozenset(each.uid for each in victims.pods or ())
