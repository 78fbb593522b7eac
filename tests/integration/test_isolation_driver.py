"""What a real driver does and a friendly one does not: memory is the card's until the driver lets go of it.

Each test is a way past the limit, or to an innocent program's end, that somebody found.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import HANG_S

from .isolation_rig import BUILD, MIB, OUT_OF_MEMORY, Container, Worker, container
from .sequence_players import first_child

CLOSED_AND_OPENED = """
import ctypes, _ctypes
first, info, again = "{library}", "{asks}", "{calls}"
for _ in range(3):
    library = ctypes.CDLL(first)
    getattr(library, info)
    _ctypes.dlclose(library._handle)
library = ctypes.CDLL(first)
number = ctypes.c_int(7)
print(getattr(library, again)(*({arguments})))
"""


@pytest.mark.parametrize(
    ("library", "asks", "calls", "arguments"),
    [
        ("libcuda.so.1", "cuMemGetInfo_v2", "cuInit", "0,"),
        ("libcuda.so.1", "cuMemAlloc_v2", "cuMemFree_v2", "ctypes.c_ulonglong(512),"),
        ("libnvidia-ml.so.1", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo", "None, None"),
    ],
)
def test_a_program_may_close_the_driver_and_open_it_again(
    tmp_path: Path, library: str, asks: str, calls: str, arguments: str
) -> None:
    """CUDA.jl does, and every probe that looks whether there is a card."""
    program = CLOSED_AND_OPENED.format(library=library, asks=asks, calls=calls, arguments=arguments)
    with container(tmp_path) as box:
        limited = box.run(sys.executable, "-c", program)
        bare = box.run(sys.executable, "-c", program, LD_PRELOAD=limited_preload(box))
    assert (limited.returncode, limited.stdout) == (bare.returncode, bare.stdout), limited.stderr
    assert limited.returncode == 0


def limited_preload(box: Container) -> str:
    """Without the library, with the sanitizer's runtime where there is one."""
    return box.environ()["LD_PRELOAD"].rpartition(":")[0]


def test_a_process_whose_first_thread_ended_keeps_what_it_holds(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as one, box.worker() as two:
        one.ok("start 0")
        two.ok("start 0")
        one.ok(f"alloc 0 plain {256 * MIB}")
        assert one.ask("leave-first-thread") == "ok"
        assert two.ask(f"alloc 0 plain {640 * MIB}") == OUT_OF_MEMORY
        one.ok("free 0")
        two.ok(f"alloc 0 plain {640 * MIB}")


# ---- memory lies on its card, whatever is current


def lend_physical(maker: Worker, taker: Worker, number: int) -> int:
    """The maker's memory `number`, opened by the taker under the same number; the maker's descriptor."""
    pid, descriptor = maker.ok(f"share {number}")
    taker.ok(f"receive {number} {pid} {descriptor}")
    return descriptor


@pytest.mark.parametrize("current", [-1, 1])
def test_imported_memory_counts_on_its_card_whatever_is_current(tmp_path: Path, current: int) -> None:
    with container(tmp_path, cards=2) as box, box.worker() as maker, box.worker() as taker:
        maker.ok("start 0")
        taker.ok("start 0")
        for number in range(4):
            assert maker.ask(f"alloc {number} physical {200 * MIB}") in ("ok", OUT_OF_MEMORY)
        before = box.machine.used(0)
        taker.ok(f"current {current}")
        descriptor = lend_physical(maker, taker, 0)
        maker.ok(f"shut {descriptor}")
        maker.ok("free 0")
        assert box.machine.used(0) == before, "the importer keeps it alive"
        assert maker.ask(f"alloc 0 physical {200 * MIB}") == OUT_OF_MEMORY
        taker.ok("free 0")
        maker.ok(f"alloc 0 physical {200 * MIB}")


def test_an_open_descriptor_keeps_memory_counted(tmp_path: Path) -> None:
    """The driver keeps what it stands for until the last copy of it is closed."""
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 physical {500 * MIB}")
        _pid, descriptor = worker.ok("share 0")
        held = box.machine.used(0)
        worker.ok("free 0")
        assert box.machine.used(0) == held
        assert worker.ask(f"alloc 1 physical {500 * MIB}") == OUT_OF_MEMORY
        worker.ok(f"shut {descriptor}")
        worker.ok(f"alloc 1 physical {500 * MIB}")


def test_what_a_green_context_took_outlives_it(tmp_path: Path) -> None:
    with container(tmp_path, cuda="13.0") as box, box.worker("proc2", 13000) as worker:
        worker.ok("start 0")
        worker.ok("alloc 0 green 0")
        worker.ok("enter 0")
        worker.ok(f"alloc 1 plain {500 * MIB}")
        worker.ok("current 0")
        held = box.machine.used(0)
        worker.ok("free 0")
        if box.machine.used(0) < held - 300 * MIB:
            pytest.skip("this driver frees a green context's memory with it")
        assert worker.ask(f"alloc 2 plain {500 * MIB}") == OUT_OF_MEMORY
        worker.ok("free 1")
        worker.ok(f"alloc 2 plain {500 * MIB}")


def test_what_a_context_seemed_to_take_is_corrected_whatever_is_current(tmp_path: Path) -> None:
    """Memory opened before there was one on its card stood in the driver's figure with the context's."""
    with container(tmp_path, cards=2) as box, box.worker() as maker, box.worker() as other:
        maker.ok("start 1")
        maker.ok(f"alloc 0 plain {34 * MIB}")
        other.ok("start 0")
        other.ok(f"import 0 {maker.ask('export 0').split()[1]}")
        maker.ok("free 0")
        other.ok("current 1")
        other.ok("current 0")
        other.ok("close 0")
        deadline = time.monotonic() + HANG_S
        while box.card(1).used_bytes != box.machine.used(1):
            assert time.monotonic() < deadline, (box.card(1).used_bytes, box.machine.used(1))
            other.ok("info")
            time.sleep(0.05)


@pytest.mark.parametrize("current", [-1, 1])
def test_memory_opened_by_ipc_is_let_go_whatever_is_current(tmp_path: Path, current: int) -> None:
    with container(tmp_path, cards=2) as box, box.worker() as maker, box.worker() as taker:
        maker.ok("start 0")
        taker.ok("start 0")
        maker.ok(f"alloc 0 plain {256 * MIB}")
        handle = maker.ask("export 0").split()[1]
        taker.ok(f"import 0 {handle}")
        taker.ok(f"current {current}")
        maker.ok("free 0")
        closed = taker.ask("close 0")
        if closed != "ok":  # as current drivers answer without a context: it stays open
            taker.ok("current 0")
            taker.ok("close 0")
        assert box.card().used_bytes == box.machine.used(0)


def test_an_exported_pools_memory_counts_while_somebody_has_it_open(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as maker, box.worker() as taker:
        maker.ok("start 0")
        taker.ok("start 0")
        maker.ok(f"alloc 0 pool {320 * MIB}")
        pid, descriptor = maker.ok("share-pool")
        block = maker.ask("share-block 0").split()[1]
        taker.ok(f"receive-pool 8 {pid} {descriptor}")
        taker.ok(f"receive-block 0 8 {block}")
        held = box.machine.used(0)
        maker.ok("free 0")
        maker.ok("sync")
        maker.ok("trim")
        if box.machine.used(0) < held:
            pytest.skip("this driver lets go of what an importer has open")
        assert maker.ask(f"alloc 1 plain {500 * MIB}") == OUT_OF_MEMORY
        taker.kill()
        maker.ok(f"alloc 1 plain {500 * MIB}")


@pytest.mark.parametrize("end", ["trim", "drop-pool"])
def test_what_an_exported_pool_keeps_with_a_block_counts_too(tmp_path: Path, end: str) -> None:
    """A pool grows in steps of 32 MiB, and a block that somebody has open keeps the whole of its last."""
    with container(tmp_path) as box, box.worker() as maker, box.worker() as taker:
        maker.ok("start 0")
        taker.ok("start 0")
        maker.ok(f"alloc 0 pool {300 * MIB}")
        pid, descriptor = maker.ok("share-pool")
        block = maker.ask("share-block 0").split()[1]
        taker.ok(f"receive-pool 8 {pid} {descriptor}")
        taker.ok(f"receive-block 0 8 {block}")
        maker.ok("free 0")
        maker.ok("sync")
        maker.ok(end)
        assert box.card().used_bytes >= box.machine.used(0)
        taker.kill()
        maker.ok(f"alloc 1 plain {700 * MIB}")
        assert box.card().used_bytes == box.machine.used(0)


def test_arrays_count_as_the_card_lays_them_out(tmp_path: Path) -> None:
    """2,048 layers of one byte: each takes a cell of 512 bytes."""
    with container(tmp_path, memory_mib=512) as box, box.worker() as worker:
        worker.ok("start 0")
        before = box.card().used_bytes
        worker.ok("array 0 1 1 2048")
        assert box.card().used_bytes - before == 2 * MIB
        worker.ok("array 1 8192 0 1024")
        assert box.card().used_bytes - before == 2 * MIB + 64 * MIB
        worker.ok("array 2 65 17 2048")
        assert box.card().used_bytes - before == 2 * MIB + 64 * MIB + 8 * MIB
        assert worker.ask("array 3 1 2 131072") in (OUT_OF_MEMORY, "error 1")


@pytest.mark.parametrize(
    ("shape", "mib"),
    [("1 1 2048", 16), ("64 8 2048", 16), ("65 8 512", 8), ("17 17 512", 16), ("65 8 640", 12)],
)
def test_small_arrays_share_pages_as_an_h100_showed(tmp_path: Path, shape: str, mib: int) -> None:
    """Sixteen of each; then all but one of a page are let go, and the page stays."""
    with container(tmp_path, memory_mib=512) as box, box.worker() as worker:
        worker.ok("start 0")
        before = box.card().used_bytes
        for number in range(16):
            worker.ok(f"array {number} {shape}")
        assert box.card().used_bytes - before == mib * MIB
        assert box.card().used_bytes == box.machine.used()
        for number in range(1, 16):
            worker.ok(f"free-array {number}")
        assert box.card().used_bytes - before == 2 * MIB
        assert box.card().used_bytes == box.machine.used()
        worker.ok("free-array 0")
        assert box.card().used_bytes == before == box.machine.used()


def test_an_array_that_is_refused_leaves_its_page_as_it_was(tmp_path: Path) -> None:
    with container(tmp_path, memory_mib=512) as box, box.worker() as worker:
        worker.ok("start 0")
        room = (512 * MIB - box.card().used_bytes) // MIB // 2 * 2
        worker.ok(f"alloc 0 plain {(room - 2) * MIB}")
        worker.ok("array 1 1 1 2048")
        worker.ok("array 2 1 1 2048")
        assert worker.ask("array 3 1 1 2048") == OUT_OF_MEMORY
        worker.ok("free-array 2")
        worker.ok("array 3 1 1 2048")
        assert box.card().used_bytes == box.machine.used() <= 512 * MIB


# ---- nobody is refused what there is room for


def test_pools_that_grow_at_once_are_counted_once(tmp_path: Path) -> None:
    """What eight threads of two processes hold of their pools together always fits."""
    with container(tmp_path, memory_mib=1536) as box, box.worker() as one, box.worker() as two:
        for worker in (one, two):
            worker.ok("start 0")
        for worker in (one, two):
            worker.say(f"threads 4 400 {30 * MIB} async")
        told = [[int(word) for word in worker.heard().split()[1:]] for worker in (one, two)]
    assert not any(refused or odd for _, refused, odd in told), f"granted, refused, odd: {told}"


# ---- processes that nobody here can see


def test_a_process_killed_in_a_pid_namespace_of_its_own_leaves_nothing(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as survivor:
        survivor.ok("start 0")
        with nested_worker(box) as nested:
            nested.ok("start 0")
            nested.ok(f"alloc 0 plain {300 * MIB}")
            assert survivor.ask(f"alloc 0 plain {500 * MIB}") == OUT_OF_MEMORY
            time.sleep(1.5)  # longer than anything waits that only looks dead
            assert survivor.ask(f"alloc 0 plain {500 * MIB}") == OUT_OF_MEMORY
            nested.ok("free 0")
            nested.ok(f"alloc 0 plain {300 * MIB}")
        until = time.monotonic() + HANG_S
        while survivor.ask(f"alloc 0 plain {500 * MIB}") != "ok":
            assert time.monotonic() < until, "what the dead held still counts"
            time.sleep(0.05)


def test_who_asks_just_then_waits_until_the_dead_is_known_to_be_gone(tmp_path: Path) -> None:
    """An end in another namespace is believed a second late; a newcomer was refused for that long."""
    with container(tmp_path) as box, box.worker() as survivor:
        survivor.ok("start 0")
        with nested_worker(box) as nested:
            nested.ok("start 0")
            nested.ok(f"alloc 0 plain {500 * MIB}")
            inner = first_child(nested.pid)
        while Path(f"/proc/{inner}").exists():
            time.sleep(0.001)
        survivor.ok(f"alloc 0 plain {500 * MIB}")
        assert survivor.ask(f"alloc 1 plain {500 * MIB}") == OUT_OF_MEMORY


def nested_worker(box: Container) -> Worker:
    start = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*start, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace of our own on this machine")
    return Worker([*start, str(BUILD / "tests/worker"), "dlsym", "12020"], box.environ())


def child_of_the_dead(box: Container) -> int:
    """PID of what a process with 400 MiB left behind: it has the driver's devices open."""
    with box.worker() as parent:
        parent.ok("start 0")
        parent.ok(f"alloc 0 plain {400 * MIB}")
        (child,) = parent.ok("idle-child")
    return child


def test_a_forked_child_keeps_its_dead_parents_memory_counted(tmp_path: Path) -> None:
    """It has the driver's devices open, so a real driver keeps the memory until it ends (seen on an H100)."""
    with container(tmp_path) as box, box.worker() as survivor:
        survivor.ok("start 0")
        child = child_of_the_dead(box)
        assert survivor.ask(f"alloc 0 plain {600 * MIB}") == OUT_OF_MEMORY
        os.kill(child, signal.SIGKILL)
        until = time.monotonic() + HANG_S
        while survivor.ask(f"alloc 0 plain {600 * MIB}") != "ok":
            assert time.monotonic() < until, "what the dead held still counts"
            time.sleep(0.01)


def test_who_asks_while_a_dead_process_is_being_taken_down_waits(tmp_path: Path) -> None:
    """Whatever has its memory open, a child or who reads of it in /proc, keeps its lock for a moment."""
    with container(tmp_path) as box, box.worker() as survivor:
        survivor.ok("start 0")
        child = child_of_the_dead(box)
        survivor.say(f"alloc 0 plain {600 * MIB}")
        os.kill(child, signal.SIGKILL)
        assert survivor.heard() == "ok"
