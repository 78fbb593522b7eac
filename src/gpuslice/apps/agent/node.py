"""What this node gives out: its cards cut into units."""

from __future__ import annotations

from collections.abc import Iterable

from gpuslice.adapters.gpu.source import DriverCard
from gpuslice.core.contract import GPU_MEM, device_id
from gpuslice.core.errors import GpusliceError
from gpuslice.core.model import Card
from gpuslice.core.units import UNIT_MIB, card_units

MOST_LIST_BYTES = 4 * 1024 * 1024
"""gRPC's limit for one message in kubelet; ListAndWatch has to name every device in one."""

_ENTRY_BYTES = 20  # tags, lengths, "Unhealthy" and some room, beside the id itself


class TooManyUnitsError(GpusliceError):
    """The cards in this unit are more devices than kubelet can be told of."""


def memory_unit(wanted: str) -> tuple[str, str]:
    """The unit to use and a warning where `wanted` is none: the vendor's plugin falls back to GiB as well."""
    if wanted in UNIT_MIB:
        return wanted, ""
    return "GiB", f'memory unit "{wanted}" is unknown, must be {" or ".join(UNIT_MIB)}; using GiB'


def cut(cards: Iterable[DriverCard], unit: str) -> tuple[Card, ...]:
    """Each card in its own number of units, in index order. Raises `TooManyUnitsError`."""
    divided = tuple(
        Card(card.index, card.uuid, card.memory_mib, card_units(card.memory_mib, unit), card.model)
        for card in sorted(cards, key=lambda card: card.index)
    )
    size_bytes = sum(card.units * (len(card.uuid) + 8 + _ENTRY_BYTES) for card in divided)
    if size_bytes > MOST_LIST_BYTES:
        units = sum(card.units for card in divided)
        raise TooManyUnitsError(
            f"{units} devices of {GPU_MEM} in units of 1 {unit} are about {size_bytes // 1024} KiB, "
            f"and kubelet takes {MOST_LIST_BYTES // 1024} KiB at once; use --memory-unit=GiB"
        )
    return divided


def device_ids(card: Card) -> list[str]:
    """The kubelet device ids of a card, unit by unit."""
    return [device_id(card.uuid, unit) for unit in range(card.units)]
