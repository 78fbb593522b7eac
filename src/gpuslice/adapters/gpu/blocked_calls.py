"""Which threads of a process sleep inside the CUDA driver: how a parked process is heard.

Every call of a locked process sleeps in libcuda until it is unlocked. The kernel shows where a thread sleeps
(``/proc/<pid>/task/<tid>/syscall``: stack and instruction pointer), and the first return address on its
stack outside the C library tells who called. So all calls are heard, copies too, whether or not a library of
ours is in the process. Reading another user's stack takes CAP_SYS_PTRACE.
"""

from __future__ import annotations

import contextlib
import os
import re
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

DRIVER = re.compile(r"libcuda\.so\.\d")
_BELOW = re.compile(r"(ld-linux|ld-musl|libc[-.]|libpthread|\[vdso\]|libgpuslice)")
"""Between a caller and the kernel."""
_STACK_BYTES = 4096
_WORD = 8


class Sleeper(NamedTuple):
    """A thread where it sleeps; the same one in a later call sleeps elsewhere."""

    thread: int
    stack_pointer: int


class BlockedCalls:
    """Of one process. What was found of a thread is known while it sleeps at the same place."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._folder = proc / str(pid)
        self._starts: list[int] = []
        self._code: list[tuple[int, str]] = []  # end and file of each mapping with code, by its start
        self._known: Mapping[str, bool] = {}  # by what the kernel says of a thread
        self._memory = -1

    def in_driver(self) -> frozenset[Sleeper]:
        """The threads that sleep there now. A process that has ended has none."""
        found, known = set(), {}
        try:
            threads = os.listdir(self._folder / "task")
        except OSError:
            return frozenset()
        for thread in threads:
            try:
                said = (self._folder / "task" / thread / "syscall").read_text()
            except OSError:
                continue
            words = said.split()
            if len(words) < 3:  # it runs
                continue
            key = f"{thread} {said}"
            known[key] = self._known.get(key, False) or self._is_driver(
                int(words[-2], 16), int(words[-1], 16)
            )
            if known[key]:
                found.add(Sleeper(int(thread), int(words[-2], 16)))
        self._known = known
        return frozenset(found)

    def close(self) -> None:
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def _is_driver(self, stack_pointer: int, instruction: int) -> bool:
        """Whether the function that sleeps was called by the driver."""
        if not self._code or not self._file(instruction):
            self._read_code()
        for address in (instruction, *self._words(stack_pointer)):
            file = self._file(address)
            if file and not _BELOW.search(file):
                return bool(DRIVER.search(file))
        return False

    def _words(self, stack_pointer: int) -> list[int]:
        with contextlib.suppress(OSError):
            if self._memory < 0:
                self._memory = os.open(self._folder / "mem", os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._memory, _STACK_BYTES, stack_pointer)
            return [int.from_bytes(data[at : at + _WORD], "little") for at in range(0, len(data), _WORD)]
        return []

    def _file(self, address: int) -> str:
        """Whose code is there; "" for none."""
        place = bisect_right(self._starts, address) - 1
        return self._code[place][1] if place >= 0 and address < self._code[place][0] else ""

    def _read_code(self) -> None:
        with contextlib.suppress(OSError):
            rows = [line.split(maxsplit=5) for line in (self._folder / "maps").read_text().splitlines()]
            code = [row for row in rows if len(row) == 6 and "x" in row[1]]
            bounds = [tuple(int(each, 16) for each in row[0].split("-")) for row in code]
            self._starts = [start for start, _ in bounds]
            names = [os.path.basename(row[5]) for row in code]
            self._code = [(end, name) for (_, end), name in zip(bounds, names, strict=True)]
