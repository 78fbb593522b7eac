"""What a node's cards report: the one seam where something other than NVML may stand."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from gpuslice.core.attribution import ProcessReading
from gpuslice.core.card_links import Link
from gpuslice.core.errors import GpusliceError


class GpuUnavailableError(GpusliceError):
    """The driver cannot be asked now: not loaded, no library, or no answer in time. Try again later."""


@dataclass(frozen=True, slots=True)
class DriverCard:
    """One card as the driver describes it. `index` is its minor number (``/dev/nvidia<index>``).

    `memory_mib` is the total that NVML's first memory call names, the figure that the vendor's tools divide.
    `divided`: it is in MIG mode, in which programs use its MIG devices alone.
    """

    index: int
    uuid: str
    memory_mib: int
    model: str = ""
    pci_bus_id: str = ""
    divided: bool = False


@dataclass(frozen=True, slots=True)
class LostCard:
    """A card that is present but does not answer. `position` is its place in the driver's enumeration."""

    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class PairLink:
    """How two cards, by uuid, reach each other."""

    uuid: str
    other: str
    link: Link


@dataclass(frozen=True, slots=True)
class Inventory:
    """All cards of the node at one moment, in index order, and those that could not be read."""

    cards: tuple[DriverCard, ...]
    lost: tuple[LostCard, ...] = ()
    driver_version: str = ""
    links: tuple[PairLink, ...] = ()  # of each pair that the driver tells about


@dataclass(frozen=True, slots=True)
class XidEvent:
    """A fault that the driver reported. `uuid` is "" when it does not say which card."""

    xid: int
    uuid: str = ""


class GpuSource(Protocol):
    """Reads a node's cards. Every method returns in bounded time, whatever the driver does."""

    async def inventory(self) -> Inventory:
        """The cards now. Raises `GpuUnavailableError` when the driver itself cannot be asked."""
        ...

    async def processes(self) -> tuple[ProcessReading, ...]:
        """The memory and busy time of each process on each card that answers.

        Raises `GpuUnavailableError`.
        """
        ...

    async def free_bytes(self, uuid: str) -> int:
        """What is free of a card. Raises `GpuUnavailableError`."""
        ...

    def events(self) -> AsyncGenerator[XidEvent]:
        """Faults as they happen, until the source is closed. Raises `GpuUnavailableError` when the driver
        reports none."""
        ...

    async def close(self) -> None:
        """Release the driver; the next query reopens it and enumerates its cards again."""
        ...
