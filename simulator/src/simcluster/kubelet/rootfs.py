"""A container's root folder, without root rights or mount namespaces: every mount is a link, of a file a hard
one if it can be, of a folder with other mounts below it a folder of links.

Programs are started with host paths. Therefore the folder's programs come first in PATH, arguments that name
one of its files are translated, and the library in ``/etc/ld.so.preload`` is preloaded from the folder, so
that it finds its own files next to itself, as in a real container.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PRELOAD = "/etc/ld.so.preload"
HOST_PATH = "/usr/bin:/bin"
DRIVER_PROGRAMS = ("nvidia-smi",)
_FOLDERS = ("bin", "usr/bin", "usr/local/bin", "etc", "tmp", "root", "var", "app")


@dataclass(frozen=True, slots=True)
class Mount:
    """`host` appears at `container` (an absolute path)."""

    container: str
    host: Path


@dataclass(frozen=True, slots=True)
class Rootfs:
    """A folder that stands for ``/`` of one container."""

    path: Path

    def inside(self, container_path: str) -> Path:
        """The host path of a path in the container; it may not leave the folder."""
        normal = os.path.normpath("/" + container_path)
        return self.path / normal.lstrip("/")

    def translate(self, argument: str) -> str:
        """An argument that names a file of this root becomes its host path; all others stay.

        The value of ``--flag=/path`` does, too, with its links resolved: a socket's path must be short. Such
        a file need not exist yet if its folder is a mount.
        """
        flag, equals, value = argument.partition("=")
        if flag.startswith("--") and equals and value.startswith("/"):
            known = self._has(value) or self._is_mounted(os.path.dirname(value))
            return f"{flag}={os.path.realpath(self.inside(value))}" if known else argument
        return str(self.inside(argument)) if argument.startswith("/") and self._has(argument) else argument

    def _has(self, container_path: str) -> bool:
        return container_path != "/" and self.inside(container_path).exists()

    def _is_mounted(self, container_path: str) -> bool:
        place = self.inside(container_path)
        return place.is_dir() and self.path not in Path(os.path.realpath(place)).parents

    def environment(self, driver: Path | None) -> dict[str, str]:
        """What the container runtime adds so that the process sees this root."""
        programs = [str(self.path / one) for one in ("usr/local/bin", "usr/bin", "bin")]
        result = {
            "PATH": ":".join([*programs, HOST_PATH]),
            "HOME": str(self.path),
            "TMPDIR": str(self.path / "tmp"),
        }
        if driver is not None:
            result["LD_LIBRARY_PATH"] = str(driver)
        preload = self._preloaded()
        if preload:
            result["LD_PRELOAD"] = ":".join(preload)
        return result

    def _preloaded(self) -> list[str]:
        """The libraries that the container's dynamic loader would load first."""
        try:
            names = self.inside(PRELOAD).read_text().split()
        except OSError:
            return []
        return [str(self.inside(name)) for name in names if self.inside(name).exists()]


def build(path: Path, programs: Mapping[str, Path], mounts: Iterable[Mount]) -> Rootfs:
    """Recreate the folder: the image's programs, then the mounts, outer ones first, as runtimes sort them.

    Of two at the same path the later one is seen.
    """
    shutil.rmtree(path, ignore_errors=True)
    for folder in _FOLDERS:
        (path / folder).mkdir(parents=True, exist_ok=True)
    root = Rootfs(path)
    for name, host in programs.items():
        _link(root, name, host)
    for mount in sorted(mounts, key=lambda one: one.container.count("/")):
        _link(root, mount.container, mount.host, mounted=True)
    return root


def _link(root: Rootfs, container_path: str, host: Path, *, mounted: bool = False) -> None:
    place = root.inside(container_path)
    for step in reversed(place.relative_to(root.path).parents):
        _open_up(root.path / step)
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink() or place.is_file():
        place.unlink()
    elif place.is_dir():
        shutil.rmtree(place)
    if mounted and host.is_file() and not host.is_symlink():
        with contextlib.suppress(OSError):  # it is on another file system
            place.hardlink_to(host)  # the library opens no symbolic link of a claim
            return
    place.symlink_to(host)


def _open_up(folder: Path) -> None:
    """A mounted folder with another mount below it: a folder of its own with the same entries, since what is
    mounted there must not appear on the host. What is created in it later stays in the container."""
    if folder.is_symlink() and folder.is_dir():
        host = folder.resolve()
        folder.unlink()
        folder.mkdir()
        for entry in host.iterdir():
            (folder / entry.name).symlink_to(entry)
