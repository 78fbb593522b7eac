"""The cards of this machine, and the selection of those for a budget."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace

from gpuslice.adapters.gpu.source import DriverCard, GpuUnavailableError
from gpuslice.adapters.region.budget import Budget, BudgetError
from gpuslice.core.units import MIB, card_units, limit_bytes

UNITS = {"m": MIB, "g": 1024 * MIB}
"""By the first letter: 4GiB, 4Gi, 4GB and 4g are the same, as for docker run --memory."""
MEMORY = re.compile(r"(?P<amount>[1-9][0-9]{0,11}) ?(?P<unit>[mg](i?b?))?", re.IGNORECASE)


def machine_cards() -> tuple[DriverCard, ...]:
    """Numbered as in nvidia-smi; for a card divided by MIG its devices, numbered like cards.

    Raises BudgetError if there is no driver, or no card.
    """
    import asyncio  # not needed for the help

    from gpuslice.adapters.gpu.mig import given_out
    from gpuslice.adapters.gpu.nvml import NvmlSource

    async def ask() -> tuple[DriverCard, ...]:
        source = NvmlSource()
        try:
            cards = numbered((await source.inventory()).cards)
            return tuple(each for card in cards for each in given_out(card))
        finally:
            await source.close()

    try:
        cards = asyncio.run(ask())
    except GpuUnavailableError as error:
        raise BudgetError(f"this machine has no NVIDIA driver that answers: {error}") from error
    if not cards:
        raise BudgetError("the NVIDIA driver of this machine shows no card")
    return tuple(replace(card, index=position) for position, card in enumerate(cards))


def numbered(cards: Sequence[DriverCard]) -> tuple[DriverCard, ...]:
    """In the order of the PCI bus, as in nvidia-smi: the device file's number may differ."""
    ordered = sorted(cards, key=lambda card: (card.pci_bus_id, card.index))
    return tuple(replace(card, index=position) for position, card in enumerate(ordered))


def chosen_cards(
    names: str, count: int | None, memory: str, cards: Sequence[DriverCard], running: Sequence[Budget]
) -> list[DriverCard]:
    """The named cards, or those with the most room, in the machine's order. Raises BudgetError."""
    wanted = named_cards(names, "--gpu", cards) if names else visible_cards(cards)
    count = count or (len(wanted) if names else 1)
    if count > len(wanted):
        there = "is 1" if len(wanted) == 1 else f"are {len(wanted)}"
        raise BudgetError(f"{count} cards are asked for, and there {there} to choose from")
    best = sorted(wanted, key=lambda card: -room_bytes(card, running))[:count]
    for card in best:
        room, asked = room_bytes(card, running), memory_bytes(memory, card)
        if asked > room:
            of = "on a card" if count == 1 else f"on card {card.index}"
            raise BudgetError(
                f"{asked // MIB} MiB are asked for and {max(room, 0) // MIB} MiB are the most"
                f" that is left {of} (`gpuslice ps` shows who has the rest)"
            )
    return sorted(best, key=wanted.index)


def visible_cards(cards: Sequence[DriverCard]) -> list[DriverCard]:
    """The cards in CUDA_VISIBLE_DEVICES, if it is set: a budget never shows more."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(cards)
    if not visible or visible.startswith("-"):
        raise BudgetError(f'CUDA_VISIBLE_DEVICES is "{visible}" and hides every card: unset it, or say --gpu')
    return named_cards(visible, "CUDA_VISIBLE_DEVICES", cards)


def named_cards(names: str, source: str, cards: Sequence[DriverCard]) -> list[DriverCard]:
    found = []
    for name in (part.strip() for part in names.split(",")):
        is_uuid = name.startswith(("GPU-", "MIG-"))  # as in the driver: any prefix of one card's
        same = [card for card in cards if name == str(card.index) or (is_uuid and card.uuid.startswith(name))]
        if len(same) != 1:
            known = ", ".join(f"{card.index} ({card.uuid})" for card in cards)
            raise BudgetError(f'{source}: there is no card "{name}": this machine has {known}')
        found += [card for card in same if card not in found]
    return found


def room_bytes(card: DriverCard, running: Sequence[Budget]) -> int:
    """Memory of a card that is not promised to any budget."""
    given = sum(
        limit.memory_bytes or 0 for budget in running for limit in budget.limits if limit.uuid == card.uuid
    )
    return card.memory_mib * MIB - given


def memory_bytes(memory: str, card: DriverCard) -> int:
    """A bare number counts units of the card, as in a cluster; 512MiB is exactly that."""
    amount, unit = parse_memory(memory)
    units = card_units(card.memory_mib)
    if unit:
        return amount * UNITS[unit[0].lower()]
    return limit_bytes(card.memory_mib, amount, units) if amount <= units else amount * 1024 * MIB


def parse_memory(memory: str) -> tuple[int, str]:
    """Amount and unit as written. Raises BudgetError."""
    found = MEMORY.fullmatch(memory)
    if not found:
        right = "a whole number of units of the card, or an amount like 512MiB or 4Gi"
        raise BudgetError(f'--mem is "{memory}", must be {right}')
    return int(found["amount"]), found["unit"] or ""
