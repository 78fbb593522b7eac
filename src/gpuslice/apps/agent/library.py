"""The preload library on the host, each version in a folder of its own.

A container keeps the version that it was granted, over its restarts and over updates of the agent: its
processes share memory whose layout belongs to that version. A version goes with its last container.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Container, Iterable, Iterator
from functools import partial
from pathlib import Path

from gpuslice.adapters.region.plain import read_plain
from gpuslice.apps.agent.upkeep import LostError, Owned
from gpuslice.core.errors import GpusliceError

LIBRARY = "libgpuslice.so"
HOOK = "gpuslice-limits-hook"
"""What the container runtime starts; beside the library, wherever that comes from."""
MOST_BYTES = 64 << 20


class IsolationMissingError(GpusliceError):
    """Isolation is wanted and what enforces it is not on the host: nothing may be started without it."""


class Library:
    """The library below `root`. `version` is "" where somebody else keeps one version in ``lib`` itself."""

    def __init__(self, root: Path) -> None:
        self.version = ""
        self._root = root
        self._source = ""
        self._writes = True

    def install(self, source: str, *, writes: bool = True) -> None:
        """Put the library in place, unless `source` is "": whole or not at all.

        Unless `writes`: whoever else keeps it there has this very version, or there is none for us.
        """
        self._source, self._writes = source, writes
        if source:
            try:
                content = Path(source).read_bytes()
            except OSError as error:
                raise IsolationMissingError(f"library {source} cannot be read: {error}") from error
            self.version = version_of(content)
            if writes:
                for folder in (self._root / "lib", self._root / self.folder):
                    make_folder(folder, 0o755)
                _put(self._root / self.folder / LIBRARY, content, 0o755)
                if (hook := Path(source).with_name(HOOK)).is_file():
                    _put(self._root / "lib" / HOOK, hook.read_bytes(), 0o755)

    def check(self) -> None:
        """Check that all is in place, and repair it. Raises `IsolationMissingError` naming the file."""
        path = self._root / self.folder / LIBRARY
        if not path.is_file() and self._source and self._writes:
            self.install(self._source)
        if not path.is_file():
            cure = "let the agent install it (--library)" if self._writes else "cgpu-installer puts it there"
            raise IsolationMissingError(
                f"{path} is missing: limits cannot be enforced; {cure} or switch isolation off for this node"
            )

    @property
    def has_hook(self) -> bool:
        return (self._root / "lib" / HOOK).is_file()

    def owned(self, used: Iterable[str]) -> Iterator[Owned]:
        """The `used` versions and ours; what each contains is told by its name."""
        for version in sorted({*used, self.version} - {""}):
            path, found = self._root / "lib" / version / LIBRARY, ""
            with contextlib.suppress(OSError):
                found = version_of(read_plain(path, MOST_BYTES))
            yield Owned(f"library {path}", found, version, partial(self._restore, version))

    def _restore(self, version: str) -> None:
        if version != self.version or not self._source:
            raise LostError("only an agent of that version could restore it; recreate the pods that use it")
        try:
            self.install(self._source, writes=self._writes)
            self.check()
        except IsolationMissingError as error:
            raise LostError(str(error)) from error
        if not self._writes:
            raise LostError("cgpu-installer restores it")

    @property
    def folder(self) -> str:
        """What containers mount, relative to the root."""
        return f"lib/{self.version}" if self.version else "lib"

    def sweep(self, used: Container[str], older_than_s: float) -> None:
        """Remove versions that no container was granted. Young ones may be another agent's that begins."""
        if not self._writes:
            return
        for path in (self._root / "lib").glob("*/"):
            unused = path.name != self.version and path.name not in used
            if unused and time.time() - path.stat().st_mtime > older_than_s:
                shutil.rmtree(path, ignore_errors=True)


def version_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _put(path: Path, content: bytes, mode: int) -> None:
    """Leave alone what is right: containers have it mounted."""
    try:
        found = read_plain(path, len(content) + 1)
    except OSError:  # also if a container has a lease on it
        found = b""
    if found != content:
        replace_file(path, content, mode)


def make_folder(path: Path, mode: int) -> None:
    """A folder of that mode, also where there is something else. Raises OSError."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        path.mkdir(parents=True)
    path.chmod(mode)


def replace_file(path: Path, content: bytes, mode: int, *, lasting: bool = False) -> None:
    """Write a file whole or not at all: others may be reading it right now, or using the old one.

    `lasting`: it is on the disk when this returns, also if the power goes then. That may take seconds.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if lasting:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
