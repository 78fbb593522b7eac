"""What programs do to their own process, by accident or on purpose: they are held and served all the same."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from gpuslice.adapters.region import layout
from tests.integration.isolation_rig import BUILD, MIB, SANITIZER, Container, container

PROGRAM = str(BUILD / "tests/conditions")
BLOCKS = "14"
"""Of 64 MiB beside a context, in 1,024 MiB."""


def said(box: Container, way: str) -> str:
    done = box.run(PROGRAM, way)
    if done.returncode == 77:
        pytest.skip("this machine does not let us do that")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.parametrize(
    "way",
    [
        "plain",
        "descriptors closed",
        "no descriptors",
        "no file sizes",
        "another user",
        "another root",
        "no calls",
        "signals",
    ],
)
@pytest.mark.skipif(bool(SANITIZER), reason="a sanitizer's runtime makes system calls of its own")
def test_a_program_gets_its_share_and_no_more(tmp_path: Path, way: str) -> None:
    """And what it gave back again."""
    with container(tmp_path) as box:
        assert said(box, way) == f"{BLOCKS} {BLOCKS} odd 0"


def test_a_program_with_a_share_may_write_no_files(tmp_path: Path) -> None:
    """What it tells its neighbours is a file: beyond RLIMIT_FSIZE the kernel ended it by SIGXFSZ."""
    with container(tmp_path, share=50) as box:
        assert said(box, "no file sizes") == f"{BLOCKS} {BLOCKS} odd 0"


def test_a_program_with_a_share_may_write_no_more_files(tmp_path: Path) -> None:
    with container(tmp_path, share=50, kernel_us=500) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok("burn 50 1 0")
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (0, 0))
        worker.ok("burn 50 1 0")


def test_who_may_write_no_files_is_refused_where_there_is_no_region(tmp_path: Path) -> None:
    with container(tmp_path) as box:
        box.region_path.unlink()
        assert box.run(PROGRAM, "no file sizes").returncode == 3  # cuDevicePrimaryCtxRetain() was refused
        assert box.machine.used() == 0


def test_two_thousand_threads_share_what_there_is(tmp_path: Path) -> None:
    with container(tmp_path) as box:
        assert said(box, "many threads") == f"{BLOCKS} odd 0"


def leave_pending(box: Container, amount: int) -> None:
    """As a process that was stopped before it got what it asked for: others wait for that, for a second."""
    slots = layout.REGION_BYTES - layout.SLOTS * ctypes.sizeof(layout.RegionSlot)
    at = slots + layout.RegionSlot.usage.offset + layout.RegionUsage.pending_bytes.offset
    with box.region_path.open("r+b") as region:
        region.seek(at)
        region.write(amount.to_bytes(8, "little"))


@pytest.mark.parametrize(("handler", "result"), [("calls", 2), ("jumps", -1)])
def test_a_signal_handler_may_call_or_leave_for_good_while_we_wait(
    tmp_path: Path, handler: str, result: int
) -> None:
    """With a lock held in that wait, both were the last thing that the program did."""
    with container(tmp_path) as box, box.worker() as stopped:
        stopped.ok("start 0")
        leave_pending(box, 750 * MIB)
        assert said(box, f"a handler that {handler}") == f"2 handled {result}"


def test_who_finds_room_in_a_pool_does_not_wait_for_a_thread_that_waits(tmp_path: Path) -> None:
    """That one held a lock which every stream-ordered allocation takes."""
    with container(tmp_path) as box, box.worker() as stopped:
        stopped.ok("start 0")
        leave_pending(box, 725 * MIB)
        assert said(box, "small beside large") == "0 and 2, meanwhile"


def test_children_forked_while_threads_allocate_come_to_their_end(tmp_path: Path) -> None:
    with container(tmp_path) as box:
        assert said(box, "forks") == f"{BLOCKS} failed 0 odd 0"


def test_a_process_in_the_same_memory_takes_of_the_same_share(tmp_path: Path) -> None:
    with container(tmp_path) as box:
        assert said(box, "shared memory") == f"{BLOCKS} then 0"


def test_what_is_called_at_exit_is_served(tmp_path: Path) -> None:
    with container(tmp_path) as box:
        assert said(box, "at the end") == f"at the end {BLOCKS}"


@pytest.mark.skipif(bool(SANITIZER), reason="a sanitizer's runtime and a tracer do not go together")
def test_a_region_that_is_there_is_not_opened_to_be_made(tmp_path: Path) -> None:
    """Where fs.protected_regular is set, as systemd sets it, the kernel refuses that to all but who made it:
    once a user's process had come first, root and the container's other users were refused all memory."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not on this machine")
    with container(tmp_path) as box:
        assert said(box, "plain")
        log, preload = tmp_path / "opened", box.environ()["LD_PRELOAD"]
        box.run(
            *("strace", "-o", str(log), "-e", "trace=openat", "-E", f"LD_PRELOAD={preload}"),
            *(PROGRAM, "plain"),
            LD_PRELOAD="",
        )
        opened = [line for line in log.read_text().splitlines() if str(box.region_path) in line]
    assert opened
    assert [line for line in opened if "O_CREAT" in line] == []


def test_where_the_disk_is_full_memory_is_refused_and_nobody_dies(tmp_path: Path) -> None:
    """A page of the region that has no place was a SIGBUS in the program."""
    with container(tmp_path) as box:
        full = box.region_path.parent
        mounted = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(full)]
        if os.geteuid() or not shutil.which("mount") or subprocess.run(mounted, check=False).returncode:
            pytest.skip("no file systems of our own on this machine")
        try:
            (full / "region").touch()
            done = box.run(PROGRAM, "plain")
        finally:
            subprocess.run(["umount", str(full)], check=True)
    assert done.returncode == 3, done  # cuDevicePrimaryCtxRetain() was refused
    assert box.machine.used() < MIB
