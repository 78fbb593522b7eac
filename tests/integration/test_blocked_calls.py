"""A call that waits in the driver is heard, whatever it is; a program that only sleeps is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice.adapters.gpu.blocked_calls import BlockedCalls
from simcluster import gpu

from .sim_driver_client import MIB, DriverProcess, given, out

CALLS = {
    "allocate": ("cuMemAlloc_v2", (out(), 2 * MIB)),
    "copy to the card": ("cuMemcpyHtoD_v2", (0, given(bytes(16)), 16)),
    "copy from the card": ("cuMemcpyDtoH_v2", (out(16), 0, 16)),
    "fill": ("cuMemsetD8_v2", (0, 7, 16)),
    "wait": ("cuCtxSynchronize", ()),
    "ask": ("cuMemGetInfo_v2", (out(), out())),
}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return gpu.create(tmp_path / "state", ["H200"])


@pytest.fixture
def program(state: Path) -> Iterator[DriverProcess]:
    with DriverProcess(state) as process:
        yield process.start()


def heard(calls: BlockedCalls) -> bool:
    deadline = time.monotonic() + 10
    while not calls.in_driver():
        if time.monotonic() > deadline:
            return False
    return True


@pytest.mark.parametrize("call", CALLS)
def test_any_call_of_a_locked_process_is_heard(state: Path, program: DriverProcess, call: str) -> None:
    name, arguments = CALLS[call]
    address = program.alloc(MIB)
    at = tuple(
        address if each == 0 and name.startswith(("cuMemcpy", "cuMemset")) else each for each in arguments
    )
    calls = BlockedCalls(program.pid)
    assert not calls.in_driver()
    with DriverProcess(state) as other:
        other.cu("cuInit", 0)
        other.cu("cuCheckpointProcessLock", program.pid, None)
        assert not calls.in_driver()
        calling = threading.Thread(target=program.cu, args=(name, *at), daemon=True)
        calling.start()
        assert heard(calls)
        other.cu("cuCheckpointProcessUnlock", program.pid, None)
        calling.join(10)
    assert not calls.in_driver()
    calls.close()


def test_a_process_that_has_ended_or_uses_no_card_is_silent(program: DriverProcess) -> None:
    calls = BlockedCalls(program.pid)
    program.kill()
    assert not calls.in_driver()
    assert not BlockedCalls(1).in_driver()
