"""Reads a container's region: how much of each card is used, and by which of its processes.

The tenant can write the region, so these numbers are only for display and for comparison with the driver's;
no limit depends on them. The file is read, never mapped: truncation is then an error, not a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final

import msgspec

from . import layout
from .plain import open_plain, read_plain

MOST_BYTES: Final = 1 << 50
"""No card has more: the library did not write such a number."""
MOST_COUNTED: Final = 1 << 62
"""The tenant can write anything; larger numbers are ignored."""
_HEAD_BYTES: Final = ctypes.sizeof(layout.RegionHead)
_SLOT_BYTES: Final = ctypes.sizeof(layout.RegionSlot)
_SLOTS_HIGH: Final = Struct("@Q")


class RegionError(ValueError):
    """Not a region that this version can read: too short, another layout, or nonsense."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """One process's part of a card. `pid` is that inside its own PID namespace."""

    pid: int
    start_time: int
    """Field 22 of /proc/<pid>/stat, in clock ticks since boot: no later process with its pid has it."""
    pid_namespace: int
    """The inode of its PID namespace."""
    used_bytes: int
    own_bytes: int
    """The part that the driver uses for contexts and code."""


@dataclass(frozen=True, slots=True)
class CardUsage:
    """One card of the container."""

    uuid: str
    limit_bytes: int | None
    compute_percent: int | None
    used_bytes: int
    peak_bytes: int
    refused: int
    """Total number of refused allocations."""
    throttled_ns: int
    """Total time for which launches were made to wait."""
    processes: tuple[ProcessUsage, ...]
    charged_ns: int = 0
    """Total device time charged for work; falls where too much was charged, and at a restart."""
    wanted_bytes: int = 0
    """Of its own, while it waits for that because it was lent to others."""


@dataclass(frozen=True, slots=True)
class RegionReading:
    """One container's cards that it has used or may use."""

    cards: tuple[CardUsage, ...]


def prepare_region(path: Path | str) -> None:
    """Put a new region in place: processes of an earlier container keep their own, unlinked one."""
    place = Path(path)
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        os.fchmod(file, 0o666)
        os.truncate(file, layout.REGION_BYTES)
        temporary.rename(place)
    finally:
        os.close(file)


def restore_region(path: Path | str) -> None:
    """Put a new region where there is none, in a folder where tenants write: one of theirs stays."""
    place = Path(path)
    folder = os.open(place.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    file = -1
    try:
        file = os.open(place.parent, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o666)  # no name to guess
        os.fchmod(file, 0o666)
        os.truncate(file, layout.REGION_BYTES)
        with contextlib.suppress(FileExistsError):  # with a folder it is linkat(2), which follows the link
            os.link(f"/proc/self/fd/{file}", place.name, dst_dir_fd=folder)
    finally:
        os.close(folder)
        if file >= 0:
            os.close(file)


def read_region(path: Path | str, cards: Container[str] | None = None) -> RegionReading | None:
    """The region in a file; None if there is none yet or it is unused. Raises RegionError, OSError.

    `cards`: only these, by uuid. A tenant can name others, with processes on each, which takes up to 30 ms.
    """
    try:
        return parse_region(read_plain(path, layout.REGION_BYTES), cards)
    except FileNotFoundError:
        return None


class RegionFile:
    """A region that is read repeatedly: kept open, and only the part in use is read.

    A replaced region (a new container with the same ids) is noticed by its inode. If the bytes are unchanged,
    it is not decoded again, and its cards are the same object. `cards` as for `read_region`.
    """

    def __init__(self, path: Path | str, cards: Container[str] | None = None) -> None:
        self._path = str(path)
        self._wanted = cards
        self._file = -1
        self._inode = 0
        self._high = 1  # slots in use at the last read
        self._seen: int | None = None  # a hash of the bytes then, which needs no second copy
        self._cards: tuple[CardUsage, ...] | None = None

    def cards(self, *, fresh: bool = True) -> tuple[CardUsage, ...] | None:
        """The cards, as in `read_region`. Raises RegionError, OSError.

        `fresh` false: of the open file, if there is one, even if it has been replaced.
        """
        if fresh or self._file < 0:
            try:
                inode = os.lstat(self._path).st_ino
            except FileNotFoundError:
                self.close()
                return None
            if self._file < 0 or inode != self._inode:
                self.close()
                self._file = open_plain(self._path)
                self._inode = inode
        # the head and the slots in use
        data = self._head_and(self._high)
        high = min(_SLOTS_HIGH.unpack_from(data, layout.RegionHead.slots_high.offset)[0], layout.SLOTS)
        if high > self._high:
            data = self._head_and(high)
        self._high = max(high, 1)
        seen = hash(data)
        if seen != self._seen:
            self._seen = None  # in case it cannot be decoded
            reading = _reading(data, (len(data) - _HEAD_BYTES) // _SLOT_BYTES, self._wanted)
            self._cards = None if reading is None else reading.cards
            self._seen = seen
        return self._cards

    def _head_and(self, slots: int) -> bytes:
        data = os.pread(self._file, _HEAD_BYTES + slots * _SLOT_BYTES, 0)
        if len(data) < _HEAD_BYTES:
            raise RegionError(f"a region has {layout.REGION_BYTES} bytes, this file {len(data)}")
        return data

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._seen, self._cards = None, None


def parse_region(data: bytes, cards: Container[str] | None = None) -> RegionReading | None:
    """As `read_region`, from the file's bytes."""
    if len(data) < layout.REGION_BYTES:
        raise RegionError(f"a region has {layout.REGION_BYTES} bytes, this file {len(data)}")
    return _reading(data, layout.SLOTS, cards)


def _reading(data: bytes, room: int, cards: Container[str] | None) -> RegionReading | None:
    """`room`: the number of slots in `data` after the head."""
    head = layout.RegionHead.from_buffer_copy(data)
    if head.magic == 0:
        return None
    if head.magic != layout.MAGIC | layout.VERSION:
        raise RegionError(f"magic is {head.magic:#x}, must be {layout.MAGIC | layout.VERSION:#x}")
    count = min(head.slots_high, room)
    starts = range(_HEAD_BYTES, _HEAD_BYTES + count * _SLOT_BYTES, _SLOT_BYTES)
    every = (layout.RegionSlot.from_buffer_copy(data, start) for start in starts)
    slots = [slot for slot in every if slot.owner]
    used: dict[str, tuple[layout.RegionCard, int]] = {}  # each once: the library uses the first, too
    for index, card in enumerate(head.cards):
        if card.key and card.uuid.startswith((b"GPU-", b"MIG-")) and card.uuid.isascii():
            used.setdefault(card.uuid.decode("ascii"), (card, index))
    return RegionReading(
        tuple(
            _card_usage(uuid, card, index, slots)
            for uuid, (card, index) in used.items()
            if cards is None or uuid in cards
        )
    )


def _card_usage(uuid: str, card: layout.RegionCard, index: int, slots: list[layout.RegionSlot]) -> CardUsage:
    processes = tuple(
        ProcessUsage(
            pid=slot.pid,
            start_time=slot.start_time,
            pid_namespace=slot.pid_namespace,
            used_bytes=min(usage.used_bytes, MOST_BYTES),
            own_bytes=min(usage.own_bytes, MOST_BYTES),
        )
        for slot, usage in ((slot, slot.usage[index]) for slot in slots)
        if usage.used_bytes
    )
    orphaned = min(card.orphaned_bytes, MOST_BYTES)
    return CardUsage(
        uuid=uuid,
        limit_bytes=None if card.limit_bytes == layout.NO_LIMIT else card.limit_bytes,
        compute_percent=card.compute_percent or None,
        used_bytes=sum(process.used_bytes for process in processes) + orphaned,
        peak_bytes=min(card.peak_bytes, MOST_BYTES),
        refused=card.refused,
        throttled_ns=card.throttled_ns,
        processes=processes,
        charged_ns=card.charged_ns if card.charged_ns <= MOST_COUNTED else 0,
        wanted_bytes=min(card.wanted_bytes, MOST_BYTES),
    )


class Counts(msgspec.Struct, frozen=True):
    """Refused allocations of one card, and how long launches had to wait, over all runs of a container.

    kubelet restarts a crashed container with a new region. A counter that restarted each time would not move
    for a reader who looks now and then: 1, and after the next crash 1 again.
    """

    refused: int = 0
    throttled_ns: int = 0

    def plus(self, usage: CardUsage | None) -> Counts:
        """With the counts of another run, if it has used the card."""
        if usage is None:
            return self
        refused, throttled_ns = self.refused + usage.refused, self.throttled_ns + usage.throttled_ns
        return Counts(min(refused, MOST_COUNTED), min(throttled_ns, MOST_COUNTED))


NOTHING: Final = Counts()


def with_region(earlier: Mapping[str, Counts], path: Path, cards: Collection[str]) -> dict[str, Counts]:
    """`earlier`, by card uuid, plus the counts of the region in `path`; nothing more if that is unreadable.

    Only of `cards`: a tenant could name other ones at each start.
    """
    try:
        reading = _reading(read_plain(path, _HEAD_BYTES), 0, cards)
    except (OSError, ValueError):
        reading = None
    run = {card.uuid: card for card in reading.cards} if reading is not None else {}
    sums = {uuid: earlier.get(uuid, NOTHING).plus(run.get(uuid)) for uuid in cards}
    return {uuid: counts for uuid, counts in sums.items() if counts != NOTHING}
