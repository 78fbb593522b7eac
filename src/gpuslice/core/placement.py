"""Which cards of one node hold a request, and if none do, why not.

The short texts are the vendor's, so that dashboards and habits keep working: checked letter by letter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from gpuslice.core.card_links import closest
from gpuslice.core.model import CardSlice, Node, Placement, Refusal, Request
from gpuslice.core.words import counted

KUBELET_AWAY = "kubelet does not answer on this node, and would refuse the pod when it is back"
NO_ROOM = "Insufficient GPU Memory in one device"
NO_ROOM_IN_SEVERAL = "Insufficient GPU Memory in {count} devices"
NO_CORE = "Insufficient {name} in one device"
CORE_REQUIRED = "The node takes only pods that ask for {name} too"
OTHER_NAMES = "The node offers {offered}, not {asked}"
TIER_TOO_LOW = "The node's tier of isolation is below the one that the pod asks for"
SPREAD = "spread"


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node as it stands: its cards and, in the same order, what is free of each.

    A card that must not be used (unhealthy) has nothing free. `left` in units, `core_left` in percent.
    """

    node: Node
    left: tuple[int, ...]
    compute_left: tuple[int, ...]


def without_cards(state: NodeState, cards: Collection[int]) -> NodeState:
    """The node as if nothing were free on these cards."""
    left = [
        0 if card.index in cards else free for card, free in zip(state.node.cards, state.left, strict=True)
    ]
    return replace(state, left=tuple(left))


def not_shared(node_name: str) -> Refusal:
    """The refusal of a node without shared cards, known to us or not."""
    return Refusal(f"The node {node_name} is not for GPU share, need skip", never=True)


def place(state: NodeState, request: Request, slots: Sequence[int] | None = None) -> Placement | Refusal:
    """Put `request` on `state`, on the cards at `slots` if a policy has chosen them.

    Without `slots`, and where the node's label asks for one way of packing, the node's rule decides: the
    cards with least free among those that fit, or with most free for ``spread``; the lowest index on ties.
    Several cards are those that are joined best, before that.
    """
    if slots is None or state.node.packing:
        slots = choose_slots(state, request)
    if not slots or barred(state.node, request) or not all(_fits(state, request, slot) for slot in slots):
        return refuse(state, request)
    return on_cards(state.node.name, (state.node.cards[slot].index for slot in slots), request)


def on_cards(node_name: str, cards: Iterable[int], request: Request) -> Placement:
    """`request` on these cards, as much on each."""
    slices = [CardSlice(card, request.units_per_card, request.compute_percent) for card in sorted(cards)]
    return Placement(node_name, tuple(slices))


def choose_slots(state: NodeState, request: Request) -> tuple[int, ...]:
    """Positions in ``node.cards`` of the cards to take; empty when there are not enough that fit."""
    sign = -1 if state.node.packing == SPREAD else 1
    fitting = [slot for slot in range(len(state.left)) if _fits(state, request, slot)]
    if len(fitting) < request.card_count:
        return ()
    fitting.sort(key=lambda slot: (sign * state.left[slot], slot))
    return tuple(closest(state.node.links, fitting, request.card_count))


def refuse(state: NodeState, request: Request) -> Refusal:
    """Why `state` does not hold `request`: what was asked, what is missing, the most that would fit."""
    node = state.node
    if not node.divides_cards:
        return not_shared(node.name)
    if (refusal := barred(node, request)) is not None:
        return refusal
    if node.kubelet_away:
        return Refusal(KUBELET_AWAY, never=False)
    roomy = [slot for slot, left in enumerate(state.left) if left >= request.units_per_card]
    if request.compute_percent and roomy:
        most = max(state.compute_left[slot] for slot in roomy)
        detail = (
            f"asked for {request.compute_percent} % of the compute of one card that has "
            f"{counted(request.units, 'unit')} free; the most left on such a card of {state.node.name} is "
            f"{most} %"
        )
        reason = NO_CORE.format(name=request.names.compute)
        return Refusal(reason, never=state.node.compute_percent < request.compute_percent, detail=detail)
    each = request.units_per_card
    large_enough = sum(card.units >= each for card in node.cards)
    never = large_enough < request.card_count
    if request.card_count > 1:
        detail = (
            f"asked for {counted(each, 'unit')} on each of {request.card_count} cards; {node.name} has that "
            f"much free on {len(roomy)} of {len(node.cards)} cards"
        )
        return Refusal(NO_ROOM_IN_SEVERAL.format(count=request.card_count), never, detail)
    freest = max(range(len(state.left)), key=lambda slot: state.left[slot])
    room = f"{state.left[freest]} of {node.cards[freest].units} (card {node.cards[freest].index})"
    largest = max(card.units for card in node.cards)
    most_free = f"the most free on one card of {node.name} is {room}, its largest card has {largest}"
    return Refusal(NO_ROOM, never, f"asked for {counted(each, 'unit')} on one card; {most_free}")


def barred(node: Node, request: Request) -> Refusal | None:
    """Why the node takes no pod of this kind, however empty it is."""
    if request.names != node.names:
        reason = OTHER_NAMES.format(offered=node.names.memory, asked=request.names.memory)
        return Refusal(reason, never=True, detail="both mean the same, and kubelet counts them apart")
    if node.tier < request.min_tier:
        detail = f"{node.name} has {node.tier.word}, {request.min_tier.word} is asked for"
        return Refusal(TIER_TOO_LOW, never=True, detail=detail)
    if request.compute_percent == 0 and node.compute_required:
        reason = CORE_REQUIRED.format(name=node.names.compute)
        return Refusal(reason, never=True, detail=f"{node.name} divides compute as well as memory")
    return None


def _fits(state: NodeState, request: Request, slot: int) -> bool:
    return state.left[slot] >= request.units_per_card and state.compute_left[slot] >= request.compute_percent
