"""Which cards of one node hold a request, and if none do, why not.

`why_not` is the rule for one node; `policy.fit` is the same rule for many, as arrays. Its answer is a `Fit`,
which `refusal` puts into words: for events, ``explain``, the console, ``simulate`` and filter's answers. The
short texts are the vendor's, so that dashboards and habits keep working: checked letter by letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter

from gpuslice.core.card_links import closest
from gpuslice.core.contract import NAME_SETS
from gpuslice.core.host_resources import NO_HOST_RESOURCES, HostResources
from gpuslice.core.model import CardSlice, Node, Placement, Refusal, Request
from gpuslice.core.words import counted

KUBELET_AWAY = "kubelet does not answer on this node, and would refuse the pod when it is back"
NO_ROOM = "Insufficient GPU Memory in one device"
NO_ROOM_IN_SEVERAL = "Insufficient GPU Memory in {count} devices"
NO_CORE = "Insufficient {name} in one device"
CORE_REQUIRED = "The node takes only pods that ask for {name} too"
OTHER_NAMES = "The node offers {offered}, not {asked}"
TIER_TOO_LOW = "The node's tier of isolation is below the one that the pod asks for"
RESERVED = "The free cards are kept for a pod that others were evicted for"
SPREAD = "spread"
CPU, MEMORY = attrgetter("cpu_milli"), attrgetter("memory_mib")  # of host resources


class Fit(IntEnum):
    """Whether a node holds a request, and why not. Where several reasons hold, the first counts."""

    NOT_SHARED = 1
    OTHER_NAMES = 2
    TIER_TOO_LOW = 3
    COMPUTE_REQUIRED = 4
    KUBELET_AWAY = 5
    OTHER_MODEL = 6  # only replayed pods ask for one
    TOO_FEW_CARDS = 7  # that are large enough and may be used
    TOO_MUCH_COMPUTE = 8  # is asked for: no card there has as much
    NO_COMPUTE = 9
    NO_ROOM = 10
    NO_CPU = 11
    NO_MEMORY = 12
    HELD = 13  # it would fit, on cards that are held for pods that come first
    YES = 14

    @property
    def is_final(self) -> bool:
        """Whether it stays so whichever pods leave the node."""
        return self <= Fit.TOO_MUCH_COMPUTE

    def reason(self, request: Request) -> str:
        """The short text, equal on all nodes; for a node that shares no cards it depends on the node."""
        if self in (Fit.TOO_MUCH_COMPUTE, Fit.NO_COMPUTE, Fit.COMPUTE_REQUIRED):
            text = CORE_REQUIRED if self is Fit.COMPUTE_REQUIRED else NO_CORE
            return text.format(name=request.names.compute)
        if self is Fit.OTHER_NAMES:
            other = next(each for each in NAME_SETS.values() if each != request.names)
            return OTHER_NAMES.format(offered=other.memory, asked=request.names.memory)
        if (text := _TEXTS.get(self, "")) or request.card_count == 1:
            return text or NO_ROOM
        return NO_ROOM_IN_SEVERAL.format(count=request.card_count)


_TEXTS = {
    Fit.TIER_TOO_LOW: TIER_TOO_LOW,
    Fit.KUBELET_AWAY: KUBELET_AWAY,
    Fit.NO_CPU: "Insufficient cpu",  # kube-scheduler's words
    Fit.NO_MEMORY: "Insufficient memory",
    Fit.HELD: RESERVED,
}


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node as it stands: its cards and, in the same order, what is free of each.

    A card that must not be used (unhealthy) has nothing free. `left` in units, `compute_left` in percent.
    """

    node: Node
    left: tuple[int, ...]
    compute_left: tuple[int, ...]


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


def why_not(state: NodeState, request: Request, host_used: HostResources | None = None) -> Fit:
    """Whether the node holds `request`; with `host_used`, also whether its CPU and memory suffice."""
    node, each = state.node, request.units_per_card
    if (barrier := barred(node, request)) is not None:
        return barrier
    if sum(_fits(state, request, slot) for slot in range(len(state.left))) < request.card_count:
        usable = sum(card.units >= each and card.index not in node.unhealthy for card in node.cards)
        if usable < request.card_count:
            return Fit.TOO_FEW_CARDS
        if node.compute_percent < request.compute_percent:
            return Fit.TOO_MUCH_COMPUTE
        has_memory = any(left >= each for left in state.left)
        return Fit.NO_COMPUTE if request.compute_percent and has_memory else Fit.NO_ROOM
    return Fit.YES if host_used is None else _host_fit(node.host, request.host, host_used)


def _host_fit(has: HostResources, asked: HostResources, used: HostResources) -> Fit:
    if has.cpu_milli and asked.cpu_milli > max(0, has.cpu_milli - used.cpu_milli):
        return Fit.NO_CPU
    if has.memory_mib and asked.memory_mib > max(0, has.memory_mib - used.memory_mib):
        return Fit.NO_MEMORY
    return Fit.YES


def barred(node: Node, request: Request) -> Fit | None:
    """Why the node takes no pod of this kind, whatever is free on its cards."""
    if not node.divides_cards:
        return Fit.NOT_SHARED
    if request.names != node.names:
        return Fit.OTHER_NAMES
    if node.tier < request.min_tier:
        return Fit.TIER_TOO_LOW
    if request.compute_percent == 0 and node.compute_required:
        return Fit.COMPUTE_REQUIRED
    return Fit.KUBELET_AWAY if node.kubelet_away else None


def refuse(state: NodeState, request: Request) -> Refusal:
    """Why `state` does not hold `request`: what was asked, what is missing, the most that would fit."""
    return refusal(why_not(state, request), state, request)


def refusal(
    fit: Fit, state: NodeState, request: Request, host_used: HostResources = NO_HOST_RESOURCES
) -> Refusal:
    """The same in words; a `fit` of YES is that of a node where another card than the chosen one would do."""
    node, each = state.node, request.units_per_card
    if fit is Fit.NOT_SHARED:
        return not_shared(node.name)
    reason, never = fit.reason(request), fit.is_final
    if fit is Fit.OTHER_NAMES:
        detail = "both mean the same, and kubelet counts them apart"
    elif fit is Fit.TIER_TOO_LOW:
        detail = f"{node.name} has {node.tier.word}, {request.min_tier.word} is asked for"
    elif fit is Fit.COMPUTE_REQUIRED:
        detail = f"{node.name} divides compute as well as memory"
    elif fit in (Fit.KUBELET_AWAY, Fit.HELD):
        detail, never = "", False  # the reason says it all
    elif fit in (Fit.NO_CPU, Fit.NO_MEMORY):
        what, amount = ("milli CPU", CPU) if fit is Fit.NO_CPU else ("MiB of memory", MEMORY)
        has, wanted = amount(node.host), amount(request.host)
        left, never = max(0, has - amount(host_used)), wanted > has
        detail = f"{wanted} {what} are wanted, {node.name} has {left} of {has} left"
    elif fit in (Fit.TOO_MUCH_COMPUTE, Fit.NO_COMPUTE):
        roomy = [slot for slot, left in enumerate(state.left) if left >= each]
        most = max((state.compute_left[slot] for slot in roomy), default=0)
        detail = (
            f"asked for {request.compute_percent} % of the compute of one card that has "
            f"{counted(request.units, 'unit')} free; the most left on such a card of {node.name} is {most} %"
        )
    else:  # a sick card may be well again
        never = (
            fit is Fit.TOO_FEW_CARDS and sum(card.units >= each for card in node.cards) < request.card_count
        )
        detail = _most_free(state, request)
    return Refusal(reason, never, detail)


def _most_free(state: NodeState, request: Request) -> str:
    node, each = state.node, request.units_per_card
    if request.card_count > 1:
        roomy = sum(left >= each for left in state.left)
        return (
            f"asked for {counted(each, 'unit')} on each of {request.card_count} cards; {node.name} has that "
            f"much free on {roomy} of {len(node.cards)} cards"
        )
    freest = max(range(len(state.left)), key=lambda slot: state.left[slot])
    room = f"{state.left[freest]} of {node.cards[freest].units} (card {node.cards[freest].index})"
    largest = max(card.units for card in node.cards)
    most_free = f"the most free on one card of {node.name} is {room}, its largest card has {largest}"
    return f"asked for {counted(each, 'unit')} on one card; {most_free}"


def _fits(state: NodeState, request: Request, slot: int) -> bool:
    return state.left[slot] >= request.units_per_card and state.compute_left[slot] >= request.compute_percent
