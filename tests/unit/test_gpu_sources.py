"""Where cards are read from: recordings, and a worker that outlives a driver that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path

import pytest

from gpuslice.adapters.gpu.recorded import RecordedSource, record
from gpuslice.adapters.gpu.source import DriverCard, GpuUnavailableError, Inventory, LostCard, XidEvent
from gpuslice.adapters.gpu.worker import BlockingWorker
from tests import HANG_S

CARDS = (DriverCard(2, "GPU-b", 15079, "Tesla T4"), DriverCard(0, "GPU-a", 16130, "Tesla V100-SXM2-16GB"))


async def test_a_recording_gives_back_what_was_recorded(tmp_path: Path) -> None:
    file = tmp_path / "cards.json"
    record(Inventory(CARDS, (LostCard(1, "GPU is lost"),), "418.87"), file)
    found = await RecordedSource(file).inventory()
    assert [card.index for card in found.cards] == [0, 2]
    assert set(found.cards) == set(CARDS)
    assert found.lost == (LostCard(1, "GPU is lost"),)
    assert found.driver_version == "418.87"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"cards": 3}',
        b'{"card": []}',
        b'{"cards": [{"index": "x"}]}',
        b'{"driver_version": "\xff"}',
    ],
)
async def test_a_broken_recording_is_a_driver_that_cannot_be_asked(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "cards.json"
    file.write_bytes(text)
    with pytest.raises(GpuUnavailableError, match=r"cards\.json"):
        await RecordedSource(file).inventory()


async def test_events_at_the_end_of_a_recording_happen_once(tmp_path: Path) -> None:
    file = tmp_path / "cards.json"
    file.write_text('{"events": [{"xid": 79, "uuid": "GPU-a"}]}')
    async with contextlib.aclosing(RecordedSource(file, poll_s=0.01).events()) as events:
        assert await anext(events) == XidEvent(79, "GPU-a")
        file.write_text('{"events": [{"xid": 79, "uuid": "GPU-a"}, {"xid": 48}]}')
        assert await anext(events) == XidEvent(48)


async def test_a_call_that_hangs_is_given_up_and_the_next_ones_are_refused_at_once() -> None:
    worker, go = BlockingWorker("driver"), threading.Event()
    with pytest.raises(GpuUnavailableError, match=r"driver: no answer within 0\.05 s"):
        await worker.call(go.wait, 0.05)
    threads, said = threading.active_count(), set[str]()
    for _ in range(3):
        with pytest.raises(GpuUnavailableError, match="has not come back since") as refused:
            await worker.call(lambda: 1, 5)
        said.add(str(refused.value))
        await asyncio.sleep(0.6)
    assert len(said) == 1, "each second of a hanging driver would be news to who logs what is new"
    assert threading.active_count() == threads
    go.set()
    async with asyncio.timeout(HANG_S):
        while True:
            with contextlib.suppress(GpuUnavailableError):
                assert await worker.call(lambda: 7, 1) == 7
                break
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("timeout_s", [0, 0.01])
async def test_an_answer_that_came_while_the_loop_stood_still_is_an_answer(timeout_s: float) -> None:
    """A frozen machine: the driver answered, and its time was over before anybody could look."""
    worker, go, answered = BlockingWorker("driver"), threading.Event(), threading.Event()
    first = asyncio.create_task(worker.call(lambda: go.wait(10), timeout_s))
    second = asyncio.create_task(worker.call(answered.set, 5))  # after the first, in the same thread
    await asyncio.sleep(0)
    go.set()
    assert answered.wait(10)
    time.sleep(0.02)  # noqa: ASYNC251
    assert await first is True
    assert await worker.call(lambda: 7, 5) == 7
    await second


async def test_a_call_in_clean_up_is_given_up_as_well() -> None:
    """A task that has been cancelled closes the driver: it must hear that the driver does not answer."""
    worker, go = BlockingWorker("driver"), threading.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            with pytest.raises(GpuUnavailableError, match=r"driver: no answer within 0\.01 s"):
                await worker.call(go.wait, 0.01)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()


async def test_an_error_of_a_call_reaches_its_caller() -> None:
    worker = BlockingWorker("driver")
    with pytest.raises(ZeroDivisionError):
        await worker.call(lambda: 1 // 0, 1)

    def too_late() -> None:
        raise TimeoutError("the driver's own")

    with pytest.raises(TimeoutError, match="the driver's own"):
        await worker.call(too_late, 1)
    assert await worker.call(lambda: "fine", 1) == "fine"
