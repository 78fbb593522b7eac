"""Why a pod waits: every class of nodes with what rules it out, and the most that would fit there.

The same ledger and the same placement as the extender's, asked by hand, and kube-scheduler's own filters
(`node_filters`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuslice.core.card_links import weakest_link
from gpuslice.core.contract import (
    LABEL_CLAIMS,
    LABEL_COMPUTE_POLICY,
    LABEL_MIN_TIER,
    LABEL_MODE,
    LABEL_SCHEDULE,
    LABEL_SHARED,
)
from gpuslice.core.ledger import Ledger
from gpuslice.core.mode import CORE_MEM, rules_of
from gpuslice.core.model import Pod, Request
from gpuslice.core.node_filters import NodeFilters, Place, Wish
from gpuslice.core.placement import SPREAD, Fit, NodeState, choose_slots, place, refusal
from gpuslice.core.preemption import LOWEST, eviction
from gpuslice.core.units import UNIT_MIB
from gpuslice.core.words import counted

ROOM = "Has room now"
NOT_SHARED = "Shares no cards"
THERE_IS_ROOM = "There is room: if the pod still waits, look at its events and its scheduler."
BY_CLAIMS = "Gives its cards out by claims"
NO_CLAIMS = "Gives no cards out by claims"
NO_CLAIMS_YET = "Offers no cards by claims yet"


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
    starved: bool = False  # it has cards, and too little of something else

    @property
    def most(self) -> int:
        return max(self.state.left, default=-1) if self.state is not None else -1


def explain(ledger: Ledger, places: Iterable[Place], wish: Wish) -> Explanation:
    """Every node judged and put with its like."""
    filters = NodeFilters(places := tuple(places), wish)
    found = [_judge(ledger, place, filters) for place in places]
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
    hints = [*_hints(found, wish, labels={each.name: each.labels for each in places})]
    by_claims = [each.name for each in found if each.reason == BY_CLAIMS]
    if by_claims and not any(each.fits for each in found):
        give = f"{counted(len(by_claims), 'node')} {'gives' if len(by_claims) == 1 else 'give'}"
        hints.append(
            f"{give} cards out by claims alone: to have a part of one there, label the pod's namespace "
            f"{LABEL_CLAIMS}=true and recreate the pod."
        )
    return Explanation(tuple(classes), tuple(hints))


def _judge(ledger: Ledger, node: Place, filters: NodeFilters) -> _Found:
    state, wish = ledger.state(node.name), filters.wish
    if state is None or not state.node.divides_cards:
        by_claims = rules_of(node.labels).claims
        if wish.claims:
            return _Found(node.name, NO_CLAIMS_YET if by_claims else NO_CLAIMS, never=not by_claims)
        return _Found(node.name, BY_CLAIMS if by_claims else NOT_SHARED, never=True)
    fit, barrier = ledger.why_not_on(node.name, wish.request), filters.obstacle(node)
    used = ledger.host_used(node.name)
    refused = refusal(fit, state, wish.request, used)
    if barrier:
        return _Found(node.name, barrier, state, fit, never=fit is not Fit.YES and refused.never)
    roomy = fit in (Fit.YES, Fit.NO_CPU, Fit.NO_MEMORY)
    if roomy and (less := filters.shortage(node, used)) is not None:
        return _Found(node.name, less.reason, state, fit, never=less.never, detail=less.detail, starved=True)
    if fit is not Fit.YES:
        return _Found(node.name, refused.reason, state, fit, never=refused.never, detail=refused.detail)
    cards = ", ".join(str(state.node.cards[slot].index) for slot in sorted(choose_slots(state, wish.request)))
    return _Found(node.name, ROOM, state, fit, fits=True, detail=f"{node.name}, card {cards}")


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


def room_by_eviction(ledger: Ledger, places: Sequence[Place], wish: Wish, pod: Pod) -> Iterable[str]:
    """What eviction would help a waiting pod that fits nowhere: the cheapest, as the extender chooses it."""
    filters = NodeFilters(places, wish)
    ways = [
        way
        for place in places
        if not filters.obstacle(place)
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


def _unless_done(label: str, value: str, labels: Mapping[str, Mapping[str, str]], what: str) -> str:
    """ "Label one …", or what comes after it where somebody has done so."""
    done = sorted(name for name, of in labels.items() if of.get(label) == value)
    if done:
        return f"{done[0]} is labelled {label}={value} and does not offer that yet: see gpuslice doctor."
    return what


def _hints(found: Sequence[_Found], wish: Wish, labels: Mapping[str, Mapping[str, str]]) -> Iterable[str]:
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
            what = f"No node shares its cards: label one cgpu=true, and see that it offers {name}."
            yield _unless_done(LABEL_SHARED, "true", labels, what)
        return
    if request.compute_percent and not any(each.state.node.compute_percent for each in shared if each.state):
        how = f"{LABEL_COMPUTE_POLICY}=cap" if wish.claims else f"{LABEL_SCHEDULE}={CORE_MEM}"
        what = "capacity compute" if wish.claims else request.names.compute
        key, _, value = how.partition("=")
        first = f"No node divides the compute of its cards: label one {how}, or ask for no {what}."
        yield _unless_done(key, value, labels, first)
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
        yield THERE_IS_ROOM
        return
    refused = [each for each in shared if each.detail and each.fit in (Fit.NO_ROOM, Fit.TOO_FEW_CARDS)]
    starved = [each for each in shared if each.starved]
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
        yield f"Free in all: {counted(all_free, 'unit')}, but no node has {request.units} of them."
