"""Whose a process is: pid → cgroup → container, remembered while the process lives."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuslice.adapters.cgroup.container import ContainerRef, parse_cgroup
from gpuslice.apps.exporter.node_pods import NodePods
from gpuslice.core.attribution import Owner, Stranger

CHECK_EVERY = 20
"""How many samples until a pid's start time is checked again: pids are reused, but not immediately."""
YOUNG = 3
"""How often the cgroup of a process of nobody is read at first: it may be on its way into its container."""
NO_HOST_PID = "the host's processes are not visible: set hostPID: true on the exporter's pod"


def hidden_processes(proc: str, environ: Mapping[str, str] = os.environ) -> str:
    """Why no process can be attributed to a container, or "" if the host's processes are visible.

    With hostPID, process 1 is the host's and in another cgroup than we are.
    """
    if proc != "/proc" or "KUBERNETES_SERVICE_HOST" not in environ:
        return ""
    try:
        first, own = Path("/proc/1/cgroup").read_bytes(), Path("/proc/self/cgroup").read_bytes()
    except OSError as error:
        return f"{NO_HOST_PID} ({error})"
    return NO_HOST_PID if first == own else ""


@dataclass(slots=True)
class _Process:
    started: str
    ref: ContainerRef | None
    times_read: int = 1


class Owners:
    """Looks processes up below `proc`."""

    def __init__(self, pods: NodePods, proc: Path) -> None:
        self._pods = pods
        self._proc = str(proc)
        self._processes: dict[int, _Process] = {}
        self._resolved: dict[int, Owner] = {}
        self._version = -1
        self._turn = 0

    def of(self, pids: Iterable[int], holders: Mapping[str, tuple[str, ...]]) -> dict[int, Owner]:
        """The owner of each process that exists; others are left out. Forgets all other processes.

        `holders`: ``namespace/pod`` → its containers with an allocation.
        """
        wanted = set(pids)
        self._turn += 1
        self._processes = {pid: process for pid, process in self._processes.items() if pid in wanted}
        self._resolved = {pid: owner for pid, owner in self._resolved.items() if pid in wanted}
        if self._version != self._pods.version:
            self._version, self._resolved = self._pods.version, {}
        for pid in wanted:
            process = self._processes.get(pid)
            of_nobody = isinstance(self._resolved.get(pid, Stranger.UNKNOWN_CONTAINER), Stranger)
            due = (pid + self._turn) % CHECK_EVERY == 0
            if process is None or due or (of_nobody and process.times_read < YOUNG):
                self._resolved.pop(pid, None)
                try:
                    process = self._read(pid, again=of_nobody)
                except (FileNotFoundError, ProcessLookupError):
                    self._processes.pop(pid, None)
                    continue
            elif not of_nobody:
                continue
            if process.ref is None:
                self._resolved[pid] = Stranger.HOST
            else:  # its pod may become known later
                owner = self._pods.owner(process.ref, holders)
                self._resolved[pid] = owner or Stranger.UNKNOWN_CONTAINER
        return dict(self._resolved)

    def program(self, pid: int) -> str:
        """The program's name; "" if it is gone."""
        try:
            with open(f"{self._proc}/{pid}/comm", encoding="utf-8", errors="replace") as file:
                return file.read().strip()
        except OSError:
            return ""

    def _read(self, pid: int, *, again: bool) -> _Process:
        """Its start time and, if it is new, its cgroup. Raises if it has ended."""
        with open(f"{self._proc}/{pid}/stat", "rb") as file:
            # the second field is a file name in parentheses and may hold anything; the 22nd is the start
            started = file.read().rpartition(b")")[2].split()[19].decode()
        known = self._processes.get(pid)
        same = known is not None and known.started == started
        if known is None or not same or again:
            times_read = known.times_read + 1 if known is not None and same else 1
            with open(f"{self._proc}/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
                known = _Process(started, parse_cgroup(file.read()), times_read)
            self._processes[pid] = known
        return known
