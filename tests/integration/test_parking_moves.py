"""A container's processes are taken off their card and put back together, whoever dies in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gpuslice.apps.agent.parking.checkpointer import Checkpointer, ProcessState
from gpuslice.apps.agent.parking.mover import Mover
from simcluster import gpu

from .sim_driver_client import BUILD, MIB, DriverProcess, given, out

CYCLES = int(os.environ.get("GPUSLICE_PARKING_CYCLES", "25"))
CHECKPOINTED, RUNNING = ProcessState.CHECKPOINTED, ProcessState.RUNNING


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return gpu.create(tmp_path / "state", ["V100-SXM2-16GB"], driver="580")


@pytest.fixture
def holders(state: Path) -> Iterator[list[DriverProcess]]:
    with DriverProcess(state) as one, DriverProcess(state) as other:
        yield [one.start(), other.start()]


@contextlib.asynccontextmanager
async def mover(state: Path) -> AsyncIterator[tuple[Mover, Checkpointer]]:
    calls = Checkpointer(state.parent / "lock", gpu.environment(state, BUILD))
    yield Mover(calls), calls
    await calls.close()


def pids(holders: list[DriverProcess]) -> list[int]:
    return [each.pid for each in holders]


def used(state: Path) -> int:
    with gpu.Machine(state) as machine:
        return machine.used_bytes()


async def test_processes_leave_the_card_together_and_come_back(
    state: Path, holders: list[DriverProcess]
) -> None:
    for each in holders:
        each.alloc(10 * MIB)
    before = used(state)
    async with mover(state) as (moves, _):
        assert await moves.park(pids(holders)) == ""
        assert set((await moves.states(pids(holders))).values()) == {CHECKPOINTED}
        assert used(state) == 0
        assert await moves.wake(pids(holders)) == ""
    assert used(state) == before
    holders[0].alloc(MIB)


async def test_if_one_cannot_be_parked_all_run_again(state: Path, holders: list[DriverProcess]) -> None:
    holders[1].cu("cuMemAllocManaged", out(), 2 * MIB, 1)
    before = used(state)
    async with mover(state) as (moves, _):
        assert "managed memory" in await moves.park(pids(holders))
        assert set((await moves.states(pids(holders))).values()) == {RUNNING}
    assert used(state) == before


async def test_work_that_does_not_end_keeps_all_of_them_running(
    state: Path, holders: list[DriverProcess]
) -> None:
    holders[1].launch(holders[1].kernel(), 30_000_000_000)
    async with mover(state) as (_, calls):
        moves = Mover(calls, lock_ms=10)
        assert "its work did not end in time" in await moves.park(pids(holders))
        assert set((await moves.states(pids(holders))).values()) == {RUNNING}


async def test_a_process_that_has_ended_or_uses_no_card_is_in_nobodys_way(
    state: Path, holders: list[DriverProcess]
) -> None:
    gone = holders[1].pid
    holders[1].kill()
    async with mover(state) as (moves, _):
        assert await moves.park([holders[0].pid, gone, os.getpid()]) == ""
        assert await moves.states([holders[0].pid, gone]) == {holders[0].pid: CHECKPOINTED}
        assert await moves.wake([holders[0].pid, gone]) == ""


async def test_a_driver_without_these_calls_is_told_by_a_sentence(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "state", ["H200"], driver="535")
    with DriverProcess(state) as one:
        one.start()
        async with mover(state) as (moves, _):
            assert "older than 570" in await moves.park([one.pid])


async def test_what_the_helper_had_locked_runs_again_when_the_agent_has_ended(
    state: Path, holders: list[DriverProcess]
) -> None:
    async with mover(state) as (_, calls):
        await calls.lock(holders[0].pid, 0)
    holders[0].alloc(MIB)


async def test_whoever_dies_in_the_midst_no_byte_is_lost(state: Path) -> None:
    """Cycles with faults: GPUSLICE_PARKING_CYCLES=100000 plays as many."""
    dice = random.Random(7)
    holders = [Contents(state, dice), Contents(state, dice)]
    async with mover(state) as (moves, calls):
        for _ in range(CYCLES):
            at = pids([each.process for each in holders])
            if dice.random() < 0.2:
                await calls.close()  # there is one agent at a time
                await agent_that_ends(state, at, dice)
            fault = asyncio.create_task(end_helper(calls, dice))
            parked = await moves.park(at)
            found = set((await moves.states(at)).values())
            assert found == ({RUNNING} if parked else {CHECKPOINTED})
            if not parked:
                assert used(state) == 0
            assert await moves.wake(at) == ""
            await fault
            assert set((await moves.states(at)).values()) == {RUNNING}
            for each in holders:
                each.check()
            if dice.random() < 0.02:  # and a container that starts again
                holders[0].process.kill()
                holders[0] = Contents(state, dice)
    for each in holders:
        each.process.kill()


async def agent_that_ends(state: Path, at: list[int], dice: random.Random) -> None:
    """In the midst of a move; the next one finds out by the driver how far it came."""
    async with mover(state) as (moves, _):
        move = asyncio.create_task(moves.park(at))
        await asyncio.sleep(dice.random() * 0.3)
        move.cancel()
        await asyncio.gather(move, return_exceptions=True)
    async with mover(state) as (moves, _):
        assert await moves.wake(at) == ""


async def end_helper(calls: Checkpointer, dice: random.Random) -> None:
    """Often at some moment of a move."""
    if dice.random() < 0.3 and calls.pid is not None:
        pid = calls.pid
        await asyncio.sleep(dice.random() * 0.03)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)


class Contents:
    """A process that knows what it wrote to its card."""

    def __init__(self, state: Path, dice: random.Random) -> None:
        self.process = DriverProcess(state).start()
        self._dice = dice
        self._at = self.process.alloc(8 * MIB)
        self._written: dict[int, bytes] = {}

    def check(self) -> None:
        for place, data in self._written.items():
            found = self.process.cu("cuMemcpyDtoH_v2", out(len(data)), self._at + place, len(data)).bytes[0]
            assert found == data
        place, data = 64 * self._dice.randrange(1000), self._dice.randbytes(64)
        self.process.cu("cuMemcpyHtoD_v2", self._at + place, given(data), len(data))
        self._written[place] = data
        if len(self._written) > 20:
            del self._written[next(iter(self._written))]
