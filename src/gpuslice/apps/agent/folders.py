"""The folder that each container gets on the host: its limits, and the memory region of its processes.

kubelet fixes a container's mounts at Allocate, before the container is known, and reuses them at every
restart. So a folder is named after the set of device ids, and its content is written at each start. If a
container that kubelet has forgotten is still using it, the next one with those ids gets a folder with a
number appended (``-2`` …); the highest is the one that Allocate named last::

    <root>/lib/<version>/libgpuslice.so  the library, mounted read-only
    <root>/lib/gpuslice-limits-hook  what the container runtime starts where the driver enforces limits
    <root>/containers/<token>/ld.so.preload  one line that names it, mounted over /etc/ld.so.preload and Nix's
    <root>/containers/<token>/etc/       limits, the driver's figures for its processes, and what these
                                         are asked to give back (pressure); mounted read-only
    <root>/containers/<token>/var/       region, empty at first: the only place where its processes write
    <root>/containers/<token>/owner.json whose it is, for the sweep and for the region's readers
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
import secrets
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpuslice.adapters.region import limits as limits_file
from gpuslice.adapters.region.reader import Counts, prepare_region, with_region
from gpuslice.apps.agent.forgotten import RunningContainer
from gpuslice.apps.agent.library import LIBRARY, Library, replace_file
from gpuslice.apps.agent.limit_entries import entries
from gpuslice.apps.agent.owner import CLAIM_PREFIX, FILE, Owner, boot_id, number_of, read_owner, token
from gpuslice.apps.agent.region_file_system import RegionFileSystem
from gpuslice.apps.agent.removal import remove_tree
from gpuslice.apps.agent.shared_files import SharedFiles
from gpuslice.core import container_files as inside
from gpuslice.core.contract import card_of_device_id
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.errors import words_of
from gpuslice.core.grant import CardLimit
from gpuslice.core.mode import Rules

PRELOAD = "ld.so.preload"
PRELOADED = f"{inside.LIBRARY_FOLDER}/{LIBRARY}\n"


def refusal_of(error: Exception) -> str:
    """Why a container cannot have what it is granted, for its pod's events."""
    if isinstance(error, OSError):
        return f"the container's files cannot be written on the node: {words_of(error)}"
    return str(error)


@dataclass(frozen=True, slots=True)
class HostMount:
    """A path of the host as a container sees it."""

    container_path: str
    host_path: str
    read_only: bool


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
        self.host_root = host_root or root
        self.boot = boot_id() if boot is None else boot
        self._now_ns = now_ns
        # the second is needed where an operator made `containers` a file system of its own
        self._trash = (root / "trash", root / "containers" / ".trash")
        self.records: dict[str, Owner] = {}  # what each folder must contain, by name
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

    def mounts(self, name: str, cards: Iterable[str] = (), library: str = "") -> tuple[HostMount, ...]:
        """What a container with the folder `name` is given. `cards`: where it communicates with others.

        `library`: the version that it has; ours if "".
        """
        library = f"lib/{library}" if library else self.library.folder
        folder = self.host_root / "containers" / name
        mounts = [
            *(HostMount(path, str(folder / PRELOAD), read_only=True) for path in inside.PRELOAD_FILES),
            HostMount(inside.LIBRARY_FOLDER, str(self.host_root / library), read_only=True),
            HostMount(inside.LIMITS_FOLDER, str(folder / "etc"), read_only=True),
            HostMount(inside.REGION_FOLDER, str(folder / "var"), read_only=False),
        ]
        for uuid in sorted(cards):
            card, meeting = self.host_root / "cards" / uuid, f"{inside.NEIGHBOURS_FOLDER}/{uuid}"
            mounts.append(HostMount(f"{meeting}/own/claim", str(card / name / "claim"), read_only=False))
            mounts.append(HostMount(f"{meeting}/all", str(card), read_only=True))
        return tuple(mounts)

    def current(self, ids: Iterable[str]) -> str:
        """The name of the folder that the last Allocate of these ids mounted, or that the next one will."""
        first = token(ids)
        names = [found.name for found in (self._root / "containers").glob(f"{first}*")]
        names += [name for name in self.records if name.startswith(first)]
        last = max(map(number_of, names), default=1)
        return first if last == 1 else f"{first}-{last}"

    def prepare(self, ids: Iterable[str], occupied: Container[str] = ()) -> str:
        """Create the folder that Allocate mounts; returns its name. What an older container left stays.

        Folders in `occupied` are not touched: a container lives there.
        """
        ids = sorted(ids)
        name = self.current(ids)
        if name in occupied:
            name = f"{token(ids)}-{number_of(name) + 1}"
        self._make(name, Owner(ids))
        return name

    def _make(self, name: str, owner: Owner) -> None:
        folder = self._folder(name)
        (folder / "etc").mkdir(parents=True, exist_ok=True)
        folder.parent.chmod(0o700)
        if not (folder / "var").exists():
            self.make_region_folder(folder)
        if not (folder / PRELOAD).exists():
            replace_file(folder / PRELOAD, PRELOADED.encode(), 0o644)
        if read_owner(folder) is None:
            self._own(folder, self.records.get(name, owner))

    def grant(
        self,
        ids: Iterable[str],
        occupied: Container[str] = (),
        *,
        limits_compute: bool = False,
        preloaded: bool = True,
        hooked: bool = False,
    ) -> tuple[HostMount, ...]:
        """What Allocate answers: the mounts of a prepared folder, whose library is recorded."""
        self.library.check()
        ids = sorted(ids)
        name = self.prepare(ids, occupied)
        cards = {card_of_device_id(each) for each in ids} if limits_compute else set()
        return self._granted(name, cards, preloaded=preloaded, hooked=hooked)

    def _granted(
        self, name: str, cards: Collection[str], *, preloaded: bool = True, hooked: bool = False
    ) -> tuple[HostMount, ...]:
        """The mounts of a folder, whose library is recorded. `cards`: where it communicates with others."""
        owner, folder = self.owner(name), self._folder(name)
        given = {"library": self.library.version, "preloaded": preloaded, "hooked": hooked}
        self._own(folder, msgspec.structs.replace(owner, cards=sorted(cards), **given))
        for uuid in cards:
            self.make_claim(uuid, name)
        return self.mounts(name, cards) if preloaded else ()

    def make_claim(self, uuid: str, name: str) -> None:
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
        limits: Sequence[limits_file.LimitsEntry],
        owner: Owner,
        *,
        occupied: Container[str] = (),
    ) -> None:
        """Prepare for a container's first instruction: its limits, and a region that nobody has written in.

        Raises `LimitsError` for limits that the library would not accept. `occupied` as for `prepare`.
        """
        self._start(self.prepare(ids, occupied), owner, limits)

    def recover(self, ids: Iterable[str], limits: Sequence[limits_file.LimitsEntry], owner: Owner) -> None:
        """A container runs with these ids: unless its folder says so, what it must contain is this.

        What its share of compute was when it started is not known any more.
        """
        name = self.current(ids)
        known = self.records.get(name, Owner([]))
        memory = {each.uuid: each.memory_bytes for each in limits}
        with contextlib.suppress(limits_file.LimitsError):
            recorded = limits_file.parse_limits(known.limits)
            if known.is_of(owner) and {each.uuid: each.memory_bytes for each in recorded} == memory:
                return
        cards = [uuid for uuid in memory if (self._root / "cards" / uuid / name).exists()]
        self.records[name] = msgspec.structs.replace(
            owner,
            boot=self.boot,
            limits=limits_file.format_limits(limits),
            library=known.library or self.library.version,
            cards=known.cards or cards,
            preloaded=known.preloaded,
            hooked=known.hooked,
        )

    def _start(self, name: str, owner: Owner, limits: Sequence[limits_file.LimitsEntry]) -> None:
        folder = self._folder(name)
        before = self._owner_in(folder)
        earlier: dict[str, Counts] = {}
        if before.is_of(owner):
            cards = [limit.uuid for limit in limits]
            earlier = with_region(before.earlier, folder / "var" / "region", cards)
        self.regions.unmount(folder / "var")
        self.move_to_trash(folder / "var")
        self.make_region_folder(folder)
        # where a share was ever limited
        shared = [each.uuid for each in limits if (self._root / "cards" / each.uuid).is_dir()]
        cards = sorted({*before.cards, *shared})
        text, library = limits_file.format_limits(limits), before.library
        given = {"earlier": earlier, "limits": text, "library": library, "cards": cards}
        by = {"preloaded": before.preloaded, "hooked": before.hooked}
        self._own(folder, msgspec.structs.replace(owner, boot=self.boot, **given, **by))
        for uuid in cards:
            self.make_claim(uuid, name)
        self._write_limits(folder, limits)
        (folder / "etc" / "pressure").unlink(missing_ok=True)

    def change_limits(self, name: str, limits: Sequence[limits_file.LimitsEntry]) -> None:
        """Of a container that runs: each of its processes follows within a second."""
        folder, text = self._folder(name), limits_file.format_limits(limits)
        self._own(folder, msgspec.structs.replace(self.owner(name), limits=text))
        self._write_limits(folder, limits)

    def ask_back(self, name: str, excesses: Mapping[str, int]) -> None:
        """Tell the container's programs how many bytes of each card they are to give back. Raises OSError."""
        limits_file.write_pressure(self._folder(name) / "etc" / "pressure", excesses)

    def _write_limits(self, folder: Path, limits: Sequence[limits_file.LimitsEntry]) -> None:
        limits_file.write_limits(folder / "etc" / "limits", limits)
        self.shared.new(folder / "etc" / "limits")

    def region(self, name: str) -> Path:
        """Where the processes of the container with this folder account for what they use."""
        return self._folder(name) / "var" / "region"

    # -- claims of dynamic resource allocation ----------------------------------------------------------

    def start_claim(
        self, name: str, limits: Sequence[CardLimit], owner: Owner, rules: Rules, *, hooked: bool = False
    ) -> tuple[HostMount, ...]:
        """Prepare the whole folder `name` as for a first start; returns its mounts.

        Raises `IsolationMissingError`, `LimitsError` and OSError.
        """
        self.library.check()
        self._make(name, owner)
        self._start(name, owner, entries(limits, policy=rules.compute_policy))
        cards = {limit.card.uuid for limit in limits} if rules.limits_compute else set()
        return self._granted(name, cards, hooked=hooked)

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
                        yield folder.name, self._owner_in(folder), age_s

    def counts(self) -> Iterator[tuple[str, Owner, dict[str, Counts]]]:
        """For each folder, what its container has counted over all restarts, by card; for display only."""
        for name, owner, _ in self.owners():
            cards = {card_of_device_id(each) for each in owner.ids}
            yield name, owner, with_region(owner.earlier, self._folder(name) / "var" / "region", cards)

    def owner(self, name: str) -> Owner:
        """The owner of the folder `name`; nobody if it cannot be read."""
        return self._owner_in(self._folder(name))

    def unidentified(self, owner: Owner) -> bool:
        """Whether its container was started in this run of the machine without being identified."""
        return bool(owner.boot) and owner.boot == self.boot and not owner.uid

    def identify(self, name: str, before: Owner, owner: Owner) -> None:
        """Record whose container lives in the folder, which was `before`'s. Raises OSError."""
        names = {each: getattr(owner, each) for each in ("ids", "uid", "namespace", "pod", "container")}
        self._own(self._folder(name), msgspec.structs.replace(before, **names))

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
        self.records.pop(name, None)
        self.regions.unmount(self._folder(name) / "var")
        self.move_to_trash(self._folder(name))
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
        """Remove versions of the library that no folder's container uses; none if one does not say."""
        owners = [read_owner(found.parent) for found in (self._root / "containers").glob("*/etc")]
        if None not in owners:
            self.library.sweep({each.library for each in owners if each}, older_than_s)

    def make_region_folder(self, folder: Path) -> None:
        (folder / "var").mkdir(exist_ok=True)
        self.regions.renew(folder / "var")
        # created here: a process that opens it while another creates it under a strict umask may be denied
        prepare_region(folder / "var" / "region")
        (folder / "var").chmod(0o1777)  # any user of the container may write, and recreate a removed region

    def move_to_trash(self, folder: Path) -> None:
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
        self.records[folder.name] = owner
        replace_file(folder / FILE, msgspec.json.encode(owner), 0o644)

    def _owner_in(self, folder: Path) -> Owner:
        return read_owner(folder) or self.records.get(folder.name, Owner([]))
