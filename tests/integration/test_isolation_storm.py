"""Random histories of a container's processes, some killed in the middle of a call: whatever happened,
the region says what the driver's accounts say, and the limit was never passed."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuslice.adapters.region import layout
from simcluster import gpu_layout
from tests import HANG_S
from tests.integration.isolation_rig import (
    MIB,
    OUT_OF_MEMORY,
    Container,
    Worker,
    container,
    make_container,
    make_machine,
)

LIMIT_MIB = 1200
PROCESSES = 4
STEPS = 150
KINDS = ("plain", "pitch", "managed", "async", "pool", "physical", "mapped", "array", "array3d", "mipmap")


class Player:
    """One process of the story, and what the test knows that it holds."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.held: dict[int, str] = {}
        self.ready = False
        self.last = 0

    def step(self, dice: random.Random) -> None:
        if not self.ready:
            self.ready = self.worker.ask("start 0") == "ok"
        elif self.held and dice.random() < 0.45:
            self.worker.ok(f"free {self._pick(dice)}")
        else:
            self._allocate(dice)

    def _pick(self, dice: random.Random) -> int:
        number = dice.choice(sorted(self.held))
        del self.held[number]
        return number

    def _allocate(self, dice: random.Random) -> None:
        kind = dice.choice(KINDS)
        size = dice.choice((1, 4096, MIB, 3 * MIB, 33 * MIB, 150 * MIB))
        if kind in ("physical", "mapped"):  # the driver wants whole pages
            size = max(size // (2 * MIB), 1) * 2 * MIB
        if kind in ("array", "array3d", "mipmap"):  # and the worker makes them of whole blocks
            size = max(size, 8 * MIB)
        self.last += 1
        answer = self.worker.ask(f"alloc {self.last} {kind} {size}")
        assert answer in ("ok", OUT_OF_MEMORY), f"{kind} of {size}: {answer}"
        if answer == "ok":
            self.held[self.last] = kind


def eventually(condition: Callable[[], bool]) -> bool:
    """A killed process is gone for us when the kernel has taken it down, which takes its time."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def assert_books_agree(box: Container, players: list[Player]) -> None:
    """After everybody has come to rest, and somebody has looked for the dead."""
    for player in players:
        if player.ready:
            player.worker.ok("sync")
            player.worker.ok("info")
    assert box.card().used_bytes == box.machine.used()


@pytest.mark.parametrize("seed", range(6))
def test_the_books_agree_to_the_byte(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    with container(tmp_path, memory_mib=LIMIT_MIB) as box:
        players = [Player(box.worker()) for _ in range(PROCESSES)]
        try:
            for number in range(STEPS):
                dice.choice(players).step(dice)
                assert box.machine.used() <= LIMIT_MIB * MIB
                if number % 10 == 9:
                    assert_books_agree(box, players)
            assert box.card().refused > 0
        finally:
            for player in players:
                player.worker.kill()


@pytest.mark.parametrize("seed", range(6))
def test_processes_killed_at_any_moment_leave_nothing_behind(tmp_path: Path, seed: int) -> None:
    """The victim is in the middle of allocating and freeing with many threads when it dies."""
    dice = random.Random(seed)
    with container(tmp_path, memory_mib=LIMIT_MIB) as box:
        survivor = Player(box.worker())
        survivor.step(dice)
        try:
            for _ in range(12):
                with box.worker() as victim:
                    victim.ok("start 0")
                    victim.say(f"threads {dice.choice((1, 4))} 1000000 {dice.choice((1, 5, 90)) * MIB}")
                    time.sleep(dice.uniform(0.0, 0.02))  # any moment will do
                    survivor.step(dice)
                    assert box.machine.used() <= LIMIT_MIB * MIB
                    victim.kill()
                survivor.step(dice)
            gone = eventually(lambda: bool(survivor.worker.ok("info")) and one_process(box))
            assert gone, box.card()
            assert_books_agree(box, [survivor])
        finally:
            survivor.worker.kill()


def one_process(box: Container) -> bool:
    return len(box.card().processes) == 1


def stop_at_some_line(box: Container, worker: Worker, dice: random.Random) -> None:
    """Not while it has the lock of the simulated driver: a kernel's driver keeps none over a stop."""
    stat, lock = Path(f"/proc/{worker.pid}/stat"), gpu_layout.State.lock
    with box.machine.state.open("rb", buffering=0) as state:
        while True:
            time.sleep(dice.uniform(0.0, 0.01))
            os.kill(worker.pid, signal.SIGSTOP)
            assert eventually(lambda: stat.read_text().rpartition(") ")[2][0] == "T")
            state.seek(lock.offset)
            if not any(state.read(lock.size)):
                return
            os.kill(worker.pid, signal.SIGCONT)


@pytest.mark.parametrize("share", [None, 40])
def test_a_process_stopped_at_any_line_keeps_nobody_waiting(tmp_path: Path, share: int | None) -> None:
    """Neither the container's other processes nor its neighbours. Once it is killed, all it had is free."""
    dice = random.Random(7)
    machine = make_machine(tmp_path, kernel_us=200)
    box, next_door = (make_container(tmp_path / name, machine, share=share) for name in ("box", "next"))
    with box.worker() as other, next_door.worker() as neighbour:
        other.ok("start 0")
        neighbour.ok("start 0")
        for number in range(16):
            with box.worker() as victim:
                victim.ok("start 0")
                victim.say("burn 1000000 1 0" if number % 2 else f"threads 3 100000000 {MIB}")
                stop_at_some_line(box, victim, dice)
                began = time.monotonic()
                for worker in (other, neighbour):
                    worker.ok(f"alloc 0 plain {500 * MIB}")
                    worker.ok("free 0")
                    worker.ok("burn 10 1 0")
                assert time.monotonic() - began < 10  # 0.3 s at the most in 500 stops
                victim.kill()
            other.ok(f"alloc 0 plain {800 * MIB}")
            other.ok("free 0")


def fill_region(box: Container) -> None:
    """Each slot as if its first process had taken that, too: a thousand processes would be slow to start."""
    slot_bytes = ctypes.sizeof(layout.RegionSlot)
    with box.region_path.open("r+b") as region:
        region.seek(layout.REGION_BYTES - layout.SLOTS * slot_bytes)
        first = region.read(slot_bytes)[: layout.RegionSlot.in_flight.offset].ljust(slot_bytes, b"\0")
        region.write(first * (layout.SLOTS - 1))
        region.seek(layout.RegionHead.slots_high.offset)
        region.write(layout.SLOTS.to_bytes(8, "little"))


def test_more_processes_than_the_region_holds_are_refused_until_others_end(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as newcomer:
        with box.worker() as holder:
            holder.ok("start 0")
            held = box.machine.used()
            fill_region(box)
            assert newcomer.ask("start 0") == OUT_OF_MEMORY
            assert (box.machine.used(), box.card().refused) == (held, 1)
        newcomer.ok("start 0")
        assert box.card().used_bytes == box.machine.used()


def test_many_processes_that_come_and_go_leave_an_empty_region(tmp_path: Path) -> None:
    with container(tmp_path, memory_mib=LIMIT_MIB) as box:
        for generation in range(8):
            workers = [box.worker() for _ in range(4)]
            for worker in workers:
                worker.ok("start 0")
                worker.ok(f"alloc 0 plain {100 * MIB}")
            for number, worker in enumerate(workers):
                if (number + generation) % 2:
                    worker.kill()
                else:
                    assert worker.leave() == 0
        with box.worker() as last:
            last.ok("start 0")
            assert eventually(lambda: bool(last.ok("info")) and one_process(box))
            assert box.card().used_bytes == box.machine.used()
