"""Whose a process is: pid → cgroup → container, remembered for as long as the process lives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuslice.adapters.cgroup.container import ContainerRef, parse_cgroup
from gpuslice.apps.exporter.directory import Directory
from gpuslice.core.attribution import Owner, Stranger

CHECK_EVERY = 20
"""A pid is held against its start time once in so many samples: pids are used again, but not at once."""
YOUNG = 3
"""So often the cgroup of a process of nobody is read at once: it may be on its way into its container."""


@dataclass(slots=True)
class _Known:
    started: str
    ref: ContainerRef | None
    looks: int = 1


class Owners:
    """Looks processes up below `proc`."""

    def __init__(self, directory: Directory, proc: Path) -> None:
        self._directory = directory
        self._proc = str(proc)
        self._known: dict[int, _Known] = {}
        self._resolved: dict[int, Owner] = {}
        self._version = -1
        self._turn = 0

    def of(self, pids: Iterable[int], assignment: Mapping[str, tuple[str, ...]]) -> dict[int, Owner]:
        """The owner of each process that exists; one that does not is left out. Forgets all others."""
        wanted = set(pids)
        self._turn += 1
        self._known = {pid: known for pid, known in self._known.items() if pid in wanted}
        self._resolved = {pid: owner for pid, owner in self._resolved.items() if pid in wanted}
        if self._version != self._directory.version:
            self._version, self._resolved = self._directory.version, {}
        for pid in wanted:
            known, resolved = self._known.get(pid), self._resolved.get(pid, Stranger.UNKNOWN_CONTAINER)
            of_nobody = isinstance(resolved, Stranger)
            due = (pid + self._turn) % CHECK_EVERY == 0
            if known is None or due or (of_nobody and known.looks < YOUNG):
                self._look(pid, assignment, anew=of_nobody)
            elif of_nobody:  # its pod may have become known
                self._resolved[pid] = self._owner(known.ref, assignment)
        return dict(self._resolved)

    def program(self, pid: int) -> str:
        """What the process calls itself; "" when it is gone."""
        try:
            with open(f"{self._proc}/{pid}/comm", encoding="utf-8", errors="replace") as file:
                return file.read().strip()
        except OSError:
            return ""

    def _look(self, pid: int, assignment: Mapping[str, tuple[str, ...]], *, anew: bool) -> None:
        self._resolved.pop(pid, None)
        try:
            known = self._read(pid, anew=anew)
        except (FileNotFoundError, ProcessLookupError):
            self._known.pop(pid, None)
            return
        self._resolved[pid] = self._owner(known.ref, assignment)

    def _read(self, pid: int, *, anew: bool) -> _Known:
        with open(f"{self._proc}/{pid}/stat", "rb") as file:
            # the second field is a file name in parentheses and may hold anything; the 22nd is the start
            started = file.read().rpartition(b")")[2].split()[19].decode()
        known = self._known.get(pid)
        same = known is not None and known.started == started
        if known is None or not same or anew:
            looks = known.looks + 1 if known is not None and same else 1
            with open(f"{self._proc}/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
                known = _Known(started, parse_cgroup(file.read()), looks)
            self._known[pid] = known
        return known

    def _owner(self, ref: ContainerRef | None, assignment: Mapping[str, tuple[str, ...]]) -> Owner:
        if ref is None:
            return Stranger.HOST
        return self._directory.owner(ref, assignment) or Stranger.UNKNOWN_CONTAINER
