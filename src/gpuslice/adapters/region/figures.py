"""The driver's figures for the processes of one container, as in `native/include/region.h`.

The agent sees the host's processes and NVML's figure for each, which many drivers hide inside a container. It
writes them here, and the library replaces by them what it has charged by difference. The file is overwritten
in place, twice a second for each container, since replacing it would write to the disk each time. If the
checksum does not match, a write is in progress, and the reader tries again.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from .layout import UUID_BYTES, FigureEntry, FiguresHead
from .plain import open_in_place

MAGIC: Final = 0x4552554749460001
MOST: Final = 256
_WORDS: Final = 2**64 - 1
_OFFSET, _PRIME = 14695981039346656037, 1099511628211


class Figure(NamedTuple):
    """What one process holds of one card, as the driver reports it."""

    uuid: str
    pid: int
    """In the process's own PID namespace."""
    start_time: int
    """Clock ticks since boot."""
    memory_bytes: int


def format_figures(figures: Sequence[Figure], at_ns: int) -> bytes:
    """The file's content. `at_ns`: monotonic time before the driver was queried. At most 256 entries."""
    entries = [
        bytes(FigureEntry(_hash(uuid.encode()[: UUID_BYTES - 1]) or 1, pid, start_time, memory_bytes))
        for uuid, pid, start_time, memory_bytes in figures[:MOST]
    ]
    head = FiguresHead(MAGIC, 0, at_ns, len(entries))
    head.check = _hash(bytes(head)[FiguresHead.at_ns.offset :] + b"".join(entries))
    return bytes(head) + b"".join(entries)


def write_figures(path: Path, figures: Sequence[Figure], at_ns: int) -> None:
    """Raises OSError."""
    file = open_in_place(path)
    try:
        os.pwrite(file, format_figures(figures, at_ns), 0)
    finally:
        os.close(file)


def _hash(data: bytes) -> int:
    value = _OFFSET
    for byte in data:
        value = (value ^ byte) * _PRIME & _WORDS
    return value
