"""Which device ids to propose to kubelet, and which to accept from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpuslice.apps.agent.wants import Guess, Want
from gpuslice.core.contract import DEVICE_ID_SEPARATOR, GPU_MEM, card_of_device_id
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.grant import GrantError, units_per_card
from gpuslice.core.model import Card, Node, Refusal
from gpuslice.core.words import counted

Free = Mapping[int, Sequence[str]]
"""Ids that kubelet can give, by card index and in unit order."""

NOBODY: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Proposal:
    """Ids for one container, and for whom they were chosen (None: for nobody in particular)."""

    ids: tuple[str, ...]
    want: Want | None


@dataclass(frozen=True, slots=True)
class Claim:
    """Accepted ids and the container that they are believed to be for; both None for a pod nobody placed.

    `again`: the very ids were granted before, to this container.
    """

    want: Want | None = None
    again: Guess | None = None


# -- GetPreferredAllocation ----------------------------------------------------------------------------
def propose(
    available: Iterable[str],
    must_include: Iterable[str],
    size: int,
    wants: Sequence[Want],
    node: Node,
    *,
    kept: Mapping[str, str] = NOBODY,
) -> Proposal | Refusal:
    """`size` ids from the cards of the first want of that size that have room, else from the best fit.

    The answer is always whole: kubelet would fill up a short one from any card. `kept` are ids that kubelet
    takes for free and that somebody holds, with that pod's uid: they go to that pod only, and last.
    """
    must = frozenset(must_include)
    try:
        free = _free(available, must, node)
    except GrantError as error:
        return Refusal(str(error))
    fitting = [want for want in wants if want.units == size]
    for want in fitting:
        ids = _take(_left(free, kept, want.pod.view.uid), must, size, want.cards)
        if ids:
            return Proposal(ids, want)
    card_count = fitting[0].request.card_count if fitting else 1
    left = _left(free, kept, "")
    ids = _best_fit(left, must, size, card_count, node)
    if ids:
        return Proposal(ids, next((want for want in fitting if not want.cards), None))
    return Refusal(_no_room(left, size, card_count, node))


def _left(free: Free, kept: Mapping[str, str], uid: str) -> Free:
    """What is left for a pod when others keep what they hold."""
    if not kept:
        return free
    return {
        card: [*(one for one in ids if one not in kept), *(one for one in ids if kept.get(one) == uid)]
        for card, ids in free.items()
    }


def _free(available: Iterable[str], must: frozenset[str], node: Node) -> dict[int, list[str]]:
    index_of = {gpu.uuid: gpu.index for gpu in node.cards}
    free: dict[int, list[str]] = {gpu.index: [] for gpu in node.cards}
    for identifier in {*available, *must}:
        card = index_of.get(_card(identifier))
        if card is not None:
            free[card].append(identifier)
        elif identifier in must:
            raise GrantError(f"kubelet wants device {identifier}, which is of no card of node {node.name}")
    return {card: sorted(ids, key=lambda one: (one not in must, _unit(one))) for card, ids in free.items()}


def _take(free: Free, must: frozenset[str], size: int, cards: Sequence[int]) -> tuple[str, ...]:
    """The same number of ids from each of `cards`, with all of `must` among them; () where that cannot be."""
    if not cards or size % len(cards):
        return ()
    each = size // len(cards)
    taken = tuple(identifier for card in cards for identifier in free.get(card, ())[:each])
    return taken if len(taken) == size and must <= set(taken) else ()


def _best_fit(free: Free, must: frozenset[str], size: int, card_count: int, node: Node) -> tuple[str, ...]:
    """From the cards with the least room that is still enough; cards that must be used come first."""
    used = {card for card, ids in free.items() if must & set(ids)}
    each = size // card_count
    roomy = [card for card, ids in free.items() if len(ids) >= each and card not in node.unhealthy]
    order = sorted(roomy, key=lambda card: (card not in used, len(free[card]), card))
    return _take(free, must, size, order[:card_count]) if len(order) >= card_count else ()


def _no_room(free: Free, size: int, card_count: int, node: Node) -> str:
    said = {card: "out of use" if card in node.unhealthy else len(ids) for card, ids in free.items()}
    room = ", ".join(f"card {card}: {what}" for card, what in sorted(said.items())) or "no card"
    wanted = f"{counted(size, 'unit')} of {GPU_MEM} on one card"
    if card_count > 1:
        wanted = f"{counted(size // card_count, 'unit')} of {GPU_MEM} on each of {card_count} cards"
    return f"node {node.name} has no room for {wanted} (free units: {room})"


def _card(identifier: str) -> str:
    try:
        return card_of_device_id(identifier)
    except ValueError:
        return ""


def _unit(identifier: str) -> int:
    return int(identifier.rpartition(DEVICE_ID_SEPARATOR)[2])


# -- Allocate ------------------------------------------------------------------------------------------
def claim(
    ids: frozenset[str],
    wants: Sequence[Want],
    guesses: Iterable[Guess],
    assignments: Iterable[DeviceAssignment],
    node: Node,
    *,
    unplaced: bool = False,
) -> Claim | Refusal:
    """For whom these ids are, or why they cannot be granted.

    `unplaced`: accept ids of one card for a pod that no extender placed. Raises `GrantError` for ids that are
    of no card of the node.
    """
    cards = _cards_of(ids, node)
    want = _best_want(ids, cards, wants)
    if want is not None:
        return Claim(want)
    guesses = list(guesses)
    repeated = next((each for each in guesses if each.ids == ids), None)
    if repeated is not None or any(each.ids == ids for each in assignments):
        return Claim(again=repeated)
    reused = _reused(ids, wants, guesses)
    if reused is not None:
        return Claim(reused)
    if len(cards) == 1 and unplaced:
        return Claim()
    return Refusal(_no_match(len(ids), cards, node))


def _cards_of(ids: frozenset[str], node: Node) -> dict[int, int]:
    """Units by card index."""
    cards: dict[str, Card] = {card.uuid: card for card in node.cards}
    counts = units_per_card(ids)
    for uuid in counts:
        if uuid not in cards:
            raise GrantError(f"kubelet gave a device of card {uuid}, which node {node.name} does not have")
    return {cards[uuid].index: count for uuid, count in counts.items()}


def _best_want(ids: frozenset[str], cards: Mapping[int, int], wants: Sequence[Want]) -> Want | None:
    """Of the wants of this amount and shape the first that was placed on just these cards, else the first."""
    if len(set(cards.values())) != 1:
        return None
    fitting = [each for each in wants if each.units == len(ids) and each.request.card_count == len(cards)]
    return next((each for each in fitting if set(each.cards) == set(cards)), next(iter(fitting), None))


def _reused(ids: frozenset[str], wants: Sequence[Want], guesses: Iterable[Guess]) -> Want | None:
    """A container that got back ids of its pod's own init containers, in whatever mix of that pod's cards."""
    granted: dict[str, set[str]] = {}
    for guess in guesses:
        granted.setdefault(guess.uid, set()).update(guess.ids)
    fitting = (want for want in wants if want.units == len(ids))
    return next((want for want in fitting if ids <= granted.get(want.pod.view.uid, set())), None)


def _no_match(units: int, cards: Mapping[int, int], node: Node) -> str:
    if len(cards) > 1:
        mix = ", ".join(f"{count} of card {card}" for card, count in sorted(cards.items()))
        return (
            f"kubelet offered {counted(units, 'unit')} of {GPU_MEM} from several cards of node {node.name} "
            f"({mix}), and no pod that waits here was placed like that"
        )
    return (
        f"no pod that waits on node {node.name} was placed with {counted(units, 'unit')} of {GPU_MEM} for a "
        f"container; a pod gets its card from the gpuslice extender, so let the scheduler place it"
    )
