"""A limit below the card is felt as a smaller card: streams wait where they would there, callers do not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import HANG_S

from .isolation_rig import MIB, SIM, Container, container
from .sim_driver_client import DriverProcess, out, pool_on_device
from .test_sim_driver_order import BLOCK, LONG_NS, OUT_OF_MEMORY, SHORT_NS, Streams

OWN_STREAM = 2
"""CU_STREAM_PER_THREAD."""


@contextmanager
def program(box: Container, **more: str) -> Iterator[DriverProcess]:
    with DriverProcess(
        box.machine.state, **{**box.environ(), "LD_LIBRARY_PATH": str(SIM), **more}
    ) as process:
        yield process.start()


@contextmanager
def streams(folder: Path, limit_mib: int, **more: str) -> Iterator[tuple[Container, Streams]]:
    with container(folder, memory_mib=limit_mib) as box, program(box, **more) as process:
        yield box, Streams(process)


@pytest.mark.parametrize("size_mib", [400, 600, 1])
def test_streams_in_turn_wait_for_each_others_blocks(tmp_path: Path, size_mib: int) -> None:
    """Twelve blocks on three streams, each freed behind work: a full card refuses none, at once."""
    with streams(tmp_path, 1400 if size_mib > 1 else 360) as (box, here):
        process = here.process
        third = process.cu("cuStreamCreate", out(), 1).number()
        for stream in [here.one, here.other, third] * 4:
            here.give(stream, size_mib * MIB)
            assert box.card().used_bytes <= (box.limits[0].memory_bytes or 0)
        assert not here.is_reached(here.event(here.one))
        assert box.card().refused == 0


def test_the_work_behind_such_a_block_comes_after_the_free(tmp_path: Path) -> None:
    with streams(tmp_path, 1100) as (_, here):
        freed = here.give(here.one)
        assert here.take(here.other) == freed
        here.process.launch(here.kernel, SHORT_NS, here.other)
        assert not here.is_reached(here.event(here.other))


def test_a_stream_that_is_gone_still_gives_its_blocks(tmp_path: Path) -> None:
    with streams(tmp_path, 1100) as (_, here):
        freed = here.give(here.one)
        here.process.cu("cuStreamDestroy_v2", here.one)
        assert here.take(here.other) == freed
        assert not here.is_reached(here.event(here.other))


def test_another_threads_own_default_stream_gives_its_blocks(tmp_path: Path) -> None:
    with streams(tmp_path, 1100) as (_, here):
        freed = here.give(OWN_STREAM)
        reply = here.process.in_thread("cuMemAllocFromPoolAsync_ptsz", out(), BLOCK, here.pool, 0)
        assert (reply.result, reply.number()) == (0, freed)


def test_a_block_of_several_streams_pieces_is_refused_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    """Pieces of two streams make no block of their size together, on no card."""
    with streams(tmp_path, 1100) as (box, here):
        for stream in (here.one, here.other):
            here.give(stream, 300 * MIB)
        third = here.process.cu("cuStreamCreate", out(), 1).number()
        reply = here.process.call("cuMemAllocFromPoolAsync", out(), 500 * MIB, here.pool, third)
        assert reply.result == OUT_OF_MEMORY
        assert not here.is_reached(here.event(here.one))
        assert box.machine.used() <= 1100 * MIB
        assert box.card().used_bytes == box.machine.used()


def test_a_refusal_does_not_wait_for_the_stream_and_keeps_no_other_thread(tmp_path: Path) -> None:
    """A pool takes a whole chunk for a small block; near the limit that is undone, behind long work."""
    with streams(tmp_path, 512) as (box, here):
        here.take(here.other, 31 * MIB)
        left = (box.limits[0].memory_bytes or 0) - box.card().used_bytes
        here.process.alloc(left - 20 * MIB)
        here.process.launch(here.kernel, LONG_NS, here.one)
        event = here.event(here.one)
        reply = here.process.call("cuMemAllocFromPoolAsync", out(), 8 * MIB, here.pool, here.one)
        assert reply.result == OUT_OF_MEMORY
        assert not here.is_reached(event)
        room = here.process.in_thread("cuMemAllocFromPoolAsync", out(), MIB // 4, here.pool, here.other)
        assert room.result == 0
        assert box.card().used_bytes == box.machine.used() <= 512 * MIB


def test_memory_of_a_destroyed_pool_counts_until_its_streams_have_freed_it(tmp_path: Path) -> None:
    """Else a pool after the other, each destroyed behind work, would hold any amount."""
    with streams(tmp_path, 1400) as (box, here):
        for _ in range(4):
            reply = here.process.call("cuMemAllocFromPoolAsync", out(), BLOCK, here.pool, here.one)
            if reply.result == 0:
                here.process.launch(here.kernel, LONG_NS, here.one)
                here.process.cu("cuMemFreeAsync", reply.number(), here.one)
            here.process.cu("cuMemPoolDestroy", here.pool)
            here.pool = here.process.cu("cuMemPoolCreate", out(), pool_on_device()).number()
            assert box.machine.used() <= box.card().used_bytes <= 1400 * MIB


def test_it_is_free_again_once_they_have(tmp_path: Path) -> None:
    with streams(tmp_path, 1400) as (box, here):
        before = box.card().used_bytes
        here.give(here.one, work_ns=SHORT_NS)
        here.process.cu("cuMemPoolDestroy", here.pool)
        here.process.cu("cuCtxSynchronize")
        assert box.card().used_bytes == box.machine.used() <= before


@contextmanager
def held_up(folder: Path, gate: str) -> Iterator[Path]:
    """The gate that calls wait at until it is gone; `reached` beside it says that one does."""
    folder.mkdir()
    (folder / gate).touch()
    yield folder / gate
    (folder / gate).unlink()


def await_file(path: Path) -> None:
    deadline = time.monotonic() + HANG_S
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("end", ["cuCtxDestroy_v2", "cuDevicePrimaryCtxReset_v2"])
@pytest.mark.parametrize("share", [None, 50])
def test_a_contexts_end_that_waits_keeps_no_launch_elsewhere(
    tmp_path: Path, share: int | None, end: str
) -> None:
    gates = tmp_path / "gates"
    with (
        held_up(gates, "context-ends") as gate,
        container(tmp_path / "box", memory_mib=4096, share=share) as box,
        program(box, GPUSLICE_SIM_GATES=str(gates)) as process,
    ):
        primary = Streams(process)
        process.launch(primary.kernel, SHORT_NS, primary.one)
        context = process.cu("cuCtxCreate_v2", out(), 0, 0).number()
        kernel, stream = process.kernel(), process.cu("cuStreamCreate", out(), 1).number()
        process.launch(kernel, SHORT_NS, stream)
        ended = context if end == "cuCtxDestroy_v2" else 0
        if ended:
            process.cu("cuCtxPopCurrent_v2", out())
            kernel, stream = primary.kernel, primary.one
        process.ask({"beside": end, "arguments": [ended]})
        await_file(gate.with_suffix(".reached"))
        for _ in range(100):
            process.launch(kernel, SHORT_NS // 10, stream)
        process.cu("cuStreamSynchronize", stream)
        assert gate.exists()


def test_a_free_that_waits_costs_no_other_call_its_time(tmp_path: Path) -> None:
    """Loading code waits for calls in flight, to measure its size: not for those that wait themselves."""
    gates = tmp_path / "gates"
    with (
        held_up(gates, "freed") as gate,
        container(tmp_path / "box", memory_mib=4096) as box,
        program(box, GPUSLICE_SIM_GATES=str(gates)) as process,
    ):
        process.ask({"beside": "cuMemFree_v2", "arguments": [process.alloc(MIB)]})
        await_file(gate.with_suffix(".reached"))
        began = time.monotonic()
        for _ in range(200):
            process.kernel()
        assert time.monotonic() - began < 200 * 0.02  # each waited for 20 ms and more


def test_a_limit_counts_pools_by_the_hundred(tmp_path: Path) -> None:
    with streams(tmp_path, 4096) as (box, here):
        pools = [here.process.cu("cuMemPoolCreate", out(), pool_on_device()).number() for _ in range(300)]
        blocks = [
            here.process.cu("cuMemAllocFromPoolAsync", out(), MIB, pool, here.one).number()
            for pool in pools[:60]
        ]
        assert box.card().used_bytes == box.machine.used()
        for block in blocks:
            here.process.cu("cuMemFreeAsync", block, here.one)
        here.process.cu("cuStreamSynchronize", here.one)
        assert box.card().used_bytes == box.machine.used()
