"""The virtual loop: what happens in it happens alike each time, and who never waits is named."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.integration.virtual import Process, VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    asyncio.set_event_loop(made)
    yield made
    made.close()
    asyncio.set_event_loop(None)


def test_two_that_wait_for_a_moment_find_the_clock_there(loop: VirtualLoop) -> None:
    """asyncio runs a timer up to a nanosecond early. In real time that passes; here it did not, and two who
    looked at the clock and waited again kept each other turning."""

    async def until(deadline_s: float) -> float:
        while loop.time() < deadline_s:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await asyncio.Event().wait()
            except TimeoutError:
                continue
        return loop.time()

    loop.advance(459.9)
    deadline_s = 459.9 + 1e-10
    first = Process("agent n1", loop).start(until(deadline_s), "call")
    loop.turn()
    second = Process("agent n2", loop).start(until(deadline_s), "call")
    loop.advance(0.0)
    assert first.result() == second.result() == deadline_s


def test_who_turns_without_waiting_is_named(loop: VirtualLoop) -> None:
    async def turn() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    process = Process("agent n1", loop)
    process.start(turn(), "sweeper")
    with pytest.raises(AssertionError, match=r"agent n1: sweeper at tests\.integration\.test_virtual:\d+"):
        loop.settle()
    process.kill()


def test_sets_of_tasks_are_walked_in_the_order_in_which_the_tasks_began(loop: VirtualLoop) -> None:
    tasks = [Process("agent", loop).start(asyncio.sleep(0), str(number)) for number in range(8)]
    assert [task.get_name() for task in {*reversed(tasks)}] == [task.get_name() for task in tasks]
    loop.settle()
