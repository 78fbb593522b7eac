"""The sweeper and what tenants leave behind: it ends for nothing, and holds up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.owner import Owner
from gpuslice.apps.agent.sweeper import Sweeper
from tests import HANG_S
from tests.builders import make_node

CALM: Any = SimpleNamespace(problem="")  # a reconciler that has read kubelet's list


class Thought(Folders):
    """Where a tenant has thought of something that nobody else did."""

    left = 3
    asked = 0

    def owners(self) -> Iterator[tuple[str, Owner, float]]:
        self.asked += 1
        if self.left:
            self.left -= 1
            raise RecursionError("maximum recursion depth exceeded")
        return super().owners()


async def test_the_sweeper_goes_on_whatever_a_sweep_ended_with(tmp_path: Path) -> None:
    folders = Thought(tmp_path, boot="this")
    sweeper = Sweeper(AllocationState(make_node()), CALM, folders, every_s=0.001)
    task = asyncio.create_task(sweeper.run())
    async with asyncio.timeout(HANG_S):
        while folders.asked < 6:
            assert not task.done()
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_loop_goes_on_while_files_without_number_are_removed(tmp_path: Path) -> None:
    folders = Folders(tmp_path, boot="this")
    name = folders.prepare(["GPU-a-_-0"])
    for number in range(20_000):
        (tmp_path / "containers" / name / "var" / str(number)).touch()
    folders.discard(name)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    turning = asyncio.create_task(turn())
    await asyncio.sleep(0)
    before = turns
    await Sweeper(AllocationState(make_node()), CALM, folders).sweep()
    turning.cancel()
    assert turns - before > 20


async def test_a_folder_that_cannot_be_removed_keeps_no_other_and_no_trash(tmp_path: Path) -> None:
    """Where a disk is full, what frees it must not wait for what fails because of that."""
    folders = Folders(tmp_path, boot="this")
    first, second = sorted(folders.prepare([f"GPU-a-_-{unit}"]) for unit in (0, 1))
    (tmp_path / "cards" / "GPU-a" / first).mkdir(parents=True)
    (tmp_path / "cards" / "GPU-a" / first / "left by nobody").touch()
    sweeper = Sweeper(AllocationState(make_node()), CALM, folders, after_s=0.0)
    with pytest.raises(OSError, match="not empty"):
        await sweeper.sweep()
    assert not (tmp_path / "containers" / second).exists()
    assert list((tmp_path / "trash").iterdir()) == []
