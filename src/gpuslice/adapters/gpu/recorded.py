"""Cards from a recording: a user's machine as a fixture, or a machine without a card.

The file is JSON: ``{"driver_version": "…", "cards": [{"index": 0, "uuid": "GPU-…", "memory_mib": 16130,
"model": "…"}], "lost": [{"position": 1, "reason": "…"}], "events": [{"xid": 79, "uuid": "GPU-…"}],
"processes": [{"pid": 1, "uuid": "GPU-…", "memory_bytes": 1048576}], "links": [{"uuid": "GPU-…", "other":
"GPU-…", "link": 3}]}``, each link by its number in `Link`. The file is read again at every call, so editing
it makes a card appear or disappear, and events appended to it happen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from gpuslice.adapters.gpu.source import (
    DriverCard,
    GpuUnavailableError,
    Inventory,
    LostCard,
    PairLink,
    XidEvent,
)
from gpuslice.core.attribution import ProcessReading


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of the file."""

    cards: list[DriverCard] = []
    lost: list[LostCard] = []
    events: list[XidEvent] = []
    driver_version: str = ""
    processes: list[ProcessReading] = []
    links: list[PairLink] = []


class RecordedSource:
    """`GpuSource` over a recording; looks for new events every `poll_s` seconds."""

    def __init__(self, path: Path, *, poll_s: float = 0.5) -> None:
        self._path = path
        self._poll_s = poll_s

    async def inventory(self) -> Inventory:
        recording = self._read()
        cards = tuple(sorted(recording.cards, key=lambda card: card.index))
        return Inventory(cards, tuple(recording.lost), recording.driver_version, tuple(recording.links))

    async def processes(self) -> tuple[ProcessReading, ...]:
        return tuple(self._read().processes)

    async def free_bytes(self, uuid: str) -> int:
        recording = self._read()
        total = sum(card.memory_mib << 20 for card in recording.cards if card.uuid == uuid)
        return total - sum(each.memory_bytes or 0 for each in recording.processes if each.uuid == uuid)

    async def events(self) -> AsyncGenerator[XidEvent]:
        reported = 0
        while True:
            events = self._read().events
            for event in events[reported:]:
                yield event
            reported = len(events)
            await asyncio.sleep(self._poll_s)

    async def close(self) -> None:
        return None

    def _read(self) -> Recording:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Recording)
        except (OSError, ValueError) as error:
            raise GpuUnavailableError(f"recording {self._path}: {error}") from error


def record(inventory: Inventory, path: Path) -> None:
    """Write what was read as a recording."""
    cards, lost, links = list(inventory.cards), list(inventory.lost), list(inventory.links)
    recording = Recording(cards, lost, [], inventory.driver_version, links=links)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(recording)))
