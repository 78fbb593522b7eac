"""What waits for a stream and what does not: frees, pools' blocks, the ends of contexts."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simcluster import gpu

from .sim_driver_client import BUILD, MIB, DriverProcess, out, pool_on_device

NON_BLOCKING = 1
OUT_OF_MEMORY, NOT_READY = 2, 600
FOLLOW_EVENTS, OPPORTUNISTIC, INTERNAL, RELEASE_THRESHOLD, RESERVED = 1, 2, 3, 4, 5
LONG_NS, SHORT_NS = 20_000_000_000, 1_000_000
BLOCK = 600 * MIB


class Streams:
    """A process with two streams, and a pool that keeps what it has."""

    def __init__(self, process: DriverProcess) -> None:
        self.process = process
        self.kernel = process.kernel()
        self.one, self.other = (process.cu("cuStreamCreate", out(), NON_BLOCKING).number() for _ in range(2))
        self.pool = process.cu("cuMemPoolCreate", out(), pool_on_device()).number()
        self.set(RELEASE_THRESHOLD, 1 << 40, 8)

    def set(self, attribute: int, value: int, size: int = 4) -> None:
        content = {"in": value.to_bytes(size, "little").hex()}
        self.process.cu("cuMemPoolSetAttribute", self.pool, attribute, content)

    def reserved(self) -> int:
        return self.process.cu("cuMemPoolGetAttribute", self.pool, RESERVED, out()).number()

    def take(self, stream: int, size: int = BLOCK) -> int:
        return self.process.cu("cuMemAllocFromPoolAsync", out(), size, self.pool, stream).number()

    def give(self, stream: int, size: int = BLOCK, work_ns: int = LONG_NS) -> int:
        """Takes a block on the stream, works, and frees it; returns its address."""
        address = self.take(stream, size)
        self.process.launch(self.kernel, work_ns, stream)
        self.process.cu("cuMemFreeAsync", address, stream)
        return address

    def event(self, stream: int) -> int:
        event = self.process.cu("cuEventCreate", out(), 0).number()
        self.process.cu("cuEventRecord", event, stream)
        return event

    def is_reached(self, event: int) -> bool:
        return self.process.call("cuEventQuery", event).result != NOT_READY


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[Streams]:
    with DriverProcess(gpu.create(tmp_path / "state", ["V100-SXM2-16GB"])) as process:
        yield Streams(process.start())


def fill(streams: Streams) -> None:
    """Leaves less than a block of the card free."""
    free, _ = streams.process.memory()
    streams.process.alloc(free - BLOCK // 2)


def test_a_freed_block_is_its_own_streams_at_once_and_anothers_not(streams: Streams) -> None:
    freed = streams.give(streams.one)
    held = streams.reserved()
    assert streams.take(streams.one) == freed
    assert streams.reserved() == held
    streams.process.cu("cuMemFreeAsync", freed, streams.one)
    assert streams.take(streams.other) != freed
    assert streams.reserved() > held


@pytest.mark.parametrize("allowed", [1, 0])
def test_a_stream_behind_the_free_by_an_event_takes_the_block_unless_forbidden(
    streams: Streams, allowed: int
) -> None:
    streams.set(FOLLOW_EVENTS, allowed)
    freed = streams.give(streams.one)
    streams.process.cu("cuStreamWaitEvent", streams.other, streams.event(streams.one), 0)
    assert (streams.take(streams.other) == freed) == bool(allowed)


@pytest.mark.parametrize("allowed", [1, 0])
def test_a_block_whose_stream_got_to_the_free_is_everybodys_unless_forbidden(
    streams: Streams, allowed: int
) -> None:
    streams.set(OPPORTUNISTIC, allowed)
    freed = streams.give(streams.one, work_ns=300 * SHORT_NS)  # it must still work when the free is queued
    event = streams.event(streams.one)
    while not streams.is_reached(event):
        pass
    assert (streams.take(streams.other) == freed) == bool(allowed)


def test_a_synchronization_gives_such_blocks_to_everybody(streams: Streams) -> None:
    streams.set(OPPORTUNISTIC, 0)
    freed = streams.give(streams.one, work_ns=SHORT_NS)
    streams.process.cu("cuStreamSynchronize", streams.one)
    assert streams.take(streams.other) == freed


def test_on_a_full_card_a_stream_waits_for_anothers_block(streams: Streams) -> None:
    freed = streams.give(streams.one)
    fill(streams)
    assert streams.take(streams.other) == freed
    assert not streams.is_reached(streams.event(streams.other))


def test_on_a_full_card_a_stream_that_may_not_wait_is_refused(streams: Streams) -> None:
    streams.set(INTERNAL, 0)
    streams.give(streams.one)
    fill(streams)
    reply = streams.process.call("cuMemAllocFromPoolAsync", out(), BLOCK, streams.pool, streams.other)
    assert reply.result == OUT_OF_MEMORY


def test_trimming_leaves_what_a_stream_is_still_to_free(streams: Streams) -> None:
    streams.give(streams.one, work_ns=SHORT_NS)
    streams.process.cu("cuStreamSynchronize", streams.one)
    streams.give(streams.other)
    second = streams.give(streams.one)
    assert second
    held = streams.reserved()
    streams.process.cu("cuMemPoolTrimTo", streams.pool, 0)
    assert streams.reserved() == held


def test_a_destroyed_pool_holds_memory_until_its_streams_have_freed_it(streams: Streams) -> None:
    free, _ = streams.process.memory()
    streams.give(streams.one, work_ns=100 * SHORT_NS)
    streams.process.cu("cuMemPoolDestroy", streams.pool)
    assert streams.process.memory()[0] < free
    streams.process.cu("cuStreamSynchronize", streams.one)
    assert streams.process.memory()[0] == free


def test_a_free_waits_for_the_contexts_work_and_that_of_a_pools_block_does_not(streams: Streams) -> None:
    plain, block = streams.process.alloc(MIB), streams.take(streams.other)
    streams.process.launch(streams.kernel, 100 * SHORT_NS, streams.one)
    event = streams.event(streams.one)
    streams.process.cu("cuMemFree_v2", block)
    assert not streams.is_reached(event)
    streams.process.cu("cuMemFree_v2", plain)
    assert streams.is_reached(event)


def test_a_contexts_end_waits_for_its_own_work_alone(streams: Streams) -> None:
    process = streams.process
    process.launch(streams.kernel, LONG_NS, streams.one)
    elsewhere = streams.event(streams.one)
    context = process.cu("cuCtxCreate_v2", out(), 0, 0).number()
    stream = process.cu("cuStreamCreate", out(), NON_BLOCKING).number()
    process.launch(process.kernel(), 100 * SHORT_NS, stream)
    began_ns = time.monotonic_ns()
    process.cu("cuCtxDestroy_v2", context)
    assert time.monotonic_ns() - began_ns > 50 * SHORT_NS
    assert not streams.is_reached(elsewhere)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("cuCtxSynchronize", ()), ("cuMemAlloc_v2", (out(), MIB)), ("cuMemPoolTrimTo", (0, 0))],
)
def test_a_call_that_may_wait_ends_a_process_in_which_a_lock_is_held(
    tmp_path: Path, name: str, arguments: tuple[object, ...]
) -> None:
    state = gpu.create(tmp_path / "state", ["V100-SXM2-16GB"])
    with DriverProcess(state, LD_PRELOAD=str(BUILD.parent / "tests/holding.so")) as process:
        process.start()
        process.cu("cuStreamQuery", 0)
        with pytest.raises(ValueError, match="Expecting value"):
            process.call(name, *arguments)
        assert process.process.wait() == -signal.SIGABRT
