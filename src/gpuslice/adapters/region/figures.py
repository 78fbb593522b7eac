"""The driver's figures for the processes of one container, as `native/include/region.h` has them.

The agent sees the host's processes and NVML's figure for each, which many drivers hide inside a container. It
writes them here, and the library lets go of what it charged by mere difference. The file is written in place,
twice a second for each container, since a new one in its place would go to the disk each time: what does not
bear its check is a write that is under way, and is read again.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from .layout import UUID_BYTES, FigureEntry, FiguresHead

MAGIC: Final = 0x4552554749460001
MOST: Final = 256
_WORDS: Final = 2**64 - 1
_OFFSET, _PRIME = 14695981039346656037, 1099511628211


class Figure(NamedTuple):
    """What the driver says that one process holds of one card."""

    uuid: str
    pid: int
    """In the process's own PID namespace."""
    start_time: int
    """Clock ticks since boot."""
    memory_bytes: int


def format_figures(figures: Sequence[Figure], at_ns: int) -> bytes:
    """The file's bytes. `at_ns`: monotonic time, before the driver was asked. At most 256 go in."""
    entries = [
        bytes(FigureEntry(_hash(uuid.encode()[: UUID_BYTES - 1]) or 1, pid, start_time, memory_bytes))
        for uuid, pid, start_time, memory_bytes in figures[:MOST]
    ]
    head = FiguresHead(MAGIC, 0, at_ns, len(entries))
    head.check = _hash(bytes(head)[FiguresHead.at_ns.offset :] + b"".join(entries))
    return bytes(head) + b"".join(entries)


def write_figures(path: Path, figures: Sequence[Figure], at_ns: int) -> None:
    """Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        os.fchmod(file, 0o644)
        os.pwrite(file, format_figures(figures, at_ns), 0)
    finally:
        os.close(file)


def _hash(data: bytes) -> int:
    value = _OFFSET
    for byte in data:
        value = (value ^ byte) * _PRIME & _WORDS
    return value
