"""Hears a parked container: a thread that now sleeps in the driver, and did not before it was parked.

The driver has threads of its own, which always sleep there. Where they do is learned while the container is
idle, before it is locked, at two moments: a program's own call is over by then, or sleeps elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from pathlib import Path

from gpuslice.adapters.cgroup.readings import ran_us
from gpuslice.adapters.gpu.blocked_calls import BlockedCalls, Sleeper

DRIVERS_OWN = "cuda"
"""How the driver names its threads: cuda-EvtHandlr, cuda00001400006."""


class Bell:
    """Of the processes of one container."""

    def __init__(self, pids: Collection[int], cgroup: Path, proc: Path = Path("/proc")) -> None:
        self._calls = {pid: BlockedCalls(pid, proc) for pid in pids}
        self._cgroup = cgroup
        self._proc = proc
        self._usual: dict[int, frozenset[Sleeper]] = dict.fromkeys(pids, frozenset())
        self._ran_us = -1

    async def set(self, apart_s: float) -> None:
        """Learn what is usual."""
        first = {pid: calls.in_driver() for pid, calls in self._calls.items()}
        await asyncio.sleep(apart_s)
        self._usual = {pid: first[pid] & calls.in_driver() for pid, calls in self._calls.items()}

    def set_again(self) -> None:
        """Of a container that is parked: whoever waits in it rings."""
        for pid, calls in self._calls.items():
            self._usual[pid] = frozenset(
                each for each in calls.in_driver() if self._name(pid, each.thread).startswith(DRIVERS_OWN)
            )

    def rings(self) -> bool:
        """Whether somebody waits. Nobody can have begun to while nothing ran."""
        ran = ran_us(self._cgroup)
        if ran >= 0 and ran == self._ran_us:
            return False
        self._ran_us = ran
        return any(calls.in_driver() - self._usual[pid] for pid, calls in self._calls.items())

    def close(self) -> None:
        for calls in self._calls.values():
            calls.close()

    def _name(self, pid: int, thread: int) -> str:
        with contextlib.suppress(OSError):
            return (self._proc / str(pid) / "task" / str(thread) / "comm").read_text()
        return ""
