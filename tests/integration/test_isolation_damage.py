"""The region is the tenant's to write: whatever happens to the file under running processes, they go on and
write again what they hold, and the limit holds for all of them together once each has looked."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from gpuslice.adapters.region import layout
from gpuslice.adapters.region.limits import LimitsEntry, write_limits
from gpuslice.adapters.region.reader import Counts, RegionError, RegionFile, prepare_region, read_region
from gpuslice.apps.exporter.isolation import IsolationReader
from gpuslice.core.attribution import ContainerKey
from tests.integration.isolation_rig import (
    MIB,
    OUT_OF_MEMORY,
    SANITIZER,
    Container,
    Worker,
    container,
    make_container,
    make_machine,
)

LIMIT_MIB = 1300
A_LOOK_IS_DUE_S = 0.03
"""Each process looks at the file when a hundredth of a second has passed since it last did."""


def cut(keep: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, keep)


def overwrite(content: Callable[[], bytes]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with path.open("r+b") as file:
            file.write(content())

    return write


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_a_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "emptied": cut(0),
    "cut to a page": cut(4096),
    "cut by a byte": cut(layout.REGION_BYTES - 1),
    "zeros": overwrite(lambda: bytes(layout.REGION_BYTES)),
    "nonsense": overwrite(lambda: random.Random(4).randbytes(layout.REGION_BYTES)),
    "ones": overwrite(lambda: b"\xff" * layout.REGION_BYTES),
    "another version's magic": overwrite(lambda: (layout.MAGIC | 77).to_bytes(8, "little")),
    "removed": lambda path: path.unlink(missing_ok=True),
    "replaced": prepare_region,
}


def a_look_is_due() -> None:
    time.sleep(A_LOOK_IS_DUE_S)


@pytest.mark.parametrize("damage", DAMAGE)
def test_processes_go_on_and_count_together_again(tmp_path: Path, damage: str) -> None:
    with container(tmp_path, memory_mib=LIMIT_MIB) as box, box.worker() as one, box.worker() as two:
        for worker, size in ((one, 300), (two, 400)):
            worker.ok("start 0")
            worker.ok(f"alloc 0 plain {size * MIB}")
        DAMAGE[damage](box.region_path)
        a_look_is_due()
        one.ok("info")
        two.ok("info")
        assert_counted(box)
        assert one.ask(f"alloc 1 plain {400 * MIB}") == OUT_OF_MEMORY
        one.ok(f"alloc 1 plain {200 * MIB}")
        with box.worker() as late:
            late.ok("start 0")
            assert late.ask(f"alloc 0 plain {100 * MIB}") == OUT_OF_MEMORY
            two.ok("free 0")
            late.ok(f"alloc 0 plain {300 * MIB}")
            assert_counted(box)
        for worker in (one, two):
            assert worker.leave() == 0


def assert_counted(box: Container) -> None:
    assert box.card().used_bytes == box.machine.used()
    assert box.card().limit_bytes == LIMIT_MIB * MIB


@pytest.mark.parametrize("damage", [replace_by_a_folder, replace_by_a_link])
def test_where_no_file_can_be_the_mapped_one_serves_on(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with container(tmp_path, memory_mib=LIMIT_MIB) as box, box.worker() as one, box.worker() as two:
        for worker in (one, two):
            worker.ok("start 0")
            worker.ok(f"alloc 0 plain {300 * MIB}")
        damage(box.region_path)
        a_look_is_due()
        assert one.ask(f"alloc 1 plain {500 * MIB}") == OUT_OF_MEMORY
        two.ok("free 0")
        one.ok(f"alloc 1 plain {500 * MIB}")


def test_a_process_alone_knows_its_own_whatever_the_file_says(tmp_path: Path) -> None:
    """At once, not when a look is due: its slot bears another word than its own."""
    with container(tmp_path, memory_mib=LIMIT_MIB) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 plain {800 * MIB}")
        DAMAGE["zeros"](box.region_path)
        assert worker.ask(f"alloc 1 plain {500 * MIB}") == OUT_OF_MEMORY
        worker.ok("free 0")
        worker.ok(f"alloc 1 plain {400 * MIB}")
        assert_counted(box)


def test_bytes_that_stay_pending_hold_others_up_for_a_moment_only(tmp_path: Path) -> None:
    """Of a process stopped just then, or written by a tenant: what might not fit is refused in a second."""
    pending = (
        ctypes.sizeof(layout.RegionHead)
        + layout.RegionSlot.usage.offset
        + layout.RegionUsage.pending_bytes.offset
    )
    with container(tmp_path, memory_mib=LIMIT_MIB) as box, box.worker() as one, box.worker() as two:
        for worker in (one, two):
            worker.ok("start 0")
        for amount, answer in ((LIMIT_MIB * MIB, OUT_OF_MEMORY), (0, "ok")):
            with box.region_path.open("r+b") as region:
                region.seek(pending)
                region.write(amount.to_bytes(8, "little"))
            assert two.ask(f"alloc 0 plain {300 * MIB}") == answer


@pytest.mark.parametrize("damage", ["zeros", "nonsense", "replaced", "removed"])
def test_nothing_is_lost_or_counted_twice_by_threads_meanwhile(tmp_path: Path, damage: str) -> None:
    with container(tmp_path, memory_mib=LIMIT_MIB) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 plain {200 * MIB}")
        worker.say(f"threads 4 20000 {5 * MIB}")
        for _ in range(25):
            time.sleep(0.005)
            DAMAGE[damage](box.region_path)
        granted, refused, odd = map(int, worker.heard().split()[1:])
        assert (granted + refused, odd) == (4 * 20000, 0)
        assert granted > refused
        a_look_is_due()
        worker.ok("info")
        assert_counted(box)


@pytest.mark.skipif(bool(SANITIZER), reason="a sanitizer's runtime reports SIGBUS in its own way")
def test_a_file_cut_short_in_the_middle_of_a_call_harms_no_neighbour(tmp_path: Path) -> None:
    """The one thing that cannot be undone from within: a process that writes there before it looks again. The
    tenant has harmed itself: its neighbours, the readers outside and its own next process go on."""
    machine = make_machine(tmp_path)
    box = make_container(tmp_path / "box", machine, memory_mib=LIMIT_MIB)
    next_door = make_container(tmp_path / "next", machine, memory_mib=LIMIT_MIB)
    reader = RegionFile(box.region_path)
    with next_door.worker() as neighbour, box.worker() as victim:
        neighbour.ok("start 0")
        victim.ok("start 0")
        victim.say(f"threads 2 400000 {5 * MIB}")
        for _ in range(200):
            os.truncate(box.region_path, 0)
            look_from_outside(reader)
            neighbour.ok(f"alloc 0 plain {100 * MIB}")
            neighbour.ok("free 0")
        assert_died_of_the_file_or_lives(victim)
        with box.worker() as heir:
            heir.ok("start 0")
            heir.ok(f"alloc 0 plain {500 * MIB}")
            assert box.machine.used() == box.card().used_bytes + next_door.card().used_bytes
    reader.close()


async def test_a_region_cut_short_is_one_named_problem_of_the_exporter_and_hides_no_limit(
    tmp_path: Path,
) -> None:
    limits = [LimitsEntry("GPU-1", 1 << 30)]
    for name in ("whole", "short"):
        folder = tmp_path / "containers" / name
        (folder / "etc").mkdir(parents=True)
        (folder / "var").mkdir()
        write_limits(folder / "etc/limits", limits)
        owner = {"namespace": "n", "pod": name, "container": "main", "earlier": {"GPU-1": {"refused": 3}}}
        (folder / "owner.json").write_text(json.dumps(owner))
        prepare_region(folder / "var/region")
    os.truncate(tmp_path / "containers/short/var/region", 100)
    found = await IsolationReader(tmp_path).read()
    for name in ("whole", "short"):
        assert found.limit(ContainerKey("n", name, "main"), "GPU-1") == limits[0]
    whole, short = (ContainerKey("n", name, "main") for name in ("whole", "short"))
    assert found.counts(whole, "GPU-1") == Counts(refused=3)
    assert found.uses_nothing(whole, "GPU-1")
    assert found.counts(short, "GPU-1") is None, "a counter that falls would count from the beginning"
    assert not found.uses_nothing(short, "GPU-1")
    (problem,) = found.problems
    assert "containers/short: a region has" in problem


def look_from_outside(reader: RegionFile) -> None:
    """It sees a region, or says what it sees instead."""
    with suppress(RegionError):
        reader.cards()


def assert_died_of_the_file_or_lives(victim: Worker) -> None:
    if victim.said_nothing():
        assert victim.leave() == -signal.SIGBUS
    else:
        assert victim.leave() == 0


def test_no_other_file_is_opened_to_everybody(tmp_path: Path) -> None:
    """A name made to lead to another empty file: it is left alone, and nothing is granted."""
    with container(tmp_path, memory_mib=LIMIT_MIB) as box:
        secret = tmp_path / "secret"
        secret.touch(mode=0o600)
        box.region_path.unlink()
        box.region_path.hardlink_to(secret)
        with box.worker() as worker:
            assert worker.ask("start 0") == OUT_OF_MEMORY
        assert secret.stat().st_mode & 0o777 == 0o600
        assert secret.stat().st_size == 0


def test_a_program_that_changes_its_root_keeps_its_books(tmp_path: Path) -> None:
    with container(tmp_path, memory_mib=LIMIT_MIB) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 plain {300 * MIB}")
        box.root.rename(tmp_path / "elsewhere")
        a_look_is_due()
        worker.ok(f"alloc 1 plain {300 * MIB}")
        assert worker.ask(f"alloc 2 plain {600 * MIB}") == OUT_OF_MEMORY
        reading = read_region(tmp_path / "elsewhere/var/lib/gpuslice/region")
        assert reading is not None
        assert reading.cards[0].used_bytes == box.machine.used()
