"""What the agent owns below its root, as things to keep: containers' folders and the library.

What a folder must contain is known from its owner, which is in memory while the agent runs, and in the
folder. A container that runs keeps what it has mounted: a folder that was deleted is gone for it until its
next start, and only what is in its folders comes back at once.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from gpuslice.adapters.region.limits import parse_limits, write_limits
from gpuslice.adapters.region.plain import read_plain
from gpuslice.adapters.region.reader import restore_region
from gpuslice.apps.agent.folders import PRELOAD, PRELOADED, Folders
from gpuslice.apps.agent.library import replace_file
from gpuslice.apps.agent.owner import FILE, MOST_BYTES, Owner, read_owner
from gpuslice.apps.agent.upkeep import Owned, Upkeep

Content = bytes | int | None
"""Of a file, or a folder's mode (0: any); None: a file of any content."""
MISSING = b"missing"
EVERY_S = 3.0
"""200 containers take 27 ms of CPU."""


class FileUpkeep(Upkeep):
    """Keeps the containers' folders below `root`, the library, and what `others` own on the disk.

    `recover` is called until it returns true: it learns from kubelet what lost folders contained.
    """

    def __init__(
        self,
        root: Path,
        folders: Folders,
        others: Sequence[Callable[[], Iterable[Owned]]],
        *,
        recover: Callable[[], bool],
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(self.owned, tell, every_s=EVERY_S, on_disk=True, before=self._recover_once)
        self._root = root
        self._folders = folders
        self._others = others
        self._recover = recover
        self._recovered = False

    async def run(self) -> None:
        self.load()
        await super().run()

    def _recover_once(self) -> None:
        self._recovered = self._recovered or self._recover()

    def load(self) -> None:
        """Learn from the folders what each must contain. What cannot be read is learned otherwise."""
        for found in (self._root / "containers").glob("*/"):
            if (owner := read_owner(found)) is not None:
                self._folders.records.setdefault(found.name, owner)

    def owned(self) -> Iterator[Owned]:
        """One thing for each container. Raises OSError for a disk that cannot be read."""
        for name, owner in list(self._folders.records.items()):
            wanted = self._wanted(name, owner)
            found = {path: _found(path, content) for path, content in wanted.items()}
            whose = f"of container {owner.container} of pod {owner.namespace}/{owner.pod}"
            yield Owned(f"folder {name} {whose}", found, wanted, partial(self._mend, name, owner, wanted))
        used = [owner.library for owner in self._folders.records.values()]
        yield from self._folders.library.owned(used)
        for other in self._others:
            yield from other()

    def _wanted(self, name: str, owner: Owner) -> dict[Path, Content]:
        """In the order in which it is written."""
        containers = self._root / "containers"
        folder = containers / name
        wanted: dict[Path, Content] = {
            containers: 0o700,
            folder: 0,
            folder / "etc": 0,
            folder / "var": 0o1777,
        }
        wanted[folder / FILE] = msgspec.json.encode(owner)
        wanted[folder / PRELOAD] = PRELOADED.encode()
        if owner.limits:
            wanted[folder / "etc" / "limits"] = owner.limits.encode()
            wanted[folder / "etc" / "generation"] = None
        wanted[folder / "var" / "region"] = None
        cards = self._root / "cards"
        for uuid in owner.cards:
            wanted |= {cards: 0o700, cards / uuid: 0, cards / uuid / name: 0}
            wanted[cards / uuid / name / "claim"] = None
        return wanted

    def _mend(self, name: str, owner: Owner, wanted: Mapping[Path, Content]) -> None:
        """Write what differs. Raises OSError."""
        folder = self._root / "containers" / name
        for path, content in wanted.items():
            if _found(path, content) == content:
                continue
            with contextlib.suppress(FileNotFoundError):
                is_kind = stat.S_ISDIR if isinstance(content, int) else stat.S_ISREG
                if not is_kind(path.lstat().st_mode):
                    self._folders.move_to_trash(path)
            if path.name == "claim":
                self._folders.make_claim(path.parent.parent.name, name)
            elif path.name == "region":
                restore_region(path)
            elif path.name in ("limits", "generation"):
                write_limits(folder / "etc" / "limits", parse_limits(owner.limits))
                self._folders.shared.new(folder / "etc" / "limits")
            elif path == folder / "var" and not path.is_dir():
                self._folders.make_region_folder(folder)
            elif isinstance(content, int):
                path.mkdir(exist_ok=True, parents=True)
                if content:
                    path.chmod(content)
            elif path.name == PRELOAD and isinstance(content, bytes):
                _overwrite(path, content)
            elif isinstance(content, bytes):
                replace_file(path, content, 0o644)


def _found(path: Path, wanted: Content) -> Content:
    try:
        if isinstance(wanted, bytes):
            found = read_plain(path, MOST_BYTES)
            return found if stat.S_IMODE(path.lstat().st_mode) == 0o644 else MISSING
        mode = path.lstat().st_mode
    except OSError:
        return MISSING
    if wanted is None:
        return None if stat.S_ISREG(mode) else MISSING
    if not stat.S_ISDIR(mode):
        return MISSING
    return stat.S_IMODE(mode) if wanted else 0


def _overwrite(path: Path, content: bytes) -> None:
    """Write a file that containers have mounted, so that they see it too. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        os.pwrite(file, content, 0)  # before it is cut: nobody sees it empty
        os.ftruncate(file, len(content))
        os.fchmod(file, 0o644)
    finally:
        os.close(file)
