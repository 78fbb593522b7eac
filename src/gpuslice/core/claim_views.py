"""Nodes and pods with claims in the form of other nodes and pods: what is offered, and who holds what.

The truth is in the ResourceClaims. Nothing of it is written on pods, where anybody could write it too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpuslice.core.annotations import decode_cards
from gpuslice.core.claims import ClaimedSlice
from gpuslice.core.contract import NODE_GPUS, VENDOR_NAMES
from gpuslice.core.errors import ContractError
from gpuslice.core.mode import rules_of
from gpuslice.core.model import Card, CardSlice, Placement, Pod, Request
from gpuslice.core.units import card_units


def cards_of_claims(labels: Mapping[str, str], annotations: Mapping[str, str]) -> tuple[Card, ...]:
    """The cards of a node whose label says claims; none for other nodes, or if it does not list any."""
    if not rules_of(labels).claims or NODE_GPUS not in annotations:
        return ()
    try:
        return decode_cards(annotations[NODE_GPUS])
    except ContractError:
        return ()


def amounts_of(cards: Iterable[Card]) -> dict[str, str]:
    """What the node would report if it offered its cards as an extended resource."""
    cards = tuple(cards)
    return {VENDOR_NAMES.memory: str(sum(card.units for card in cards)), VENDOR_NAMES.cards: str(len(cards))}


def unit_of(cards: Iterable[Card]) -> str:
    """The unit in which the cards are counted."""
    in_mib = any(card.memory_mib and card.units > card_units(card.memory_mib, "GiB") for card in cards)
    return "MiB" if in_mib else "GiB"


def wanted(parts: Iterable[tuple[int, int, int]], *, together: bool) -> Request | None:
    """What a claim asks for, as if its pod asked for that; `parts`: units, percent and cards per request.

    `together`: a constraint keeps the requests on one card. Otherwise the largest counts for all.
    """
    parts = [part for part in parts if part[0] and part[2]]
    if not parts:
        return None
    if together and all(cards == 1 for *_, cards in parts):
        return Request(sum(part[0] for part in parts), 1, sum(part[1] for part in parts))
    units, percent, cards = max(parts)
    return Request(units * cards, cards, percent)


def with_claimed(pod: Pod, slices: Iterable[ClaimedSlice]) -> Pod:
    """The pod with what its claims were given, as if it had asked for that and been placed there."""
    units: dict[int, int] = defaultdict(int)
    percent: dict[int, int] = defaultdict(int)
    for each in slices:
        units[each.card] += each.units
        percent[each.card] += each.compute_percent
    held = tuple(CardSlice(card, units[card], percent[card]) for card in sorted(units) if units[card])
    if not held:
        return pod
    request = Request(sum(units.values()), len(held), max(percent.values()), host=pod.host)
    return replace(pod, request=request, placement=Placement(pod.node, held), assigned=True)
