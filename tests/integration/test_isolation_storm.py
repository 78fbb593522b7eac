"""Random histories of a container's processes, some killed in the middle of a call: whatever happened,
the region says what the driver's accounts say, and the limit was never passed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import HANG_S
from tests.integration.isolation_rig import MIB, OUT_OF_MEMORY, Container, Worker, container

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
