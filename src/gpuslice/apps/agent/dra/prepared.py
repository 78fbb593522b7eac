"""The claims that are prepared on this node, on its disk: one record per claim, and one CDI file.

A record is written after all else is in place and removed after all else is gone. What a crash leaves half
done is repeated or removed under the same names. The CDI files are in a folder that a reboot empties; a
record says in which run of the machine its claim was prepared.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gpuslice.adapters.region.plain import read_plain
from gpuslice.apps.agent.folders import Folders, HostMount
from gpuslice.apps.agent.library import make_folder, replace_file
from gpuslice.apps.agent.limit_hook import hook_edits
from gpuslice.apps.agent.owner import CLAIM_PREFIX, MOST_BYTES, Owner
from gpuslice.apps.agent.upkeep import Owned
from gpuslice.core.claims import ClaimAllocation, ClaimedSlice
from gpuslice.core.contract import CLAIM_CDI_KIND

CDI_VERSION = "0.6.0"
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")


class PreparedSlice(msgspec.Struct, frozen=True):
    request: str
    card: int
    units: int
    compute_percent: int = 0
    share_id: str = ""
    admin: bool = False


class CdiEdits(msgspec.Struct, frozen=True):
    """What a container gets that uses one request of a claim; `owner`: of its folder, if it has one."""

    request: str
    environment: dict[str, str]
    mounts: tuple[HostMount, ...] = ()
    owner: Owner | None = None


class PreparedClaim(msgspec.Struct, frozen=True):
    """A record. `boot`: the run of the machine in which the claim was prepared; `uuids`: its cards, by index.

    A reload of the driver may give a card's index to another card. `edits`: what is in the CDI file.
    """

    uid: str
    namespace: str
    name: str
    boot: str
    slices: list[PreparedSlice]
    uuids: dict[int, str] = {}  # an older agent recorded none
    edits: list[CdiEdits] = []

    @property
    def allocation(self) -> ClaimAllocation:
        slices = (ClaimedSlice(**msgspec.structs.asdict(each)) for each in self.slices)
        return ClaimAllocation(self.uid, self.namespace, self.name, tuple(slices))


def folder_name(uid: str, request: str) -> str:
    return f"{CLAIM_PREFIX}{uid}.{_plain(request)}"


def cdi_device(uid: str, request: str) -> str:
    """The CDI device of one request of a claim, as kubelet names it to the container runtime."""
    return f"{CLAIM_CDI_KIND}={uid}-{_plain(request)}"


def _plain(request: str) -> str:
    """A request of a prioritized list is called ``request/subrequest``."""
    return request.replace("/", ".")


class PreparedClaims:
    """Records below ``<root>/claims`` and CDI files in `cdi`; all survive a restart of the agent.

    Without the folder of records the node has never served claims.
    """

    def __init__(self, root: Path, cdi: Path, folders: Folders) -> None:
        self.boot = folders.boot
        self._folder = root / "claims"
        self._cdi = cdi
        self._folders = folders
        self._known: dict[str, PreparedClaim] | None = None

    # -- the records ------------------------------------------------------------------------------------

    @property
    def ever(self) -> bool:
        """Whether this node has served claims and it is not certain that none is left."""
        return self._folder.is_dir()

    def begin(self) -> None:
        """Record, across restarts, that this node serves claims. Raises OSError."""
        make_folder(self._folder, 0o700)

    def end(self) -> None:
        """Record that no claim is left. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self._folder.rmdir()

    def all(self) -> list[PreparedClaim]:
        if self._known is None:
            self._known = {}
            for path in sorted(self._folder.glob("*.json")):
                with contextlib.suppress(OSError, ValueError):
                    record = msgspec.json.decode(path.read_bytes(), type=PreparedClaim)
                    self._known[record.uid] = record
                    for each in record.edits if record.boot == self.boot else ():
                        if each.owner is not None:
                            name = folder_name(record.uid, each.request)
                            self._folders.records.setdefault(name, each.owner)
        return list(self._known.values())

    def get(self, uid: str) -> PreparedClaim | None:
        return next((each for each in self.all() if each.uid == uid), None)

    # -- one claim --------------------------------------------------------------------------------------

    def in_place(self, allocation: ClaimAllocation) -> bool:
        """Whether the claim was prepared exactly so in this run of the machine and nothing is missing."""
        record = self.get(allocation.uid)
        if record is None or record.boot != self.boot or record.allocation != allocation:
            return False
        for path, content in self._wanted(record).items():
            if not path.is_file():
                self._write(path, content)
        folders = set(self._folders.of_claims())
        held = (each.request for each in allocation.slices if not each.admin)
        return self._cdi_file(allocation.uid).is_file() and all(
            folder_name(allocation.uid, request) in folders for request in held
        )

    def write(self, allocation: ClaimAllocation, edits: Iterable[CdiEdits], uuids: Mapping[int, str]) -> None:
        """Write the CDI file, then the record: from then on the claim is prepared. Raises OSError.

        `uuids`: of the node's cards, by index.
        """
        slices = [
            PreparedSlice(
                each.request, each.card, each.units, each.compute_percent, each.share_id, each.admin
            )
            for each in allocation.slices
        ]
        uid, of_cards = allocation.uid, {each.card: uuids[each.card] for each in allocation.slices}
        record = PreparedClaim(
            uid, allocation.namespace, allocation.name, self.boot, slices, of_cards, list(edits)
        )
        self.begin()
        for path, content in self._wanted(record).items():
            self._write(path, content)
        self.all()
        assert self._known is not None
        self._known[uid] = record

    def owned(self) -> Iterator[Owned]:
        """The files of each claim."""
        for record in self.all():
            for path, content in self._wanted(record).items():
                found = None
                with contextlib.suppress(OSError):
                    found = read_plain(path, MOST_BYTES)
                what = f"{path} of claim {record.namespace}/{record.name}"
                yield Owned(what, found, content, partial(self._write, path, content))

    def _wanted(self, record: PreparedClaim) -> dict[Path, bytes]:
        """The record comes last. A reboot empties the folder of CDI files, and kubelet asks again."""
        wanted = {self._folder / f"{record.uid}.json": msgspec.json.encode(record)}
        if record.boot != self.boot or not record.edits:
            return wanted
        document = {
            "cdiVersion": CDI_VERSION,
            "kind": CLAIM_CDI_KIND,
            "devices": [
                {
                    "name": cdi_device(record.uid, each.request).partition("=")[2],
                    "containerEdits": self._edits(record, each),
                }
                for each in record.edits
            ],
        }
        return {self._cdi_file(record.uid): msgspec.json.encode(document)} | wanted

    def _edits(self, record: PreparedClaim, edits: CdiEdits) -> dict[str, Any]:
        """As CDI has them."""
        by_driver: dict[str, Any] = {}
        if edits.owner is not None and edits.owner.hooked:
            by_driver = hook_edits(self._folders, folder_name(record.uid, edits.request), edits.owner)
        environment = [f"{name}={value}" for name, value in edits.environment.items()]
        return by_driver | {
            "env": environment + by_driver.get("env", []),
            "mounts": [
                {
                    "hostPath": mount.host_path,
                    "containerPath": mount.container_path,
                    "options": ["rbind", "nosuid", "nodev", "ro" if mount.read_only else "rw"],
                }
                for mount in edits.mounts
            ],
        }

    def _write(self, path: Path, content: bytes) -> None:
        lasting = path.parent == self._folder
        make_folder(path.parent, 0o700 if lasting else 0o755)
        replace_file(path, content, 0o600 if lasting else 0o644, lasting=lasting)

    def remove(self, uid: str) -> None:
        """Remove everything of the claim that exists. Raises OSError."""
        if not _UID.fullmatch(uid):
            return  # it is not the name of a file
        _unlink_with_drafts(self._cdi_file(uid))
        for name in self._folders.of_claims():
            if name.startswith(f"{CLAIM_PREFIX}{uid}."):
                self._folders.discard(name)
        _unlink_with_drafts(self._folder / f"{uid}.json")
        self.all()
        assert self._known is not None
        self._known.pop(uid, None)

    def leftovers(self) -> Iterator[str]:
        """The uids of claims that were half prepared when the agent died: folders without a record."""
        for name in self._folders.of_claims():
            uid = name.removeprefix(CLAIM_PREFIX).partition(".")[0]
            if self.get(uid) is None:
                yield uid

    def _cdi_file(self, uid: str) -> Path:
        return self._cdi / f"{CLAIM_CDI_KIND.replace('/', '-')}-{uid}.json"


def valid_uid(uid: str) -> bool:
    """Whether a claim's uid may name files."""
    return _UID.fullmatch(uid) is not None


def _unlink_with_drafts(path: Path) -> None:
    """The file, and what a crash left while writing it."""
    for draft in path.parent.glob(f".{path.name}.*"):
        draft.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
