"""Why a pod waits: every class of nodes with what rules it out, and the most that would fit there.

The same ledger and the same placement as the extender's, asked by hand. kube-scheduler looks at more than
cards; of that, what is read here keeps GPU pods out most often: cordons, readiness, taints, node selectors,
required node affinity, CPU and memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpuslice.core.card_links import weakest_link
from gpuslice.core.contract import (
    LABEL_CLAIMS,
    LABEL_COMPUTE_POLICY,
    LABEL_MIN_TIER,
    LABEL_MODE,
    LABEL_SCHEDULE,
)
from gpuslice.core.ledger import Ledger
from gpuslice.core.mode import CORE_MEM, rules_of
from gpuslice.core.model import Pod, Request
from gpuslice.core.node_affinity import meets, terms_of, unmet
from gpuslice.core.placement import SPREAD, Fit, NodeState, choose_slots, place, refusal
from gpuslice.core.preemption import LOWEST, eviction
from gpuslice.core.units import UNIT_MIB
from gpuslice.core.words import counted

ROOM = "Has room now"
NOT_SHARED = "Shares no cards"
BY_CLAIMS = "Gives its cards out by claims"
NO_CLAIMS = "Gives no cards out by claims"
NO_CLAIMS_YET = "Offers no cards by claims yet"
_REPELS = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str = ""
    effect: str = "NoSchedule"

    def __str__(self) -> str:
        return f"{self.key}{'=' + self.value if self.value else ''}:{self.effect}"


@dataclass(frozen=True, slots=True)
class Toleration:
    """An empty key with operator Exists tolerates everything; an empty effect means all effects."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def covers(self, taint: Taint) -> bool:
        if self.effect and self.effect != taint.effect:
            return False
        if not self.key:
            return self.operator == "Exists"
        return self.key == taint.key and (self.operator == "Exists" or self.value == taint.value)


@dataclass(frozen=True, slots=True)
class Place:
    """What of a node decides, beside its cards."""

    name: str
    ready: bool = True
    schedulable: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()


@dataclass(frozen=True, slots=True)
class Wish:
    """What a pod wants of a node, beside cards. `claims`: its cards are to come by claims."""

    request: Request
    claims: bool = False
    selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    affinity: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Nodes that are alike for the pod. `most` is the most free units on one card, on node `best`.

    Both are None where no node of the class has a usable card.
    """

    reason: str
    nodes: tuple[str, ...]
    fits: bool = False
    never: bool = False
    best: str | None = None
    card: int | None = None
    most: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """All classes, the largest first, and what follows from them in sentences."""

    classes: tuple[NodeClass, ...]
    hints: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return any(each.fits for each in self.classes)


@dataclass(frozen=True, slots=True)
class _Found:
    name: str
    reason: str
    state: NodeState | None = None
    fit: Fit = Fit.NOT_SHARED
    fits: bool = False
    never: bool = False
    detail: str = ""

    @property
    def most(self) -> int:
        return max(self.state.left, default=-1) if self.state is not None else -1


def explain(ledger: Ledger, places: Iterable[Place], wish: Wish) -> Explanation:
    """Every node judged and put with its like."""
    found = [_judge(ledger, place, wish) for place in places]
    groups: dict[str, list[_Found]] = {}
    for each in found:
        groups.setdefault(each.reason, []).append(each)
    classes = []
    for members in groups.values():
        best = max(members, key=lambda each: each.most)
        like = NodeClass(
            members[0].reason,
            tuple(sorted(each.name for each in members)),
            fits=members[0].fits,
            never=all(each.never for each in members),
            detail=best.detail,
        )
        if best.state is not None and best.most >= 0:
            card = best.state.node.cards[best.state.left.index(best.most)].index
            like = replace(like, best=best.name, card=card, most=best.most)
        classes.append(like)
    classes.sort(key=lambda each: (not each.fits, -len(each.nodes)))
    hints = [*_hints(found, wish)]
    by_claims = [each.name for each in found if each.reason == BY_CLAIMS]
    if by_claims and not any(each.fits for each in found):
        give = f"{counted(len(by_claims), 'node')} {'gives' if len(by_claims) == 1 else 'give'}"
        hints.append(
            f"{give} cards out by claims alone: to have a part of one there, label the pod's namespace "
            f"{LABEL_CLAIMS}=true and recreate the pod."
        )
    return Explanation(tuple(classes), tuple(hints))


def _judge(ledger: Ledger, node: Place, wish: Wish) -> _Found:
    state = ledger.state(node.name)
    if state is None or not state.node.divides_cards:
        by_claims = rules_of(node.labels).claims
        if wish.claims:
            return _Found(node.name, NO_CLAIMS_YET if by_claims else NO_CLAIMS, never=not by_claims)
        return _Found(node.name, BY_CLAIMS if by_claims else NOT_SHARED, never=True)
    fit, barrier = ledger.why_not_on(node.name, wish.request), obstacle(node, wish)
    refused = refusal(fit, state, wish.request, ledger.host_used(node.name))
    if barrier:
        return _Found(node.name, barrier, state, fit, never=fit is not Fit.YES and refused.never)
    if fit is not Fit.YES:
        return _Found(node.name, refused.reason, state, fit, never=refused.never, detail=refused.detail)
    cards = ", ".join(str(state.node.cards[slot].index) for slot in sorted(choose_slots(state, wish.request)))
    return _Found(node.name, ROOM, state, fit, fits=True, detail=f"{node.name}, card {cards}")


def obstacle(node: Place, wish: Wish) -> str:
    """What keeps the pod from the node before its cards are looked at, "" when nothing does."""
    if not node.schedulable or not node.ready:
        return "Not ready" if node.schedulable else "Cordoned"
    for taint in node.taints:
        if taint.effect in _REPELS and not any(each.covers(taint) for each in wish.tolerations):
            return f"Taint {taint} is not tolerated"
    for key, value in sorted(wish.selector.items()):
        if node.labels.get(key) != value:
            return f"Is not {key}={value}, as the pod's nodeSelector requires"
    if meets(wish.affinity, node.name, node.labels):
        return ""
    terms = terms_of(wish.affinity) or ()
    if len(terms) == 1:
        return f"Is not {unmet(terms[0], node.name, node.labels)}, as the pod's node affinity requires"
    return f"Meets none of the {len(terms)} terms of the pod's node affinity"


def room_in_the_making(ledger: Ledger, pod: Pod) -> Iterable[str]:
    """What is in progress for a waiting pod with a nominated node."""
    holds = ledger.holds.on(pod.nominated) if pod.nominated else None
    if holds is None or pod.request is None:
        return
    going = sorted(hold.pod.key for hold in holds.by_uid.values() if hold.pod.terminating)
    found = eviction(holds, pod.request, LOWEST)
    cards = f", card {', '.join(map(str, found.cards))}" if found is not None else ""
    yield (
        f"Room is being made for it on {pod.nominated}{cards}: {', '.join(going)} must leave first."
        if going
        else f"{pod.nominated}{cards} is kept for it (status.nominatedNodeName); its scheduler tries it next."
    )


def room_by_eviction(ledger: Ledger, places: Iterable[Place], wish: Wish, pod: Pod) -> Iterable[str]:
    """What eviction would help a waiting pod that fits nowhere: the cheapest, as the extender chooses it."""
    ways = [
        way
        for place in places
        if not obstacle(place, wish)
        and (holds := ledger.holds.on(place.name)) is not None
        and (way := eviction(holds, wish.request, pod.priority)) is not None
    ]
    best = min(ways, key=lambda way: way.cost, default=None)
    if best is None or not best.victims:
        return
    names = ", ".join(hold.pod.key for hold in best.victims)
    cards = ", ".join(map(str, best.cards))
    yield (
        f"Its priority {pod.priority} is above others': {names} could leave {best.node}, card {cards}. "
        "kube-scheduler or the extender evicts soon after the refusal, unless that is switched off."
    )


# -- what follows ----------------------------------------------------------------------------------------


def _hints(found: Sequence[_Found], wish: Wish) -> Iterable[str]:
    request = wish.request
    shared = [each for each in found if each.state is not None]
    if not shared and wish.claims:
        waiting = [each.name for each in found if each.reason == NO_CLAIMS_YET]
        if waiting:
            yield f"{waiting[0]} is to give cards out by claims and offers none yet: see gpuslice doctor."
        else:
            yield f"No node gives its cards out by claims: label one cgpu=true and {LABEL_MODE}=claims."
        return
    if not shared:
        if not any(each.reason == BY_CLAIMS for each in found):
            name = request.names.memory
            yield f"No node shares its cards: label one cgpu=true, and see that it offers {name}."
        return
    if request.compute_percent and not any(each.state.node.compute_percent for each in shared if each.state):
        how = f"{LABEL_COMPUTE_POLICY}=cap" if wish.claims else f"{LABEL_SCHEDULE}={CORE_MEM}"
        what = "capacity compute" if wish.claims else request.names.compute
        yield f"No node divides the compute of its cards: label one {how}, or ask for no {what}."
        return
    offered = {each.state.node.names.memory for each in shared if each.state}
    if request.names.memory not in offered:
        yield (
            f"It asks for {request.names.memory}, and the nodes offer {', '.join(sorted(offered))}, which "
            "means the same: recreate it with that name. The webhook does so by itself, where it runs."
        )
        return
    if all(each.fit is Fit.TIER_TOO_LOW for each in shared):
        yield (
            f"It asks for {LABEL_MIN_TIER}={request.min_tier.word}, and no node enforces limits that "
            "strictly: enable isolation on a node, or ask for less."
        )
        return
    if any(each.fits for each in found):
        yield "There is room: if the pod still waits, look at its events and its scheduler."
        return
    refused = [each for each in shared if each.detail and each.fit in (Fit.NO_ROOM, Fit.TOO_FEW_CARDS)]
    starved = [each for each in shared if each.detail and each.fit in (Fit.NO_CPU, Fit.NO_MEMORY)]
    if starved:
        best = max(starved, key=lambda each: each.most)
        yield f"Cards are free on nodes that lack something else: {best.detail}."
    elif refused and all(each.never for each in shared):
        yield from _too_large(shared, request)
    else:
        yield from _pieces(refused, request)


def _too_large(shared: Sequence[_Found], request: Request) -> Iterable[str]:
    nodes = [each.state.node for each in shared if each.state is not None]
    largest = max(card.units for node in nodes for card in node.cards)
    asked, gib = request.units_per_card, UNIT_MIB["GiB"]
    if largest < asked:
        cards = f" on each of {request.card_count} cards" if request.card_count > 1 else ""
        yield (
            f"It will never fit here: it asks for {counted(asked, 'unit')}{cards}, and the "
            f"largest shared card has {largest}. Ask for less, or spread it over more cards."
        )
    else:
        most = max(sum(card.units >= asked for card in node.cards) for node in nodes)
        yield (
            f"It will never fit here: it asks for {counted(asked, 'unit')} on each of {request.card_count} "
            f"cards of one node, and no node has more than {most} that large. Ask for fewer cards."
        )
    in_one = max((each.units for each in request.containers), default=asked)  # a claim names no containers
    if largest < gib <= min(asked, in_one):  # no card has a thousand GiB, hardly one as few MiB: a wrong unit
        units = counted(-(-asked // gib), "unit")
        yield f"If that is in MiB: a unit is one GiB here, and {asked} MiB are {units}."


def why_there(state: NodeState, pod: Pod) -> Iterable[str]:
    """What made a pod's card the one to take, as far as it can still be seen."""
    if pod.request is None or pod.placement is None or len(state.node.cards) < 2:
        return
    back = {part.card: part for part in pod.placement.slices}
    slots = [slot for slot, card in enumerate(state.node.cards) if card.index in back]
    if (link := weakest_link(state.node.links, slots)) is not None:
        yield f"Its cards reach each other through {link.word}; they differ in that on this node."
    left, compute_left = list(state.left), list(state.compute_left)
    for slot, card in enumerate(state.node.cards):
        if card.index in back:
            left[slot] += back[card.index].units
            compute_left[slot] += back[card.index].compute_percent
    if (
        place(replace(state, left=tuple(left), compute_left=tuple(compute_left)), pod.request)
        == pod.placement
    ):
        which = "emptiest" if state.node.packing == SPREAD else "fullest"
        what = "card that has" if len(back) == 1 else "cards that have"
        which = f"best joined and {which}" if link is not None else which
        yield f"It is already on the {which} {what} room for it."


def _pieces(refused: Sequence[_Found], request: Request) -> Iterable[str]:
    scattered = [(sum(each.state.left), each) for each in refused if each.state is not None]
    enough = [(total, each) for total, each in scattered if total >= request.units]
    if enough:
        total, best = max(enough, key=lambda pair: (pair[0], pair[1].name))
        where = "of one card" if request.card_count == 1 else f"on each of {request.card_count} cards"
        wanted = f"{request.units_per_card} are wanted {where}"
        yield (
            f"The free memory is fragmented: {best.name} has {counted(total, 'unit')} free in all, the most "
            f"on one card is {best.most}, and {wanted}. It will fit when a pod ends."
        )
        return
    all_free = sum(total for total, _ in scattered)
    if all_free:
        free = counted(all_free, "unit")
        yield f"These nodes have {free} free in total, but none of them has {request.units}."
