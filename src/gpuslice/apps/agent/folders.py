"""The folder that each container gets on the host: its limits, and the memory region of its processes.

kubelet fixes a container's mounts at Allocate, before the container is known, and reuses them at every
restart. So a folder is named after the set of device ids, and its content is written at each start. If a
container that kubelet has forgotten is still using it, the next one with those ids gets a folder with a
number appended (``-2`` …); the highest is the one that Allocate named last::

    <root>/lib/<version>/libgpuslice.so  the library, mounted read-only
    <root>/containers/<token>/ld.so.preload  one line that names it, mounted over /etc/ld.so.preload and Nix's
    <root>/containers/<token>/etc/       limits, and the driver's figures for its processes; mounted read-only
    <root>/containers/<token>/var/       region, empty at first: the only place where its processes write
    <root>/containers/<token>/owner.json whose it is, for the sweep and for the region's readers
    <root>/containers/<token>/library    the version of the library that it was granted
    <root>/cards/<uuid>/<token>/claim    where it tells its neighbours on a card what it uses, if compute is
                                         divided; all of <uuid>/ is mounted read-only next to it
    <root>/trash/                        what is to be removed, a little at a time

A claim of dynamic resource allocation is known when it is prepared: its folder is ``claim-<uid>.<request>``.

Only root can enter ``containers`` and ``cards``: no user of the host reaches what a tenant creates there.
Only the library and ``cards`` are seen by more than one container (`shared_files`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import secrets
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpuslice.adapters.region import limits as limits_file
from gpuslice.adapters.region.reader import Counts, prepare_region, with_region
from gpuslice.apps.agent.forgotten import RunningContainer
from gpuslice.apps.agent.library import LIBRARY, Library, replace_file
from gpuslice.apps.agent.region_file_system import RegionFileSystem
from gpuslice.apps.agent.removal import remove_tree
from gpuslice.apps.agent.shared_files import SharedFiles
from gpuslice.core import container_files as inside
from gpuslice.core.contract import card_of_device_id
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.grant import CardLimit
from gpuslice.core.mode import ComputePolicy, Rules
from gpuslice.core.units import MIB

CLAIM_PREFIX = "claim-"
PRELOAD = "ld.so.preload"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Owner(msgspec.Struct, frozen=True):
    """Whose folder it is. All but `ids` are "" while unknown. `boot`: the run of the machine.

    `earlier`: by card, what the same container counted before it was restarted.
    """

    ids: list[str]
    uid: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    boot: str = ""
    earlier: dict[str, Counts] = {}

    def is_of(self, other: Owner) -> bool:
        """Whether both are the same container of the same pod, as far as is known."""
        return bool(self.uid) and (self.uid, self.container) == (other.uid, other.container)


@dataclass(frozen=True, slots=True)
class HostMount:
    """A path of the host as a container sees it."""

    container_path: str
    host_path: str
    read_only: bool


def token(ids: Iterable[str]) -> str:
    """The folder name of a set of device ids; the same for any order."""
    return hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()[:32]


class Folders:
    """The agent's part of the host's file system, below `root`; mounts name it as `host_root`."""

    def __init__(
        self,
        root: Path,
        host_root: Path | None = None,
        boot: str | None = None,
        *,
        bound_regions: bool = False,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._root = root
        self._host_root = host_root or root
        self.boot = boot_id() if boot is None else boot
        self._now_ns = now_ns
        # the second is needed where an operator made `containers` a file system of its own
        self._trash = (root / "trash", root / "containers" / ".trash")
        self.library = Library(root)
        self.regions = RegionFileSystem(root, wanted=bound_regions)
        self.shared = SharedFiles(root)

    def check(self) -> None:
        """Check that everything that enforces limits is in place.

        Raises `IsolationMissingError` or `RegionFileSystemError` with what is missing, OSError for a failing
        disk.
        """
        self.library.check()
        self.regions.check()

    # -- one container --------------------------------------------------------------------------------

    def mounts(self, name: str, cards: Iterable[str] = ()) -> tuple[HostMount, ...]:
        """What a container with the folder `name` is given. `cards`: where it communicates with others."""
        folder = self._host_root / "containers" / name
        mounts = [
            *(HostMount(path, str(folder / PRELOAD), read_only=True) for path in inside.PRELOAD_FILES),
            HostMount(inside.LIBRARY_FOLDER, str(self._host_root / self.library.folder), read_only=True),
            HostMount(inside.LIMITS_FOLDER, str(folder / "etc"), read_only=True),
            HostMount(inside.REGION_FOLDER, str(folder / "var"), read_only=False),
        ]
        for uuid in sorted(cards):
            card, meeting = self._host_root / "cards" / uuid, f"{inside.NEIGHBOURS_FOLDER}/{uuid}"
            mounts.append(HostMount(f"{meeting}/own/claim", str(card / name / "claim"), read_only=False))
            mounts.append(HostMount(f"{meeting}/all", str(card), read_only=True))
        return tuple(mounts)

    def current(self, ids: Iterable[str]) -> str:
        """The name of the folder that the last Allocate of these ids mounted, or that the next one will."""
        first = token(ids)
        numbers = (_number(found.name) for found in (self._root / "containers").glob(f"{first}*"))
        last = max(numbers, default=1)
        return first if last == 1 else f"{first}-{last}"

    def prepare(self, ids: Iterable[str], occupied: Container[str] = ()) -> str:
        """Create the folder that Allocate mounts; returns its name. What an older container left stays.

        Folders in `occupied` are not touched: a container lives there.
        """
        ids = sorted(ids)
        name = self.current(ids)
        if name in occupied:
            name = f"{token(ids)}-{_number(name) + 1}"
        self._make(name, Owner(ids))
        return name

    def _make(self, name: str, owner: Owner) -> None:
        folder = self._folder(name)
        (folder / "etc").mkdir(parents=True, exist_ok=True)
        folder.parent.chmod(0o700)
        if not (folder / "var").exists():
            self._make_region_folder(folder)
        if not (folder / PRELOAD).exists():
            line = f"{inside.LIBRARY_FOLDER}/{LIBRARY}\n"
            replace_file(folder / PRELOAD, line.encode(), 0o644)
        if not (folder / "owner.json").exists():
            self._own(folder, owner)

    def grant(
        self, ids: Iterable[str], occupied: Container[str] = (), *, limits_compute: bool = False
    ) -> tuple[HostMount, ...]:
        """What Allocate answers: the mounts of a prepared folder, whose library is recorded."""
        self.library.check()
        ids = sorted(ids)
        name = self.prepare(ids, occupied)
        cards = {card_of_device_id(each) for each in ids} if limits_compute else set()
        return self._granted(name, cards)

    def _granted(self, name: str, cards: Collection[str]) -> tuple[HostMount, ...]:
        """The mounts of a folder, whose library is recorded. `cards`: where it communicates with others."""
        replace_file(self._folder(name) / "library", self.library.version.encode(), 0o644)
        for uuid in cards:
            self._make_claim(uuid, name)
        return self.mounts(name, cards)

    def _make_claim(self, uuid: str, name: str) -> None:
        """A file: a folder is not mounted, so that a tenant can create nothing next to it."""
        meeting = self._root / "cards" / uuid
        meeting.mkdir(parents=True, exist_ok=True)
        meeting.parent.chmod(0o700)
        self.regions.bound(meeting)
        (meeting / name).mkdir(exist_ok=True)
        self.shared.make_claim(meeting / name / "claim")

    def start(
        self,
        ids: Iterable[str],
        limits: Iterable[CardLimit],
        owner: Owner,
        *,
        limited: bool,
        policy: ComputePolicy = ComputePolicy.CAP,
        interactive: bool = False,
        occupied: Container[str] = (),
    ) -> None:
        """Prepare for a container's first instruction: its limits, and a region that nobody has written in.

        Raises `LimitsError` for limits that the library would not accept. `limited` false: the file says that
        there is no limit, for an exempt container. `occupied` as for `prepare`.
        """
        name = self.prepare(ids, occupied)
        self._start(
            name,
            owner,
            [
                _of_library(limit, policy, interactive)
                if limited
                else limits_file.LimitsEntry(limit.card.uuid, None)
                for limit in limits
            ],
        )

    def _start(self, name: str, owner: Owner, limits: Sequence[limits_file.LimitsEntry]) -> None:
        folder = self._folder(name)
        before = _read_owner(folder)
        earlier: dict[str, Counts] = {}
        if before.is_of(owner):
            cards = [limit.uuid for limit in limits]
            earlier = with_region(before.earlier, folder / "var" / "region", cards)
        self.regions.unmount(folder / "var")
        self._move_to_trash(folder / "var")
        self._make_region_folder(folder)
        self._own(folder, msgspec.structs.replace(owner, boot=self.boot, earlier=earlier))
        for limit in limits:
            if (self._root / "cards" / limit.uuid).is_dir():  # where a share was ever limited
                self._make_claim(limit.uuid, name)
        limits_file.write_limits(folder / "etc" / "limits", limits)
        self.shared.new(folder / "etc" / "limits")

    # -- claims of dynamic resource allocation ----------------------------------------------------------

    def start_claim(
        self, name: str, limits: Sequence[CardLimit], owner: Owner, rules: Rules
    ) -> tuple[HostMount, ...]:
        """Prepare the whole folder `name` as for a first start; returns its mounts.

        Raises `IsolationMissingError`, `LimitsError` and OSError.
        """
        self.library.check()
        self._make(name, owner)
        self._start(name, owner, [_of_library(limit, rules.compute_policy, False) for limit in limits])
        return self._granted(name, {limit.card.uuid for limit in limits} if rules.limits_compute else ())

    def claim_limits(self) -> dict[tuple[str, str], dict[str, int | None]]:
        """By pod uid and container, bytes by card uuid: the limits of containers with claims of their own."""
        found = {}
        for name in self.of_claims():
            owner = self.owner(name)
            with contextlib.suppress(limits_file.LimitsError, OSError):  # it is not complete yet
                limits = limits_file.read_limits(self._folder(name) / "etc" / "limits") or ()
                if owner.uid:
                    found[owner.uid, owner.container] = {each.uuid: each.memory_bytes for each in limits}
        return found

    def of_claims(self) -> list[str]:
        """The names of claims' folders."""
        return sorted(found.name for found in (self._root / "containers").glob(f"{CLAIM_PREFIX}*"))

    def of_containers(self) -> dict[tuple[str, str], Path]:
        """By pod uid and container name, the folder of each known container."""
        owners = [(name, owner) for name, owner, _ in self.owners()]
        owners += [(name, self.owner(name)) for name in self.of_claims()]
        return {(owner.uid, owner.container): self._folder(name) for name, owner in owners if owner.uid}

    # -- sweeping -------------------------------------------------------------------------------------

    def owners(self) -> Iterator[tuple[str, Owner, float]]:
        """(token, owner, age in seconds) of every folder that is not a claim's.

        An unreadable owner is nobody.
        """
        containers = self._root / "containers"
        with contextlib.suppress(FileNotFoundError):
            for folder in sorted(containers.iterdir()):
                if folder not in self._trash and not folder.name.startswith(CLAIM_PREFIX):
                    with contextlib.suppress(FileNotFoundError):  # swept meanwhile
                        age_s = (self._now_ns() - folder.stat().st_mtime_ns) / 1e9
                        yield folder.name, _read_owner(folder), age_s

    def counts(self) -> Iterator[tuple[str, Owner, dict[str, Counts]]]:
        """For each folder, what its container has counted over all restarts, by card; for display only."""
        for name, owner, _ in self.owners():
            cards = {card_of_device_id(each) for each in owner.ids}
            yield name, owner, with_region(owner.earlier, self._folder(name) / "var" / "region", cards)

    def owner(self, name: str) -> Owner:
        """The owner of the folder `name`; nobody if it cannot be read."""
        return _read_owner(self._folder(name))

    def unidentified(self, owner: Owner) -> bool:
        """Whether its container was started in this run of the machine without being identified."""
        return bool(owner.boot) and owner.boot == self.boot and not owner.uid

    def identify(self, name: str, before: Owner, owner: Owner) -> None:
        """Record whose container lives in the folder, which was `before`'s. Raises OSError."""
        found = msgspec.structs.replace(owner, boot=before.boot, earlier=before.earlier)
        self._own(self._folder(name), found)

    def running(self) -> Iterator[RunningContainer]:
        """The folders of containers that were started in this run of the machine, so may be running.

        None of them if the disk cannot be read.
        """
        with contextlib.suppress(OSError):
            for name, owner, _ in self.owners():
                if owner.pod and owner.boot in ("", self.boot):
                    ids = frozenset(owner.ids)
                    assignment = DeviceAssignment(owner.namespace, owner.pod, owner.container, ids)
                    yield RunningContainer(name, owner.uid, assignment)

    def granted(self) -> Iterator[list[str]]:
        """The ids of every folder; none of them if the disk cannot be read."""
        with contextlib.suppress(OSError):
            yield from (owner.ids for _, owner, _ in self.owners())

    def exists(self, ids: Iterable[str]) -> bool:
        """Whether a container with these ids was granted a folder."""
        return self._folder(self.current(ids)).is_dir()

    def discard(self, name: str) -> None:
        """Move the folder away at once, whatever is in it; it is removed gradually. Raises OSError."""
        self.regions.unmount(self._folder(name) / "var")
        self._move_to_trash(self._folder(name))
        for own in (self._root / "cards").glob(f"*/{name}"):
            (own / "claim").unlink(missing_ok=True)
            own.rmdir()

    def empty_trash(self, budget_s: float) -> bool:
        """Remove discarded folders for that long; True when nothing is left.

        Raises OSError for what cannot be removed, after everything else was.
        """
        deadline_s, failure = time.monotonic() + budget_s, None
        for each in (each for trash in self._trash if trash.is_dir() for each in trash.iterdir()):
            try:
                if not remove_tree(each, deadline_s):
                    return False
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure
        return True

    def sweep_libraries(self, older_than_s: float) -> None:
        """Remove versions of the library that no folder's container uses."""
        notes = (self._root / "containers").glob("*/library")
        self.library.sweep({note.read_text() for note in notes}, older_than_s)

    def _make_region_folder(self, folder: Path) -> None:
        (folder / "var").mkdir(exist_ok=True)
        self.regions.renew(folder / "var")
        # created here: a process that opens it while another creates it under a strict umask may be denied
        prepare_region(folder / "var" / "region")
        (folder / "var").chmod(0o1777)  # any user of the container may write, and recreate a removed region

    def _move_to_trash(self, folder: Path) -> None:
        for trash in self._trash:
            trash.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                folder.rename(trash / secrets.token_hex(16))
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno == errno.EXDEV and trash != self._trash[-1]:
                    continue
                raise
            return

    def _folder(self, name: str) -> Path:
        return self._root / "containers" / name

    def _own(self, folder: Path, owner: Owner) -> None:
        replace_file(folder / "owner.json", msgspec.json.encode(owner), 0o644)


def boot_id() -> str:
    """Identifies one run of the machine; "" if the kernel does not say."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _number(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if "-" in name and number.isdecimal() else 1


def _of_library(limit: CardLimit, policy: ComputePolicy, interactive: bool) -> limits_file.LimitsEntry:
    """What the library reads. 0 percent means here that compute is not divided.

    Where compute is lent, a container without a percentage weighs as much as its part of the card's memory.
    """
    percent = limit.compute_percent
    if policy is ComputePolicy.FAIR:
        percent = percent or max(1, 100 * limit.units // limit.card.units)
    if policy is ComputePolicy.OFF or not percent:
        return limits_file.LimitsEntry(limit.card.uuid, limit.memory_mib * MIB)
    most = 100 if policy is ComputePolicy.FAIR and percent < 100 else None
    return limits_file.LimitsEntry(limit.card.uuid, limit.memory_mib * MIB, percent, most, interactive)


def _read_owner(folder: Path) -> Owner:
    try:
        return msgspec.json.decode((folder / "owner.json").read_bytes(), type=Owner)
    except (OSError, ValueError):
        return Owner([])
