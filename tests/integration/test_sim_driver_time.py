"""Kernels take modelled time: streams run behind the program, cards are shared evenly, events tell when."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simcluster import gpu
from tests import HANG_S

from .sim_driver_client import DriverProcess, out

MS = 1_000_000


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return gpu.create(tmp_path / "state", ["H200"])


@pytest.fixture
def process(state: Path) -> Iterator[DriverProcess]:
    with DriverProcess(state) as started:
        yield started.start()


def event(process: DriverProcess) -> int:
    return process.cu("cuEventCreate", out(), 0).number()


def elapsed_ms(process: DriverProcess, start: int, end: int) -> float:
    (value,) = struct.unpack("f", process.cu("cuEventElapsedTime", out(4), start, end).bytes[0])
    return float(value)


def timed(process: DriverProcess, *durations_ns: int) -> float:
    """Seconds from launching kernels of these durations to their end."""
    kernel = process.kernel()
    begun = time.monotonic()
    for duration_ns in durations_ns:
        process.launch(kernel, duration_ns)
    process.cu("cuCtxSynchronize")
    return time.monotonic() - begun


def test_a_launch_returns_at_once_and_synchronising_waits(process: DriverProcess) -> None:
    begun = time.monotonic()
    process.launch(process.kernel(), 50 * MS)
    process.cu("cuStreamSynchronize", 0)
    assert time.monotonic() - begun >= 0.05
    assert process.call("cuStreamQuery", 0).result == 0
    process.launch(process.kernel(), 2 * HANG_S * 1000 * MS)
    assert process.call("cuStreamQuery", 0).result == 600


def test_events_measure_to_the_nanosecond_what_kernels_took(process: DriverProcess) -> None:
    kernel = process.kernel()
    first, second, third = event(process), event(process), event(process)
    process.launch(kernel, 50 * MS)
    process.cu("cuEventRecord", first, 0)
    process.launch(kernel, 30 * MS)
    process.cu("cuEventRecord", second, 0)
    process.launch(kernel, 20 * MS)
    process.cu("cuEventRecord", third, 0)
    assert process.call("cuEventElapsedTime", out(4), first, third).result == 600
    process.cu("cuEventSynchronize", third)
    assert elapsed_ms(process, first, second) == pytest.approx(30, abs=1e-4)
    assert elapsed_ms(process, second, third) == pytest.approx(20, abs=1e-4)


def test_two_busy_processes_get_half_each(state: Path, process: DriverProcess) -> None:
    with DriverProcess(state) as other:
        other.start().launch(other.kernel(), 10_000 * MS)
        assert timed(process, 50 * MS, 50 * MS) == pytest.approx(0.2, rel=0.2)
        other.kill()
        assert timed(process, 100 * MS) == pytest.approx(0.1, rel=0.3)


def test_how_long_a_kernel_takes_can_be_said_by_name_process_or_card(state: Path) -> None:
    names = {"GPUSLICE_SIM_KERNELS": "matmul=80000,add=5", "GPUSLICE_SIM_KERNEL_US": "20000"}
    with gpu.Machine(state) as machine, DriverProcess(state, **names) as named, DriverProcess(state) as plain:
        machine.set_gauge(0, kernel_ns=40 * MS)
        for process, kernel, expected_ms in (
            (named.start(), "my_matmul_kernel", 80),
            (named, "other", 20),
            (plain.start(), "other", 40),
        ):
            start, end = event(process), event(process)
            function = process.kernel(kernel)
            process.launch(function, 0)
            process.cu("cuEventRecord", start, 0)
            process.launch(function, 0)
            process.cu("cuEventRecord", end, 0)
            process.cu("cuEventSynchronize", end)
            assert elapsed_ms(process, start, end) == pytest.approx(expected_ms, abs=1e-3)


def test_launches_are_counted_by_stream_mode(state: Path, process: DriverProcess) -> None:
    kernel = process.kernel()
    for _ in range(3):
        process.launch(kernel)
    process.launch(kernel, name="cuLaunchKernel_ptsz")
    process.launch(kernel, stream=2)
    with gpu.Machine(state) as machine:
        assert machine.launches(process.pid) == (3, 2, 0)


def test_a_graph_takes_the_time_of_its_kernels(state: Path, process: DriverProcess) -> None:
    stream = process.cu("cuStreamCreate", out(), 1).number()
    kernel = process.kernel()
    process.cu("cuStreamBeginCapture_v2", stream, 0)
    for _ in range(5):
        process.launch(kernel, 10 * MS, stream)
    graph = process.cu("cuStreamEndCapture", stream, out()).number()
    executable = process.cu("cuGraphInstantiateWithFlags", out(), graph, 0).number()
    with gpu.Machine(state) as machine:
        before = machine.cards()[0].busy_ns
        begun = time.monotonic()
        process.cu("cuGraphLaunch", executable, stream)
        process.cu("cuStreamSynchronize", stream)
        assert time.monotonic() - begun >= 0.05
        assert machine.cards()[0].busy_ns - before == 50 * MS
        assert machine.launches(process.pid) == (0, 0, 1)


def test_a_wrong_launch_is_an_error(process: DriverProcess) -> None:
    kernel = process.kernel()
    assert process.call("cuLaunchKernel", kernel, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0).result == 1
    assert process.call("cuLaunchKernel", kernel, 1, 1, 1, 2048, 1, 1, 0, 0, 0, 0).result == 1
    assert process.call("cuLaunchKernel", 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0).result == 400
    assert process.call("cuStreamSynchronize", kernel).result == 400
    module = process.cu("cuModuleLoadData", out(), ".visible .entry here() {}").number()
    assert process.call("cuModuleGetFunction", out(), module, "elsewhere").result == 500


def test_without_a_context_there_is_nothing_to_launch_in(state: Path) -> None:
    with DriverProcess(state) as process:
        assert process.call("cuCtxSynchronize").result == 3
        process.cu("cuInit", 0)
        assert process.call("cuCtxSynchronize").result == 201
