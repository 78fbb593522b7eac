"""Streams of one process run at the same time, as far as a card would let them."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simcluster import gpu

from .sim_driver_client import DriverProcess, out

MS = 1_000_000
NON_BLOCKING = 1
NOT_READY = 600


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return gpu.create(tmp_path / "state", ["H200"])


@pytest.fixture
def process(state: Path) -> Iterator[DriverProcess]:
    with DriverProcess(state) as started:
        yield started.start()


def stream(process: DriverProcess, flags: int = NON_BLOCKING) -> int:
    return process.cu("cuStreamCreate", out(), flags).number()


class Clock:
    """What events on the card say about when work began and ended."""

    def __init__(self, process: DriverProcess) -> None:
        self.process = process
        self.kernel = process.kernel()
        self.start = self.event(stream(process))

    def event(self, on: int) -> int:
        made = self.process.cu("cuEventCreate", out(), 0).number()
        self.process.cu("cuEventRecord", made, on)
        return made

    def launch(self, on: int, duration_ns: int, blocks: int = 1) -> int:
        """Launches blocks of 1,024 threads and returns an event behind them."""
        parameter = {"pointers": [duration_ns.to_bytes(8, "little").hex()]}
        self.process.cu("cuLaunchKernel", self.kernel, blocks, 1, 1, 1024, 1, 1, 0, on, parameter, 0)
        return self.event(on)

    def ms(self, since: int, until: int) -> float:
        self.process.cu("cuEventSynchronize", until)
        (value,) = struct.unpack("f", self.process.cu("cuEventElapsedTime", out(4), since, until).bytes[0])
        return float(value)


def test_small_kernels_of_two_streams_run_side_by_side(state: Path, process: DriverProcess) -> None:
    clock = Clock(process)
    ends = [clock.launch(stream(process), 200 * MS) for _ in range(3)]
    assert [clock.ms(clock.start, end) for end in ends] == pytest.approx([200] * 3, abs=60)
    with gpu.Machine(state) as machine:
        assert machine.worked_ns(process.pid) == pytest.approx(200 * MS, abs=60 * MS)


def test_kernels_that_fill_the_card_share_it(process: DriverProcess) -> None:
    clock = Clock(process)
    ends = [clock.launch(stream(process), 100 * MS, blocks=100_000) for _ in range(2)]
    assert [clock.ms(clock.start, end) for end in ends] == pytest.approx([200] * 2, abs=60)


def test_a_long_kernel_holds_no_other_stream_up(process: DriverProcess) -> None:
    clock = Clock(process)
    long = clock.launch(stream(process), 30_000 * MS)
    assert clock.ms(clock.start, clock.launch(stream(process), 5 * MS)) < 1000
    assert process.call("cuEventQuery", long).result == NOT_READY


def test_streams_beyond_the_connections_wait_for_each_other(state: Path) -> None:
    with DriverProcess(state, CUDA_DEVICE_MAX_CONNECTIONS="1") as process:
        clock = Clock(process.start())
        clock.launch(stream(process), 100 * MS)
        assert clock.ms(clock.start, clock.launch(stream(process), 10 * MS)) >= 110


def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it(process: DriverProcess) -> None:
    clock = Clock(process)
    blocking, independent = stream(process, 0), stream(process)
    first = clock.launch(blocking, 50 * MS)
    legacy = clock.launch(0, 50 * MS)
    second = clock.launch(blocking, 50 * MS)
    aside = clock.launch(independent, 1 * MS)
    assert clock.ms(first, legacy) == pytest.approx(50, abs=1e-3)
    assert clock.ms(legacy, second) == pytest.approx(50, abs=1e-3)
    assert clock.ms(aside, second) > 50


def test_a_stream_waits_for_an_event_of_another_and_of_another_card(tmp_path: Path) -> None:
    with DriverProcess(gpu.create(tmp_path / "two", ["H200", "H200"])) as process:
        process.start(1)
        there = Clock(process).launch(stream(process), 500 * MS)
        process.start(0)
        clock = Clock(process)
        near = stream(process)
        process.cu("cuStreamWaitEvent", near, there, 0)
        end = clock.launch(near, 1 * MS)
        assert process.call("cuEventQuery", there).result == NOT_READY
        process.cu("cuEventSynchronize", end)
        assert process.call("cuEventQuery", there).result == 0


def test_synchronising_a_stream_waits_only_for_what_was_launched_before(process: DriverProcess) -> None:
    clock = Clock(process)
    mine = stream(process)
    before = clock.launch(mine, 50 * MS)
    clock.launch(mine, 20_000 * MS)
    assert clock.ms(clock.start, before) < 10_000
    assert process.call("cuStreamQuery", mine).result == NOT_READY


def test_each_thread_has_a_default_stream_of_its_own(process: DriverProcess) -> None:
    first = process.cu("cuStreamGetId", 2, out()).number()
    again = process.cu("cuStreamGetId", 2, out()).number()
    other = process.in_thread("cuStreamGetId", 2, out()).number()
    assert first == again != other


def test_a_copy_to_the_host_returns_after_the_kernels_before_it(process: DriverProcess) -> None:
    address = process.alloc(1024)
    begun = time.monotonic()
    process.launch(process.kernel(), 100 * MS)
    process.cu("cuMemcpyDtoH_v2", out(16), address, 16)
    assert time.monotonic() - begun >= 0.1


def test_a_full_queue_makes_the_launch_wait(process: DriverProcess) -> None:
    """1,024 pieces of work fit; every event behind a kernel makes it a piece of its own."""
    clock = Clock(process)
    mine = stream(process)
    begun = time.monotonic()
    for _ in range(1030):
        end = clock.launch(mine, 5 * MS)
    launched = time.monotonic() - begun
    assert clock.ms(clock.start, end) >= 5 * 1030
    assert launched >= 5 * MS * 6 / 1e9
