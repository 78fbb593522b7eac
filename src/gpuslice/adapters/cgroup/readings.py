"""What a container's cgroup of version 2 tells: its processes, how long they ran, what memory is left."""

from __future__ import annotations

import contextlib
from pathlib import Path


def pids_in(cgroup: Path) -> list[int]:
    """Its processes, and those of cgroups below it."""
    found: list[int] = []
    for file in (cgroup / "cgroup.procs", *cgroup.glob("*/**/cgroup.procs")):
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return sorted(set(found))


def ran_us(cgroup: Path) -> int:
    """How long its processes ran; -1 if that is not told."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((cgroup / "cpu.stat").read_text().split()[1])
    return -1


def headroom_bytes(cgroup: Path, root: Path) -> int | None:
    """Until the kernel would end something in `cgroup` or above it; None where nothing limits it.

    As kubelet counts: pages of files that nobody used lately give way first. Raises OSError, ValueError.
    """
    least = None
    for place in (cgroup, *cgroup.parents):
        if root not in place.parents:
            break
        limit = (place / "memory.max").read_text().strip()
        if limit != "max":
            left = int(limit) - int((place / "memory.current").read_text()) + _inactive_bytes(place)
            least = left if least is None else min(least, left)
    return least


def _inactive_bytes(cgroup: Path) -> int:
    with contextlib.suppress(OSError):
        rows = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return next((int(row[1]) for row in rows if row[0] == "inactive_file"), 0)
    return 0


def machine_memory_bytes(proc: Path) -> tuple[int, int]:
    """Of the machine: what is available without paging, and all of it. Raises OSError."""
    rows = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    amounts = {row[0]: int(row[1]) * 1024 for row in rows if row[1:]}
    return amounts.get("MemAvailable:", 0), amounts.get("MemTotal:", 0)
