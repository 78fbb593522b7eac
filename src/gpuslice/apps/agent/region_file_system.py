"""Small file systems in memory that bound what containers write in their regions and claims.

These are the places on the node where a container can write without its disk use being counted as the pod's.
Mounting needs CAP_SYS_ADMIN, and the mounts must reach the node: the agent's own folder is mounted into its
pod with Bidirectional propagation.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from gpuslice.adapters.region.layout import REGION_BYTES
from gpuslice.core.errors import GpusliceError

MOST_BYTES = 2 * REGION_BYTES
"""One region and as much again, so that an accidental file does no harm immediately."""
MOST_ENTRIES = 16
MOST_CLAIM_BYTES = 256 * mmap.PAGESIZE
"""A page for the file of each container on a card: 64 KiB on arm64 kernels as NVIDIA recommends for Grace."""
MOST_CLAIM_ENTRIES = 1024
"""For all containers on a card: a folder and a file each."""

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MNT_DETACH = 2, 4, 8, 2


class RegionFileSystemError(GpusliceError):
    """What containers write is to be bounded, but the agent may not mount."""


class RegionFileSystem:
    """Mounts and unmounts them. If not `wanted`, folders are left as they are."""

    def __init__(self, root: Path, *, wanted: bool) -> None:
        self._root = root
        self._wanted = wanted
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._checked = False

    def check(self) -> None:
        """Check once that mounting works. Raises `RegionFileSystemError` with what is missing."""
        if not self._wanted or self._checked:
            return
        if not shared(self._root, Path("/proc/self/mountinfo").read_text()):
            raise RegionFileSystemError(
                f"mounts below {self._root} would not reach the node: mount that folder into the agent's pod "
                "with Bidirectional propagation, or start the agent with --no-region-filesystem"
            )
        probe = self._root / "containers" / ".probe"
        probe.mkdir(parents=True, exist_ok=True)
        try:
            self._mount(probe)
        except OSError as error:
            raise RegionFileSystemError(
                f"a file system for containers' regions cannot be mounted ({error.strerror}): give the agent "
                "CAP_SYS_ADMIN, or start it with --no-region-filesystem"
            ) from error
        self.unmount(probe)
        probe.rmdir()
        self._checked = True

    def renew(self, folder: Path) -> None:
        """Replace what is at `folder` by an empty file system. Raises OSError."""
        self.unmount(folder)
        if self._wanted:
            self._mount(folder)

    def bound(self, folder: Path) -> None:
        """Mount a file system at `folder` for the containers' claims, if there is none. Raises OSError."""
        if self._wanted and not os.path.ismount(folder):
            self._mount(folder, MOST_CLAIM_BYTES, MOST_CLAIM_ENTRIES, 0o755)

    def unmount(self, folder: Path) -> None:
        """Unmount it here; where else it is mounted it stays. Raises OSError."""
        while os.path.ismount(folder):
            if self._libc.umount2(os.fsencode(folder), _MNT_DETACH) != 0:
                raise _failure(folder)

    def _mount(
        self, folder: Path, size_bytes: int = MOST_BYTES, entries: int = MOST_ENTRIES, mode: int = 0o1777
    ) -> None:
        flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
        bounds = f"size={size_bytes},nr_inodes={entries},mode={mode:o}".encode()
        if self._libc.mount(b"gpuslice", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(flags), bounds) != 0:
            raise _failure(folder)


def _failure(folder: Path) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), str(folder))


def shared(folder: Path, mountinfo: str) -> bool:
    """Whether mounts below `folder` reach other mount namespaces, because the mount it is on is shared."""
    best, shared = "", False
    path = os.path.realpath(folder)
    for line in mountinfo.splitlines():
        fields, _, _ = line.partition(" - ")
        place, *optional = fields.split()[4:]
        point = place.encode().decode("unicode_escape")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, shared = point, any(each.startswith("shared:") for each in optional)
    return shared
