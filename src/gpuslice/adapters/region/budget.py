"""Budgets on one machine, without Kubernetes: a folder each, laid out like a container, and who runs in it.

    <base>/<name>/usr/lib/gpuslice      → the library's folder
    <base>/<name>/etc/gpuslice/limits
    <base>/<name>/var/lib/gpuslice/region
    <base>/<name>/members/<pid>         one line of JSON for each program that was started in it

A budget lives as long as one of its programs, or one that they started and that uses the card. Several people
may share the base folder: it is sticky, and a budget belongs to whoever made it.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from gpuslice.core.errors import GpusliceError

from .limits import CardLimit, read_limits, write_limits
from .living import of_the_living, start_time_of
from .reader import CardUsage, RegionError, prepare_region, read_region


class BudgetError(GpusliceError):
    """A budget cannot be given; the message says what would be right."""


@dataclass(frozen=True, slots=True)
class Member:
    """One program started in a budget."""

    pid: int
    start_time: int
    """Field 22 of /proc/<pid>/stat: a later process with the same pid is another."""
    user: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget and what is used of it. `usage` is None before the first program came to the driver."""

    name: str
    limit: CardLimit
    usage: CardUsage | None
    members: tuple[Member, ...]


class Budgets:
    """All budgets under a base folder. Methods that change something hold its lock."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def list(self) -> tuple[Budget, ...]:
        """Those in which something runs, by name."""
        if not self._base.is_dir():
            return ()
        found = (self._read(folder) for folder in sorted(self._base.iterdir()) if folder.is_dir())
        return tuple(budget for budget in found if budget is not None and _is_alive(budget))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else gives out budgets meanwhile. Folders in which nothing runs are removed first."""
        self._base.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # somebody else's: made so by them
            self._base.chmod(0o1777)
        lock = os.open(self._base / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with contextlib.suppress(PermissionError):
                os.fchmod(lock, 0o666)
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._sweep()
            yield
        finally:
            os.close(lock)

    def make(self, name: str, limit: CardLimit, library: Path) -> None:
        """A new budget. Call under the lock."""
        folder = self._base / name
        for part in ("usr/lib", "etc/gpuslice", "var/lib/gpuslice", "members"):
            (folder / part).mkdir(parents=True)
        (folder / "members").chmod(0o1777)
        (folder / "usr/lib/gpuslice").symlink_to(library.resolve().parent)
        write_limits(folder / "etc/gpuslice/limits", [limit])
        prepare_region(folder / "var/lib/gpuslice/region")

    def join(self, name: str, member: Member) -> Path:
        """Notes a program in a budget; returns the library it must preload. Call under the lock."""
        folder = self._base / name
        (folder / "members" / str(member.pid)).write_text(json.dumps(asdict(member)) + "\n")
        return folder / "usr/lib/gpuslice/libgpuslice.so"

    def _sweep(self) -> None:
        for folder in self._base.iterdir():
            budget = self._read(folder) if folder.is_dir() else None
            if folder.is_dir() and (budget is None or not _is_alive(budget)):
                shutil.rmtree(folder, ignore_errors=True)  # another user's goes when they come by

    def _read(self, folder: Path) -> Budget | None:
        try:
            limits = read_limits(folder / "etc/gpuslice/limits")
        except (ValueError, OSError):
            return None
        if not limits:
            return None
        return Budget(folder.name, limits[0], _usage(folder, limits[0]), _members(folder / "members"))


def _usage(folder: Path, limit: CardLimit) -> CardUsage | None:
    try:
        reading = read_region(folder / "var/lib/gpuslice/region")
    except (RegionError, OSError):
        return None
    cards = reading.cards if reading else ()
    return next((of_the_living(card) for card in cards if card.uuid == limit.uuid), None)


def _members(folder: Path) -> tuple[Member, ...]:
    members = []
    for path in sorted(folder.glob("[0-9]*")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            read = json.loads(path.read_text())
            members.append(Member(**(read | {"command": tuple(read["command"])})))
    return tuple(member for member in members if start_time_of(member.pid) == member.start_time)


def _is_alive(budget: Budget) -> bool:
    """Programs may start others and end: as long as one of those holds memory, the budget stays."""
    return bool(budget.members) or bool(budget.usage and budget.usage.processes)
