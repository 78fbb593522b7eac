"""Budgets on one machine, without Kubernetes: a folder each, as in a container, and its programs.

    <base>-<uid>/<name>/usr/lib/gpuslice      → the library's folder
    <base>-<uid>/<name>/etc/gpuslice/limits
    <base>-<uid>/<name>/var/lib/gpuslice/region
    <base>-<uid>/<name>/members/<pid>-<start> one line of JSON for each program that was started in it

A budget exists while one of its programs runs, or one that these have started. Each user has a folder of
their own with a predictable name: in a shared one, its owner could replace anybody's library. The folder
above belongs to root and is sticky, like /tmp. What others put into theirs is read without trusting it, and
existing files are never overwritten.

Two users who give out budgets at the same time exclude each other by a lock, which anybody may hold for ever.
So what they do is correct without it: a budget is created under a hidden name and appears complete, with its
first program; whoever has created one checks again and removes it if it is too much (`apps/cli/run`).
"""

import contextlib
import glob
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from gpuslice.core.errors import GpusliceError, printable

from .limits import LimitsEntry, read_limits, write_limits
from .living import PROC, of_the_living, start_time_of
from .lock import locked
from .plain import read_plain
from .reader import CardUsage, RegionError, prepare_region, read_region

LIBRARY = "usr/lib/gpuslice/libgpuslice.so"
LARGEST_NOTE_BYTES = 4 << 20  # a command line may have 2 MiB


class BudgetError(GpusliceError):
    """A budget cannot be given; the message says what would be possible."""


@dataclass(frozen=True, slots=True)
class Member:
    """One program started in a budget."""

    pid: int
    start_time: int
    """Field 22 of /proc/<pid>/stat: distinguishes it from a later process with the same pid."""
    user: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget and what is used of it."""

    name: str
    folder: Path
    limits: tuple[LimitsEntry, ...]
    usages: Mapping[str, CardUsage]
    """By card; a card is missing until the first program has used it."""
    members: tuple[Member, ...]


class Budgets:
    """All budgets under a base folder. Methods that change something are called under `locked()`."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._own = base.with_name(f"{base.name}-{os.getuid()}")

    def list(self) -> tuple[Budget, ...]:
        """Budgets in which something runs, by name."""
        alive = []
        for users in self._base.parent.glob(f"{glob.escape(self._base.name)}-*"):
            uid = users.name.removeprefix(f"{self._base.name}-")
            if not uid.isdecimal() or not _is_folder_of(users, int(uid)):
                continue  # it has another user's name
            found = (_read(folder) for folder in _folders(users) if folder.name[:1] != ".")
            alive += [budget for budget in found if budget is not None and _is_alive(budget)]
        return tuple(sorted(alive, key=lambda budget: (budget.name, budget.folder)))

    @contextlib.contextmanager
    def locked(self) -> Iterator[str]:
        """Excludes others from giving out budgets; yields why it does not, usually "".

        Folders in which nothing runs are removed first. Raises BudgetError if budgets cannot be kept, also
        for failures of `make`, `join` and `leave` inside.
        """
        try:
            # our own folder, which others may read and only we may change
            with contextlib.suppress(FileExistsError):
                self._own.mkdir(parents=True)
            if not _is_folder_of(self._own, os.getuid()):
                whose = f"user id {self._own.lstat().st_uid}"
                raise BudgetError(
                    f"budgets cannot be kept under {self._own}: {whose} put something there that is "
                    "no folder of yours; have it removed, or all of you name another --base"
                )
            self._own.chmod(0o755)
            with locked(self._base.with_name(f"{self._base.name}.lock")) as why_not:
                # other users' folders are removed when they come by
                for folder in _folders(self._own) if not why_not else ():
                    if not _is_needed(folder):
                        shutil.rmtree(folder, ignore_errors=True)
                yield why_not
        except OSError as error:
            raise BudgetError(f"budgets cannot be kept under {self._own}: {error.strerror}") from error

    def make(self, name: str, limits: Sequence[LimitsEntry], library: Path, member: Member) -> Path:
        """Create a budget's folder with its first program in it.

        Its hidden name cannot be guessed or created by others: its owner decides what is loaded into
        programs.
        """
        folder = self._own / f".{member.pid}-{member.start_time}-{secrets.token_hex(8)}"
        folder.mkdir()
        for part in ("usr/lib", "etc/gpuslice", "var/lib/gpuslice", "members"):
            (folder / part).mkdir(parents=True)
        for made in (folder, *folder.rglob("*")):
            made.chmod(0o755)  # whatever the umask: others may join and read
        (folder / "members").chmod(0o1777)
        (folder / "usr/lib/gpuslice").symlink_to(library.resolve().parent)
        prepare_region(folder / "var/lib/gpuslice/region")
        write_limits(folder / "etc/gpuslice/limits", limits)
        self.join(folder, member)
        # a folder under its true name, or with a number if something is left there
        for number in range(1, 1000):
            target = self._own / (name if number == 1 else f"{name}~{number}")
            with contextlib.suppress(OSError):
                return folder.rename(target)
        shutil.rmtree(folder, ignore_errors=True)
        raise BudgetError(f'"{name}" was left behind too often under {self._own}: remove what nobody uses')

    def join(self, folder: Path, member: Member) -> None:
        """Records a program in a budget, unless the budget is gone.

        Raises BudgetError if that is not allowed, or if something exists in the place of the record: a link
        made by the budget's owner would make us overwrite a file of our own.
        """
        note = _note(folder, member)
        try:
            file = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with os.fdopen(file, "w") as out:
                os.fchmod(file, 0o644)
                out.write(json.dumps(asdict(member)) + "\n")
        except FileNotFoundError:
            return
        except OSError as error:
            raise BudgetError(f"{folder} cannot be joined: {error.strerror}") from error

    def leave(self, folder: Path, member: Member) -> None:
        """The program does not run in it after all."""
        _note(folder, member).unlink(missing_ok=True)
        if not any(_note_files(folder)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_folder_of(path: Path, uid: int) -> bool:
    """Neither a link nor another user's."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid


def _folders(users: Path) -> list[Path]:
    """Without those of users who allow no access."""
    try:
        return [each for each in users.iterdir() if each.is_dir()]
    except OSError:
        return []


def _is_needed(folder: Path) -> bool:
    if folder.name.startswith("."):
        pid, start_time, *_ = (*folder.name.removeprefix(".").split("-"), "")
        return pid.isdecimal() and str(start_time_of(int(pid))) == start_time
    budget = _read(folder)
    return budget is not None and _is_alive(budget)


def _note(folder: Path, member: Member) -> Path:
    return folder / "members" / f"{member.pid}-{member.start_time}"


def _note_files(folder: Path) -> Iterator[Path]:
    return (folder / "members").glob("[0-9]*")


def _read(folder: Path) -> Budget | None:
    try:
        limits = read_limits(folder / "etc/gpuslice/limits")
    except (ValueError, OSError):
        return None
    if not limits:
        return None
    members = []
    for note in sorted(_note_files(folder)):
        try:
            member = msgspec.convert(json.loads(read_plain(note, LARGEST_NOTE_BYTES)), Member)
        except (OSError, ValueError, RecursionError):
            continue  # anybody may put something else there
        if start_time_of(member.pid) == member.start_time:
            command = tuple(map(printable, member.command))
            members.append(replace(member, user=printable(member.user), command=command))
    try:
        reading = read_region(folder / "var/lib/gpuslice/region")
    except (RegionError, OSError):
        reading = None
    usages = {card.uuid: of_the_living(card) for card in (reading.cards if reading else ())}
    return Budget(printable(folder.name.partition("~")[0]), folder, limits, usages, tuple(members))


def _is_alive(budget: Budget) -> bool:
    """Programs may start others and end: the budget stays for those, even before they use a card."""
    if budget.members or any(usage.processes for usage in budget.usages.values()):
        return True
    library = str(budget.folder / LIBRARY).encode()
    for process in PROC.glob("[0-9]*"):  # one that was started with this budget's library
        with contextlib.suppress(OSError):  # another user's, or gone
            if library in (process / "environ").read_bytes():
                return True
    return False
