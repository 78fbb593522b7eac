"""Several processes on the same cards: sharing, dying at any instruction, forking, replacing themselves."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simcluster import gpu

from .sim_driver_client import (
    BUILD,
    MIB,
    DriverProcess,
    given,
    out,
    pinned_on_device,
    pool_on_device,
    require_driver,
    run,
)

CONTEXT = 105 * MIB


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return gpu.create(tmp_path / "state", ["T4", "T4"])


@pytest.fixture
def machine(state: Path) -> Iterator[gpu.Machine]:
    with gpu.Machine(state) as opened:
        yield opened


def test_processes_share_a_card_and_see_each_other_in_what_is_free(state: Path, machine: gpu.Machine) -> None:
    with DriverProcess(state) as first, DriverProcess(state) as second:
        free_alone, _ = first.start().memory()
        second.start().alloc(1000 * MIB)
        assert first.memory()[0] == free_alone - CONTEXT - 1000 * MIB
        assert machine.used_bytes(pid=first.pid) == CONTEXT
        assert machine.used_bytes(pid=second.pid) == CONTEXT + 1000 * MIB
        second.kill()
        time.sleep(0.002)  # cuMemGetInfo looks for the dead once a millisecond
        assert first.memory()[0] == free_alone


def test_what_a_killed_process_held_is_there_for_the_next(state: Path) -> None:
    with DriverProcess(state) as first, DriverProcess(state) as second:
        free, _ = first.start().memory()
        first.alloc(free)
        assert second.call("cuInit", 0).result == 0
        assert second.call("cuDevicePrimaryCtxRetain", out(), 0).result == 2
        first.kill()
        second.start().alloc(free)


def storm(state: Path, seed: int, *count: str) -> subprocess.Popen[str]:
    program = subprocess.Popen(
        [require_driver() / "storm", str(seed), *count],
        env=gpu.environment(state, BUILD),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout
    assert program.stdout.readline() == "started\n"
    return program


def end(program: subprocess.Popen[str]) -> None:
    program.kill()
    program.communicate()


def test_the_books_balance_after_every_kill_in_the_middle_of_allocating(
    state: Path, machine: gpu.Machine
) -> None:
    chance = random.Random(7)
    running = [storm(state, seed) for seed in range(3)]
    for _ in range(40):
        time.sleep(chance.random() / 200)
        victim = running.pop(chance.randrange(3))
        end(victim)
        assert machine.holdings(victim.pid) == ()
        running.append(storm(state, chance.randrange(1000)))
    for program in running:
        end(program)
    assert machine.holdings() == ()
    assert (
        run("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader", state=state).stdout
        == "10 MiB\n10 MiB\n"
    )
    with DriverProcess(state) as survivor:
        free, total = survivor.start().memory()
        assert total - free == CONTEXT + 10 * MIB


def test_a_lock_whose_owner_died_is_taken_over(state: Path, machine: gpu.Machine) -> None:
    with DriverProcess(state) as process:
        process.start()
        gone = subprocess.Popen(["true"])
        gone.wait()
        machine._state.lock = gone.pid << 32 | 1
        machine._state.cards[0].used_bytes += 12345  # what a death between two stores may leave behind
        process.alloc(2 * MIB)
        assert machine.recoveries == 1
        assert machine._state.cards[0].used_bytes == machine.used_bytes(card=0) == CONTEXT + 2 * MIB


def test_storms_of_allocations_leave_nothing(state: Path, machine: gpu.Machine) -> None:
    programs = [storm(state, seed, "20000") for seed in range(3)] + [storm(state, 9, "5000", "8")]
    assert [program.communicate()[0] for program in programs] == ["done\n"] * 4
    assert [program.returncode for program in programs] == [0] * 4
    assert machine.holdings() == ()


def test_a_zombie_holds_nothing(state: Path, machine: gpu.Machine) -> None:
    with DriverProcess(state) as process:
        process.start().alloc(100 * MIB)
        process.process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert machine.holdings() == ()


def test_exec_gives_everything_back_though_pid_and_start_time_stay(state: Path, machine: gpu.Machine) -> None:
    with DriverProcess(state) as process:
        process.start().alloc(100 * MIB)
        assert machine.used_bytes(pid=process.pid) == CONTEXT + 100 * MIB
        process.ask({"exec": True})
        process.start()
        assert machine.used_bytes(pid=process.pid) == CONTEXT


def test_a_child_of_a_process_that_used_cuda_cannot_use_it(state: Path, machine: gpu.Machine) -> None:
    with DriverProcess(state) as process:
        process.start().alloc(2 * MIB)
        for name in ("cuInit", "cuMemGetInfo_v2", "cuCtxSynchronize"):
            assert process.ask({"in_child": name, "arguments": [0, 0]})["result"] == 3
        assert machine.used_bytes() == CONTEXT + 2 * MIB
        process.alloc(2 * MIB)


def test_a_child_that_lives_on_does_not_keep_its_dead_parents_memory(
    state: Path, machine: gpu.Machine
) -> None:
    code = (
        "import ctypes, os, sys\n"
        "cu = ctypes.CDLL('libcuda.so.1'); context = ctypes.c_void_p()\n"
        "assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0\n"
        "os.write(1, b'child\\n' if os.fork() == 0 else b'parent\\n')\n"
        "sys.stdin.read() if os.getppid() != int(sys.argv[1]) else os._exit(0)"
    )
    command = [sys.executable, "-c", code, str(os.getpid())]
    with subprocess.Popen(
        command,
        env=gpu.environment(state, require_driver()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout
        assert {parent.stdout.readline(), parent.stdout.readline()} == {"child\n", "parent\n"}
        parent.wait()
        assert machine.holdings() == ()


def test_ipc_memory_is_counted_once_and_outlives_its_exporter(state: Path, machine: gpu.Machine) -> None:
    with DriverProcess(state) as maker, DriverProcess(state) as user:
        address = maker.start().alloc(50 * MIB)
        handle = maker.cu("cuIpcGetMemHandle", out(64), address).bytes[0]
        assert maker.ask({"ipc": handle.hex()})["result"] == 201  # not where it was made
        user.start()
        opened = user.ask({"ipc": handle.hex()})["address"]
        assert machine.used_bytes() == 2 * CONTEXT + 50 * MIB
        maker.kill()
        assert user.memory()[0]
        assert machine.used_bytes(pid=user.pid) == CONTEXT + 50 * MIB
        user.cu("cuIpcCloseMemHandle", opened)
        assert machine.used_bytes() == CONTEXT


def test_exported_physical_memory_lives_until_its_last_importer(state: Path, machine: gpu.Machine) -> None:
    with DriverProcess(state) as maker, DriverProcess(state) as user:
        maker.start()
        handle = maker.cu("cuMemCreate", out(), 8 * MIB, pinned_on_device(0, handle_types=1), 0).number()
        descriptor = maker.cu("cuMemExportToShareableHandle", out(4), handle, 1, 0).number(size=4)
        user.start()
        imported = user.ask({"import": (maker.pid, descriptor)})
        assert imported["result"] == 0
        assert machine.used_bytes() == 2 * CONTEXT + 8 * MIB
        maker.cu("cuMemRelease", handle)
        assert machine.used_bytes() == 2 * CONTEXT + 8 * MIB
        user.cu("cuMemRelease", imported["handle"])
        assert machine.used_bytes(pid=0) == 8 * MIB, "the descriptor keeps it, and nobody is charged"
        maker.ask({"close": descriptor})
        assert machine.used_bytes() == 2 * CONTEXT


def test_pool_memory_opened_elsewhere_is_counted_once(state: Path, machine: gpu.Machine) -> None:
    with DriverProcess(state) as maker, DriverProcess(state) as user:
        maker.start()
        user.start()
        pool = maker.cu("cuMemPoolCreate", out(), pool_on_device(0, handle_types=1)).number()
        descriptor = maker.cu("cuMemPoolExportToShareableHandle", out(4), pool, 1, 0).number(size=4)
        block = maker.cu("cuMemAllocFromPoolAsync", out(), 3 * MIB, pool, 0).number()
        data = maker.cu("cuMemPoolExportPointer", out(64), block).bytes[0]
        imported = user.ask({"import": (maker.pid, descriptor), "as": "pool"})
        opened = user.cu("cuMemPoolImportPointer", out(), imported["handle"], given(data)).number()
        assert machine.used_bytes() == 2 * CONTEXT + 32 * MIB
        assert user.call("cuMemAllocFromPoolAsync", out(), 1, imported["handle"], 0).result == 1
        user.cu("cuMemFreeAsync", opened, 0)
        assert machine.used_bytes() == 2 * CONTEXT + 32 * MIB


def test_external_memory_is_counted_where_it_was_made(state: Path, machine: gpu.Machine) -> None:
    with DriverProcess(state) as process:
        process.start()
        description = (1).to_bytes(8, "little") + bytes(16) + (4 * MIB).to_bytes(8, "little") + bytes(72)
        memory = process.cu("cuImportExternalMemory", out(), given(description)).number()
        part = bytes(8) + (4 * MIB).to_bytes(8, "little") + bytes(72)
        address = process.cu("cuExternalMemoryGetMappedBuffer", out(), memory, given(part)).number()
        assert machine.used_bytes() == CONTEXT
        process.cu("cuMemFree_v2", address)
        process.cu("cuDestroyExternalMemory", memory)
