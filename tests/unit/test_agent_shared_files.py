"""What several containers see cannot be leased or used up by one of them, so that others have to wait."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuslice.adapters.region.figures import Figure, write_figures
from gpuslice.apps.agent.folders import Folders, HostMount
from gpuslice.apps.agent.owner import Owner
from tests import HANG_S

FIRST, SECOND = ["GPU-a-_-0"], ["GPU-a-_-1"]


def folders_in(root: Path) -> Folders:
    folders = Folders(root, boot="this")
    (root / "built.so").write_bytes(b"library")
    folders.library.install(str(root / "built.so"))
    return folders


def files_of(mounts: tuple[HostMount, ...]) -> dict[int, Path]:
    """Every regular file that a container finds below its mounts, by inode."""
    places = [Path(each.host_path) for each in mounts]
    files = [file for place in places for file in (place, *place.rglob("*")) if file.is_file()]
    return {file.stat().st_ino: file for file in files}


def leased(path: Path, kind: int) -> bool:
    """Whether a container's root can take a lease now; it is let go at once."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, kind)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


HOLD = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_RDONLY)
fcntl.fcntl(file, fcntl.F_SETLEASE, int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(path: Path, kind: int) -> Iterator[subprocess.Popen[str]]:
    """A process that has a lease on the file, and ignores that others wait."""
    command = [sys.executable, "-c", HOLD, str(path), str(kind)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield holder
        finally:
            holder.kill()


@pytest.fixture(autouse=True)
def file_systems_have_leases(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    if not leased(tmp_path / "file", fcntl.F_WRLCK):
        pytest.skip(f"the file system of {tmp_path} gives no leases")


def test_no_file_that_others_open_can_be_leased(tmp_path: Path) -> None:
    """The loader opens the preload file and the library at each program's start, without O_NONBLOCK."""
    folders = folders_in(tmp_path)
    asyncio.run(folders.shared.look())
    first, second = (files_of(folders.grant(ids, limits_compute=True)) for ids in (FIRST, SECOND))
    both = [second[inode] for inode in first.keys() & second.keys()]
    assert {path.name for path in both} == {"claim", "libgpuslice.so"}
    for path in both:
        assert not leased(path, fcntl.F_WRLCK), path
        # against who opens it to write; the library is only read
        assert path.name != "claim" or not leased(path, fcntl.F_RDLCK), path
    folders.start(FIRST, [], Owner(FIRST))
    limits = tmp_path / "containers" / folders.current(FIRST) / "etc" / "limits"
    assert not leased(limits, fcntl.F_WRLCK), "the exporter and the watchdog read it"


def test_an_agent_that_starts_opens_what_is_there_though_somebody_leased_it(tmp_path: Path) -> None:
    folders = folders_in(tmp_path)
    library, claim = (
        tmp_path / "lib" / folders.library.version / "libgpuslice.so",
        tmp_path / "cards/GPU-a/x/claim",
    )
    limits = tmp_path / "containers/x/etc/limits"
    for each in (claim, limits):
        each.parent.mkdir(parents=True)
        each.touch()
    assert leased(library, fcntl.F_WRLCK)
    assert leased(limits, fcntl.F_WRLCK)
    assert leased(claim, fcntl.F_RDLCK)

    async def look(holder: subprocess.Popen[str]) -> None:
        looking = asyncio.create_task(folders.shared.look())
        await asyncio.wait([looking], timeout=0.2)
        assert not looking.done(), "the event loop goes on, and so do starts of containers"
        assert not leased(limits, fcntl.F_WRLCK), "one that is leased does not delay the others"
        assert not leased(claim, fcntl.F_RDLCK)
        folders.grant(SECOND, limits_compute=True)
        holder.kill()
        await asyncio.wait_for(looking, HANG_S)

    with holding(library, fcntl.F_WRLCK) as holder:
        asyncio.run(look(holder))
    assert not leased(library, fcntl.F_WRLCK)
    assert not leased(limits, fcntl.F_WRLCK)
    assert not leased(claim, fcntl.F_RDLCK)


def test_what_is_gone_is_closed(tmp_path: Path) -> None:
    folders = folders_in(tmp_path)
    before = os.listdir("/proc/self/fd")
    folders.grant(FIRST, limits_compute=True)
    folders.start(FIRST, [], Owner(FIRST))
    assert len(os.listdir("/proc/self/fd")) == len(before) + 2, "its claim and its limits"
    folders.discard(folders.current(FIRST))
    folders.library.sweep([], -1)
    asyncio.run(folders.shared.look())
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1, "the library's"


def test_figures_are_written_whatever_lease_the_container_has(tmp_path: Path) -> None:
    path, figure = tmp_path / "figures", Figure("GPU-a", 7, 100, 1 << 20)
    write_figures(path, [figure], 1)
    with holding(path, fcntl.F_RDLCK):
        began_s = time.monotonic()
        write_figures(path, [figure], 2)
        assert time.monotonic() - began_s < 10, "a lease lasts 45 s"
        assert b"\2" in path.read_bytes()[16:24]
