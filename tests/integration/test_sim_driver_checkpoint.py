"""Checkpoints: a process's memory leaves the card for its host memory, and comes back or is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simcluster import gpu

from .sim_driver_client import MIB, DriverProcess, given, out

CONTEXT = 527 * MIB


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return gpu.create(tmp_path / "state", ["H200", "H200"])


@pytest.fixture
def process(state: Path) -> Iterator[DriverProcess]:
    with DriverProcess(state) as started:
        yield started.start()


def test_a_checkpoint_takes_a_process_off_the_card_and_back(state: Path, process: DriverProcess) -> None:
    process.alloc(10 * MIB)
    with gpu.Machine(state) as machine, DriverProcess(state) as other:
        other.cu("cuInit", 0)
        assert other.call("cuCheckpointProcessCheckpoint", process.pid, None).result == 401  # not locked yet
        other.cu("cuCheckpointProcessLock", process.pid, None)
        other.cu("cuCheckpointProcessCheckpoint", process.pid, None)
        assert other.cu("cuCheckpointProcessGetState", process.pid, out(4)).number(size=4) == 2
        assert machine.used_bytes() == 0
        other.cu("cuCheckpointProcessRestore", process.pid, None)
        other.cu("cuCheckpointProcessUnlock", process.pid, None)
        assert machine.used_bytes(pid=process.pid) == CONTEXT + 10 * MIB


def test_a_process_whose_restore_met_a_full_card_is_lost(state: Path, process: DriverProcess) -> None:
    process.alloc(10 * MIB)
    with gpu.Machine(state) as machine, DriverProcess(state) as other:
        other.start()
        other.cu("cuCheckpointProcessLock", process.pid, None)
        other.cu("cuCheckpointProcessCheckpoint", process.pid, None)
        free, _ = other.memory()
        filler = other.alloc(free)
        assert other.call("cuCheckpointProcessRestore", process.pid, None).result == 2
        other.cu("cuMemFree_v2", filler)
        for call in ("Restore", "Unlock", "Lock", "Checkpoint"):
            assert other.call(f"cuCheckpointProcess{call}", process.pid, None).result == 401
        assert other.cu("cuCheckpointProcessGetState", process.pid, out(4)).number(size=4) == 3
        assert machine.used_bytes(pid=process.pid) == 0


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_a_checkpoint_is_in_the_host_memory_of_the_process(state: Path, process: DriverProcess) -> None:
    process.alloc(100 * MIB)
    with DriverProcess(state) as other:
        other.cu("cuInit", 0)
        before, others = resident_bytes(process.pid), resident_bytes(other.pid)
        other.cu("cuCheckpointProcessLock", process.pid, None)
        other.cu("cuCheckpointProcessCheckpoint", process.pid, None)
        assert resident_bytes(process.pid) - before >= 100 * MIB + CONTEXT
        assert resident_bytes(other.pid) - others < 10 * MIB
        other.cu("cuCheckpointProcessRestore", process.pid, None)
        other.cu("cuCheckpointProcessUnlock", process.pid, None)
        process.memory()
        assert resident_bytes(process.pid) - before < 10 * MIB


def test_managed_memory_cannot_be_checkpointed(state: Path, process: DriverProcess) -> None:
    address = process.cu("cuMemAllocManaged", out(), 2 * MIB, 1).number()
    with DriverProcess(state) as other:
        other.cu("cuInit", 0)
        other.cu("cuCheckpointProcessLock", process.pid, None)
        assert other.call("cuCheckpointProcessCheckpoint", process.pid, None).result == 801
        other.cu("cuCheckpointProcessUnlock", process.pid, None)
        process.cu("cuMemFree_v2", address)
        other.cu("cuCheckpointProcessLock", process.pid, None)
        other.cu("cuCheckpointProcessCheckpoint", process.pid, None)


def test_a_lock_that_takes_too_long_leaves_the_process_running(state: Path, process: DriverProcess) -> None:
    process.launch(process.kernel(), 30_000_000_000)
    with DriverProcess(state) as other:
        other.cu("cuInit", 0)
        ten_ms = given((10).to_bytes(4, "little") + bytes(60))
        assert other.call("cuCheckpointProcessLock", process.pid, ten_ms).result == 600
        assert other.cu("cuCheckpointProcessGetState", process.pid, out(4)).number(size=4) == 0


def test_a_checkpoint_takes_the_time_of_the_cards_link(state: Path, process: DriverProcess) -> None:
    """And keeps what was there."""
    address = process.alloc(256 * MIB)
    process.cu("cuMemcpyHtoD_v2", address, given(b"sixteen bytes ok"), 16)
    with DriverProcess(state) as other:
        other.cu("cuInit", 0)
        other.cu("cuCheckpointProcessLock", process.pid, None)
        began = time.monotonic()
        other.cu("cuCheckpointProcessCheckpoint", process.pid, None)
        assert time.monotonic() - began > 256 * MIB / 64e9  # sixteen lanes of the fifth generation
        other.cu("cuCheckpointProcessRestore", process.pid, None)
        other.cu("cuCheckpointProcessUnlock", process.pid, None)
    assert process.cu("cuMemcpyDtoH_v2", out(16), address, 16).bytes[0] == b"sixteen bytes ok"


def test_calls_of_a_locked_process_wait(state: Path) -> None:
    with DriverProcess(state) as process, DriverProcess(state) as other:
        process.start()
        other.cu("cuInit", 0)
        other.cu("cuCheckpointProcessLock", process.pid, None)
        calling = threading.Thread(target=process.alloc, args=(2 * MIB,))
        calling.start()
        other.cu("cuCheckpointProcessCheckpoint", process.pid, None)
        other.cu("cuCheckpointProcessRestore", process.pid, None)
        calling.join(0.05)
        assert calling.is_alive()
        other.cu("cuCheckpointProcessUnlock", process.pid, None)
        calling.join(10)
        assert not calling.is_alive()


def test_a_checkpoint_waits_for_work_and_takes_contexts_too(state: Path) -> None:
    with gpu.Machine(state) as machine, DriverProcess(state) as process, DriverProcess(state) as other:
        kernel = process.start().kernel()
        other.cu("cuInit", 0)
        launched = time.monotonic()
        process.launch(kernel, 200_000_000)
        other.cu("cuCheckpointProcessLock", process.pid, None)
        other.cu("cuCheckpointProcessCheckpoint", process.pid, None)
        assert time.monotonic() - launched >= 0.2
        assert machine.used_bytes(pid=process.pid) == 0


@pytest.mark.parametrize(("driver", "result"), [("580", 801), ("610", 0)])
def test_shared_memory_can_be_checkpointed_from_610_on(tmp_path: Path, driver: str, result: int) -> None:
    state = gpu.create(tmp_path / "state", ["H200"], driver=driver)
    with DriverProcess(state) as maker, DriverProcess(state) as user:
        handle = maker.start().cu("cuIpcGetMemHandle", out(64), maker.alloc(2 * MIB)).bytes[0]
        user.start().ask({"ipc": handle.hex()})
        user.cu("cuCheckpointProcessLock", maker.pid, None)
        assert user.call("cuCheckpointProcessCheckpoint", maker.pid, None).result == result
