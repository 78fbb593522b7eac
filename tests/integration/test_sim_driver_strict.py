"""Where a real driver is less friendly than a simple model: what keeps memory alive, what takes time, what is
padded, what lives in another namespace, what is locked."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simcluster import gpu
from simcluster.gpu_creation import CONTEXT_MS, DRIVERS
from tests import HANG_S

from .sim_driver_client import BUILD, MIB, DriverProcess, given, out, pinned_on_device, python

CONTEXT = 527 * MIB
"""Of the H200's profile."""
NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def can_make_namespaces() -> bool:
    return bool(shutil.which("unshare")) and not subprocess.run([*NAMESPACE, "true"], check=False).returncode


in_namespaces = pytest.mark.skipif(not can_make_namespaces(), reason="this user may not make PID namespaces")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return gpu.create(tmp_path / "state", ["H200"])


@pytest.fixture
def machine(state: Path) -> Iterator[gpu.Machine]:
    with gpu.Machine(state) as opened:
        yield opened


def exported(process: DriverProcess, size: int) -> tuple[int, int]:
    """A handle of physical memory and a descriptor of it."""
    handle = process.cu("cuMemCreate", out(), size, pinned_on_device(0, handle_types=1), 0).number()
    return handle, process.cu("cuMemExportToShareableHandle", out(4), handle, 1, 0).number(size=4)


def test_a_descriptor_keeps_memory_after_its_maker(state: Path, machine: gpu.Machine) -> None:
    with DriverProcess(state) as maker, DriverProcess(state) as keeper, DriverProcess(state) as user:
        handle, descriptor = exported(maker.start(), 8 * MIB)
        copy = keeper.ask({"take": (maker.pid, descriptor)})["descriptor"]
        maker.cu("cuMemRelease", handle)
        maker.kill()
        assert user.start().memory()[0]
        assert machine.used_bytes(pid=0) == 8 * MIB
        imported = user.ask({"import": (keeper.pid, copy)})
        keeper.ask({"close": copy})
        assert imported["result"] == 0
        time.sleep(0.002)  # the driver looks for closed ones at most once a millisecond
        user.memory()
        assert machine.used_bytes(pid=user.pid) == machine.used_bytes() == CONTEXT + 8 * MIB
        user.cu("cuMemRelease", imported["handle"])
        assert machine.used_bytes() == CONTEXT


def test_memory_behind_a_closed_descriptor_can_be_had_again(state: Path, machine: gpu.Machine) -> None:
    with DriverProcess(state) as process:
        total = process.start().memory()[0] // (2 * MIB) * (2 * MIB)
        handle, descriptor = exported(process, total)
        process.cu("cuMemRelease", handle)
        assert process.call("cuMemAlloc_v2", out(), 2 * MIB).result == 2
        process.ask({"close": descriptor})
        process.alloc(2 * MIB)
        assert machine.used_bytes() == CONTEXT + 2 * MIB


def test_an_ipc_handle_opens_on_another_card_and_the_memory_stays_where_it_is(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "two", ["H200", "H200"])
    with DriverProcess(state) as maker, DriverProcess(state) as user, gpu.Machine(state) as machine:
        address = maker.start(0).alloc(50 * MIB)
        handle = maker.cu("cuIpcGetMemHandle", out(64), address).bytes[0].hex()
        assert user.start(1).ask({"ipc": handle})["result"] == 0
        maker.kill()
        user.memory()
        assert machine.used_bytes(card=0) == 50 * MIB
        assert machine.used_bytes(card=1) == CONTEXT


@pytest.mark.parametrize(
    ("shape", "layered", "expected"),
    [
        ((1, 1, 2048), 1, 512 * 2048),  # layers of one byte: a group of 64 bytes by 8 rows each
        ((64, 8, 1), 1, 64 << 10),  # what is smaller than a page of the card lies with others on one
        ((1, 130, 4096), 1, 64 * 256 * 4096),  # above 64 rows blocks are 128 high
        ((65, 8, 4096), 1, 128 * 8 * 4096),
        ((4096, 4096, 0), 0, 16 * MIB),
    ],
)
def test_arrays_take_whole_blocks(
    state: Path, shape: tuple[int, int, int], layered: int, expected: int
) -> None:
    description = b"".join(each.to_bytes(8, "little") for each in shape)
    description += b"".join(each.to_bytes(4, "little") for each in (1, 1, layered, 0))
    with DriverProcess(state) as process, gpu.Machine(state) as machine:
        array = process.start().cu("cuArray3DCreate_v2", out(), given(description)).number()
        taken = machine.used_bytes() - CONTEXT
        assert taken == max(expected, 2 * MIB)
        assert process.cu("cuArrayGetMemoryRequirements", out(32), array, 0).number() == expected


def test_a_context_takes_time_and_its_memory_comes_meanwhile(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "slow", ["H200"], context_ms=CONTEXT_MS)
    seen: set[int] = set()
    with DriverProcess(state) as process, gpu.Machine(state) as machine:
        process.cu("cuInit", 0)
        starting = threading.Thread(target=process.start)
        begun = time.monotonic()
        starting.start()
        while starting.is_alive():
            seen.add(machine.used_bytes())
        assert time.monotonic() - begun >= CONTEXT_MS / 1000
        assert machine.used_bytes() == CONTEXT
        assert any(0 < amount < CONTEXT for amount in seen)


def test_a_context_that_finds_the_card_full_half_way_gives_all_back(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "slow", ["H200"], context_ms=400)
    with DriverProcess(state) as first, DriverProcess(state) as second, gpu.Machine(state) as machine:
        first.start()
        second.cu("cuInit", 0)
        results: list[int] = []
        retain = threading.Thread(
            target=lambda: results.append(second.call("cuDevicePrimaryCtxRetain", out(), 0).result)
        )
        retain.start()
        while machine.used_bytes() == CONTEXT:
            pass
        first.alloc(first.memory()[0] - 2 * MIB)
        retain.join()
        assert results == [2]
        assert machine.used_bytes(pid=second.pid) == 0


def test_code_takes_time_to_load(tmp_path: Path) -> None:
    with DriverProcess(gpu.create(tmp_path / "slow", ["H200"], module_ms=50)) as process:
        process.start()
        begun = time.monotonic()
        process.kernel()
        assert time.monotonic() - begun >= 0.05


REOPEN = """
import _ctypes, ctypes
def use():
    cuda = ctypes.CDLL("libcuda.so.1")
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    results = [cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)]
    results.append(cuda.cuCtxSetCurrent(context))
    results.append(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4 << 20)))
    return cuda, results
for _ in range(3):
    cuda, results = use()
    assert results == [0, 0, 0, 0], results
    _ctypes.dlclose(cuda._handle)
    assert "libcuda" not in open("/proc/self/maps").read()
nvml = ctypes.CDLL("libnvidia-ml.so.1")
for _ in range(2):
    assert nvml.nvmlInit_v2() == 0 == nvml.nvmlShutdown()
    _ctypes.dlclose(nvml._handle)
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
use()
from simcluster import gpu
import os
print(gpu.Machine(os.environ["GPUSLICE_SIM_STATE"]).used_bytes())
"""


def test_the_libraries_can_be_closed_and_opened_again(state: Path) -> None:
    simulator = BUILD.parents[2] / "simulator/src"
    printed = python(REOPEN, state=state, PYTHONPATH=f"{simulator}:{BUILD.parents[2] / 'src'}")
    assert int(printed) == CONTEXT + 4 * MIB


def test_a_driver_of_the_future_has_newer_forms(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "future", ["H200"], driver_version="700.10", cuda_version="14.0")
    with DriverProcess(state, LD_LIBRARY_PATH=str(BUILD / "future")) as process:
        process.start()
        assert process.ask({"has": "cuMemAlloc_v3"})["has"]
        known = process.cu("cuGetProcAddress_v2", "cuMemAlloc", out(), 13000, 0, None).number()
        newest = process.cu("cuGetProcAddress_v2", "cuMemAlloc", out(), 14000, 0, None).number()
        assert known != newest
        process.cu("cuMemAlloc_v3", out(), 2 * MIB)
    with DriverProcess(state) as process:
        assert not process.ask({"has": "cuMemAlloc_v3"})["has"]


HEADLESS = """
import ctypes, threading, time
cuda = ctypes.CDLL("libcuda.so.1")
context, address = ctypes.c_void_p(), ctypes.c_uint64()
ready = threading.Event()
def live():
    assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    ready.set()
    time.sleep(0.2)
    while True:
        assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4 << 20)) == 0
        print("allocated", flush=True)
        time.sleep(0.1)
threading.Thread(target=live).start()
ready.wait()
ctypes.CDLL(None).syscall(60, 0)  # the main thread alone ends: the process shows as a zombie and lives
"""


def test_a_process_lives_while_one_of_its_threads_does(state: Path, machine: gpu.Machine) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HEADLESS],
        env=gpu.environment(state, BUILD),
        stdout=subprocess.PIPE,
        text=True,
    )
    with process, DriverProcess(state) as other:
        assert process.stdout
        for _ in range(2):
            assert process.stdout.readline() == "allocated\n"
        assert Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        other.start().memory()
        assert machine.used_bytes(pid=process.pid) >= CONTEXT + 8 * MIB
        process.kill()


# ------------------------------------------------------------------------------------------ PID namespaces


def listed(process: DriverProcess) -> list[tuple[int, int]]:
    """Pid and bytes of the processes that NVML lists to this one."""
    device = process.cu("nvmlDeviceGetHandleByIndex_v2", 0, out()).number()
    reply = process.cu(
        "nvmlDeviceGetComputeRunningProcesses_v3", device, given((64).to_bytes(4, "little")), out(64 * 24)
    )
    entries = [reply.bytes[1][at : at + 24] for at in range(0, 24 * reply.number(0, 4), 24)]
    return [(int.from_bytes(each[:4], "little"), int.from_bytes(each[8:16], "little")) for each in entries]


INSIDE = {
    "535.54": "the host's numbers",
    "535": "no figure",
    "550": "no figure",
    "560": "no figure",
    "570": "its own",
    "580": "its own",
    "610": "its own",
    "615": "its own",
}


@in_namespaces
@pytest.mark.parametrize("driver", sorted(DRIVERS))
def test_what_a_container_is_told_of_processes_depends_on_the_driver(tmp_path: Path, driver: str) -> None:
    state = gpu.create(tmp_path / "state", ["H200"], driver=driver)
    with DriverProcess(state) as outside, DriverProcess(state, within=NAMESPACE) as inside:
        for process in (outside, inside):
            process.start()
            process.cu("nvmlInit_v2")
        if driver == "535.54":  # its entries are longer
            assert outside.cu("nvmlDeviceGetHandleByIndex_v2", 0, out()).number()
            return
        inner = {"its own": [(1, CONTEXT)], "no figure": [(1, 0)]}[INSIDE[driver]]
        assert listed(inside) == inner
        everybody = dict(listed(outside))
        assert everybody[outside.pid] == CONTEXT
        assert len(everybody) == 2
        assert 1 not in everybody


def busy(process: DriverProcess) -> set[int]:
    """Pids of the processes whose kernels ran, by NVML's samples."""
    device = process.cu("nvmlDeviceGetHandleByIndex_v2", 0, out()).number()
    count = given((64).to_bytes(4, "little"))
    reply = process.cu("nvmlDeviceGetProcessUtilization", device, out(64 * 32), count, 0)
    return {
        int.from_bytes(reply.bytes[0][at : at + 4], "little") for at in range(0, 32 * reply.number(1, 4), 32)
    }


@in_namespaces
@pytest.mark.parametrize("driver", ["550", "580"])
def test_the_host_is_told_by_its_own_number_which_process_of_a_container_was_busy(
    tmp_path: Path, driver: str
) -> None:
    state = gpu.create(tmp_path / "state", ["H200"], driver=driver)
    with DriverProcess(state) as outside, DriverProcess(state, within=NAMESPACE) as inside:
        outside.start().cu("nvmlInit_v2")
        inside.start().launch(inside.kernel(), 400_000_000)
        (number,) = {pid for pid, _ in listed(outside)} - {outside.pid}
        inside.cu("cuCtxSynchronize")
        assert busy(outside) == {number}


@in_namespaces
def test_a_process_killed_in_a_namespace_of_its_own_is_swept(state: Path, machine: gpu.Machine) -> None:
    with DriverProcess(state) as outside:
        outside.start()
        for _ in range(2):
            with DriverProcess(state, within=NAMESPACE) as inside:
                inside.start().alloc(64 * MIB)
                assert machine.used_bytes() == 2 * CONTEXT + 64 * MIB
            deadline = time.monotonic() + HANG_S
            while machine.used_bytes() != CONTEXT and time.monotonic() < deadline:
                time.sleep(0.005)
            assert machine.used_bytes() == CONTEXT


@in_namespaces
def test_the_lock_is_not_taken_from_a_living_process_of_another_namespace(state: Path) -> None:
    with DriverProcess(state) as outside, DriverProcess(state, within=NAMESPACE) as inside:
        outside.start()
        inside.start()
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                inside.cu("cuMemFree_v2", inside.alloc(2 * MIB))

        thread = threading.Thread(target=churn)
        thread.start()
        for _ in range(300):
            outside.cu("cuMemFree_v2", outside.alloc(2 * MIB))
        stop.set()
        thread.join()
    with gpu.Machine(state) as machine:
        assert machine.recoveries == 0
