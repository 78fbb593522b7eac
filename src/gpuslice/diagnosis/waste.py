"""Who holds GPU memory without using it, and who uses more than it asked for: one row for each pod.

The document of ``gpuslice waste``::

    pods[]    namespace, pod, node, gpus, owner, heldMiB, and where known usedMiB, peakMiB, wastedMiB,
              excessMiB, idleSeconds; and wantedBy[], the waiting pods that would fit in its place
    wastedMiB, heldMiB, usedMiB    of all pods of which the use is known
    problems[]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpuslice.adapters.kube.views import pod_view
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod, Refusal
from gpuslice.core.node_filters import NodeFilters, Place, Wish
from gpuslice.core.placement import place
from gpuslice.core.units import MIB, worth_mib
from gpuslice.core.words import lasting
from gpuslice.diagnosis.places import wish_of
from gpuslice.diagnosis.usage import ContainerUsage, known, least, total

if TYPE_CHECKING:
    from gpuslice.diagnosis.cluster import Cluster

IDLE_S = 600.0
"""A pod that has not computed for so long is called idle."""
MOST_NAMED = 3
MOST_KINDS = 20  # of waiting pods, for that
MOST_ASKED = 100
"""Pods for which it is looked up who would fit in their place."""
UsageOf = Callable[[str], Sequence[ContainerUsage]]


@dataclass(frozen=True, slots=True)
class PodUsage:
    """What one pod holds, and what it does with that. None is unknown, and never the same as 0."""

    namespace: str
    pod: str
    owner: str
    node: str
    gpus: str
    held_mib: float
    used_mib: float | None = None
    peak_mib: float | None = None
    idle_s: float | None = None
    refused: bool = False
    wanted_by: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.pod}"

    @property
    def wasted_mib(self) -> float | None:
        return None if self.used_mib is None else max(0.0, self.held_mib - self.used_mib)

    @property
    def excess_mib(self) -> float:
        return 0.0 if self.used_mib is None else max(0.0, self.used_mib - self.held_mib)

    @property
    def is_spare(self) -> bool:
        """Whether to ask its owner if it is still needed; not one that fails for want of more."""
        if self.refused:
            return False
        never = self.peak_mib == 0 and self.used_mib == 0
        return (self.idle_s is not None and self.idle_s >= IDLE_S) or (never and self.held_mib > 0)

    @property
    def sentence(self) -> str:
        """What it holds and does with it, as a predicate."""
        held = f"holds {self.held_mib:.0f} MiB of GPU {self.gpus} on {self.node}"
        if self.peak_mib == 0 and self.used_mib == 0:
            idle = f", for {lasting(self.idle_s)}" if self.idle_s is not None and self.idle_s >= 60 else ""
            return f"{held} and has used none of it{idle}"
        if self.idle_s is not None and self.idle_s >= IDLE_S:
            return f"{held} and has not computed for {lasting(self.idle_s)}"
        return f"{held} and uses {self.used_mib or 0:.0f} MiB"


ORDERS: Mapping[str, Callable[[PodUsage], float]] = {
    "wasted": lambda each: -1.0 if each.wasted_mib is None else each.wasted_mib,
    "held": lambda each: each.held_mib,
    "used": lambda each: -1.0 if each.used_mib is None else each.used_mib,
    "peak": lambda each: -1.0 if each.peak_mib is None else each.peak_mib,
    "idle": lambda each: -1.0 if each.idle_s is None else each.idle_s,
    "excess": lambda each: each.excess_mib,
}


def pod_usage_of(pod: Pod | None, ledger: Ledger, usage: Sequence[ContainerUsage]) -> PodUsage | None:
    """Of one pod, by what the ledger says that it holds, or else the exporter; None if it holds nothing."""
    held = held_mib(pod, ledger) if pod is not None else None
    if held is None and usage:
        held = sum(each.allocated_bytes or 0 for each in usage) / MIB
    if held is None or (pod is None and not usage):
        return None
    places = pod.placement.slices if pod is not None and pod.placement is not None else ()
    gpus = sorted({*(str(part.card) for part in places), *(each.gpu for each in usage)})
    return PodUsage(
        pod.namespace if pod is not None else usage[0].namespace,
        pod.name if pod is not None else usage[0].pod,
        next((each.workload for each in usage if each.workload), ""),
        (pod.node if pod is not None else "") or usage[0].node,
        ",".join(gpus),
        held,
        _mib(total(each.used_bytes for each in usage), usage),
        _mib(total(each.peak_bytes for each in usage), usage),
        least([each.idle_seconds for each in usage]),
        any(each.refused for each in usage),
    )


def held_mib(pod: Pod, ledger: Ledger) -> float | None:
    """What a pod's units are worth on the cards that it is on; None if that is not known."""
    state = ledger.state(pod.node) if pod.node else None
    if state is None or pod.placement is None:
        return None
    cards = {card.index: card for card in state.node.cards}
    held = 0
    for part in pod.placement.slices:
        card = cards.get(part.card)
        if card is None or part.units > card.units:
            return None
        held += worth_mib(card.memory_mib, part.units, card.units)
    return held


def usage_by_pod(
    ledgers: Iterable[Ledger], usage: Mapping[str, Sequence[ContainerUsage]], namespace: str = ""
) -> list[PodUsage]:
    """Of all pods, who wastes most first."""
    holding = {
        pod.key: pod_usage_of(pod, ledger, usage.get(pod.key, ()))
        for ledger in ledgers
        for pod in ledger.pods.values()
        if pod.node and pod.placement is not None and not pod.finished
    }
    others = [pod_usage_of(None, Ledger(), rows) for key, rows in usage.items() if key not in holding]
    found = [*holding.values(), *others]
    shown = [each for each in found if each is not None and namespace in {"", each.namespace}]
    return sorted(shown, key=lambda each: (-ORDERS["wasted"](each), -(each.idle_s or 0), each.key))


def room_from(ledger: Ledger, places: Iterable[Place], wish: Wish, usage_of: UsageOf) -> Iterator[PodUsage]:
    """Pods of which one alone would make room for a waiting pod, which fits nowhere, by ending."""
    asked = wish.request.units_per_card
    filters = NodeFilters(places := tuple(places), wish)
    states = filter(None, (ledger.state(each.name) for each in places if not filters.obstacle(each)))
    full = []
    for state in states:
        if max(state.left, default=0) >= asked and not isinstance(place(state, wish.request), Refusal):
            return
        full.append(state)
    for state in full:
        holds, most = ledger.holds.on(state.node.name), max(state.left, default=0)
        for hold in holds.by_uid.values() if holds is not None else ():
            parts = hold.placement.slices if hold.placement is not None else ()
            # of tens of thousands of pods, those that are too small are seen at once
            if hold.pod.terminating or most + max((part.units for part in parts), default=0) < asked:
                continue
            back = {part.card: part for part in parts}
            left, compute_left = list(state.left), list(state.compute_left)
            for slot, card in enumerate(state.node.cards):
                if card.index in back:
                    left[slot] += back[card.index].units
                    compute_left[slot] += back[card.index].compute_percent
            freed = replace(state, left=tuple(left), compute_left=tuple(compute_left))
            if max(left) >= asked and not isinstance(place(freed, wish.request), Refusal):
                own = pod_usage_of(hold.pod, ledger, usage_of(hold.pod.key))
                if own is not None:
                    yield own


def hints_of_room(ledger: Ledger, places: Iterable[Place], wish: Wish, usage_of: UsageOf) -> Iterator[str]:
    """Who could make room for a waiting pod without missing it much."""
    spare = [each for each in room_from(ledger, places, wish, usage_of) if each.is_spare]
    spare.sort(key=lambda each: (-(each.wasted_mib or 0), -(each.idle_s or 0)))
    for each in spare[:MOST_NAMED]:
        yield f"{each.key} {each.sentence}: this pod would fit there if it ended. Ask its owner."


def usage_of_cluster(cluster: Cluster, namespace: str = "") -> list[PodUsage]:
    """The same of a namespace, or of all; the first with the waiting pods that would fit if each ended."""
    found = usage_by_pod((cluster.ledger, cluster.ledger_of_claims), cluster.usage, namespace)
    first = {each.key for each in found[:MOST_ASKED]}
    wishes: dict[str, Wish] = {}
    equal: dict[str, list[str]] = {}  # a queue consists mostly of equal pods
    for pod in cluster.pods:
        view = pod_view(pod)
        if not view.node and view.request is not None and not view.problem:
            wish = wish_of(pod, view.request)
            kind = repr(replace(wish, pod=replace(wish.pod, key=view.namespace)))
            wishes.setdefault(kind, wish)
            equal.setdefault(kind, []).append(view.key)
    wanted: dict[str, list[str]] = {}
    for kind, names in list(equal.items())[:MOST_KINDS]:
        for each in room_from(cluster.ledger, cluster.places, wishes[kind], lambda _: ()):
            if each.key in first:
                wanted.setdefault(each.key, []).extend(names)
    return [replace(each, wanted_by=tuple(wanted.get(each.key, ()))) for each in found]


def sums(found: Iterable[PodUsage]) -> dict[str, int]:
    """Held, used and wasted by pods whose use is known; held is used and wasted, less what others lack."""
    measured = [each for each in found if each.used_mib is not None]
    return {
        "heldMiB": round(sum(each.held_mib for each in measured)),
        "usedMiB": round(sum(each.used_mib or 0 for each in measured)),
        "wastedMiB": round(sum(each.wasted_mib or 0 for each in measured)),
        "excessMiB": round(sum(each.excess_mib for each in measured)),
    }


def document(each: PodUsage) -> dict[str, Any]:
    """One row, for programs."""
    amounts = {
        "heldMiB": each.held_mib,
        "usedMiB": each.used_mib,
        "peakMiB": each.peak_mib,
        "wastedMiB": each.wasted_mib,
        "excessMiB": each.excess_mib or None,
        "idleSeconds": each.idle_s,
    }
    return known(
        namespace=each.namespace,
        pod=each.pod,
        owner=each.owner or None,
        node=each.node,
        gpus=each.gpus,
        **{name: None if amount is None else round(amount) for name, amount in amounts.items()},
        wantedBy=list(each.wanted_by) or None,
    )


def _mib(amount: float | None, usage: Sequence[ContainerUsage]) -> float | None:
    return None if amount is None or not usage else amount / MIB
