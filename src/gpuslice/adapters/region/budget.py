"""Budgets on one machine, without Kubernetes: a folder each, laid out like a container, and who runs in it.

    <base>/<name>/usr/lib/gpuslice      → the library's folder
    <base>/<name>/etc/gpuslice/limits
    <base>/<name>/var/lib/gpuslice/region
    <base>/<name>/members/<pid>-<start> one line of JSON for each program that was started in it

A budget lives as long as one of its programs, or one that they started. Several people may share the base
folder: it is sticky, and a budget's files belong to whoever made it. A folder that somebody else left behind
cannot be removed by us: then a new budget of that name stands beside it, as `<name>~2`.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpuslice.core.errors import GpusliceError, printable

from .limits import CardLimit, read_limits, write_limits
from .living import PROC, of_the_living, start_time_of
from .plain import read_plain
from .reader import CardUsage, RegionError, prepare_region, read_region

LIBRARY = "usr/lib/gpuslice/libgpuslice.so"
LARGEST_NOTE_BYTES = 4 << 20  # a command line may have 2 MiB


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
    """A budget and what is used of it."""

    name: str
    folder: Path
    limits: tuple[CardLimit, ...]
    usages: Mapping[str, CardUsage]
    """By card; a card is missing before the first program came to it."""
    members: tuple[Member, ...]


class Budgets:
    """All budgets under a base folder. Methods that change something are called under `locked()`."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def list(self) -> tuple[Budget, ...]:
        """Those in which something runs, by name."""
        if not self._base.is_dir():
            return ()
        found = (_read(folder) for folder in sorted(self._base.iterdir()) if folder.is_dir())
        return tuple(budget for budget in found if budget is not None and _is_alive(budget))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else gives out budgets meanwhile. Folders in which nothing runs are removed first.

        Raises BudgetError where budgets cannot be kept.
        """
        try:
            self._base.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(PermissionError):  # somebody else's: made so by them
                self._base.chmod(0o1777)
            lock = _open_lock(self._base / ".lock")
        except OSError as error:
            raise BudgetError(f"budgets cannot be kept under {self._base}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._sweep()
            yield
        finally:
            os.close(lock)

    def make(self, name: str, limits: Sequence[CardLimit], library: Path) -> Path:
        """A new budget's folder."""
        folder = self._free_folder(name)
        for part in ("usr/lib", "etc/gpuslice", "var/lib/gpuslice", "members"):
            (folder / part).mkdir(parents=True)
        for made in (folder, *folder.rglob("*")):
            made.chmod(0o755)  # whatever the umask: others may join, and look
        (folder / "members").chmod(0o1777)
        (folder / "usr/lib/gpuslice").symlink_to(library.resolve().parent)
        prepare_region(folder / "var/lib/gpuslice/region")
        write_limits(folder / "etc/gpuslice/limits", limits)
        return folder

    def join(self, folder: Path, member: Member) -> Path:
        """Notes a program in a budget; returns the library it must preload."""
        note = folder / "members" / f"{member.pid}-{member.start_time}"
        note.write_text(json.dumps(asdict(member)) + "\n")
        note.chmod(0o644)
        return folder / LIBRARY

    def _free_folder(self, name: str) -> Path:
        for number in range(1, 1000):
            folder = self._base / (name if number == 1 else f"{name}~{number}")
            if not folder.exists():
                return folder
        raise BudgetError(f'"{name}" was left behind too often under {self._base}: remove what nobody uses')

    def _sweep(self) -> None:
        for folder in self._base.iterdir():
            budget = _read(folder) if folder.is_dir() else None
            if folder.is_dir() and (budget is None or not _is_alive(budget)):
                shutil.rmtree(folder, ignore_errors=True)  # another user's goes when they come by


def _open_lock(path: Path) -> int:
    """First without O_CREAT: kernels may refuse that on another's file in a sticky folder."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(PermissionError):  # made by somebody else just now
            os.fchmod(lock, 0o644)
        return lock


def _read(folder: Path) -> Budget | None:
    try:
        limits = read_limits(folder / "etc/gpuslice/limits")
    except (ValueError, OSError):
        return None
    if not limits:
        return None
    name, members = folder.name.partition("~")[0], _members(folder / "members")
    return Budget(name, folder, limits, _usages(folder), members)


def _usages(folder: Path) -> dict[str, CardUsage]:
    try:
        reading = read_region(folder / "var/lib/gpuslice/region")
    except (RegionError, OSError):
        return {}
    return {card.uuid: of_the_living(card) for card in (reading.cards if reading else ())}


def _members(folder: Path) -> tuple[Member, ...]:
    members = []
    for path in sorted(folder.glob("[0-9]*")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            read = json.loads(read_plain(path, LARGEST_NOTE_BYTES))
            members.append(Member(**(read | {"command": tuple(map(printable, read["command"]))})))
    return tuple(member for member in members if start_time_of(member.pid) == member.start_time)


def _is_alive(budget: Budget) -> bool:
    """Programs may start others and end: the budget stays for these, also before they come to a card."""
    uses = any(usage.processes for usage in budget.usages.values())
    return bool(budget.members) or uses or _is_preloaded(budget.folder)


def _is_preloaded(folder: Path) -> bool:
    """Whether a process was started with this budget's library, as far as we may look into it."""
    library = str(folder / LIBRARY).encode()
    return any(library in _environment(process) for process in PROC.glob("[0-9]*"))


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # another user's, or gone
        return b""
