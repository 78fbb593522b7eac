"""What drivers of different kinds say of a process: whatever it is, the library's accounts stay right."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpuslice.adapters.region.figures import Figure, format_figures, write_figures
from gpuslice.adapters.region.living import identity_of
from simcluster import gpu
from tests import HANG_S

from .isolation_rig import (
    MIB,
    OUT_OF_MEMORY,
    SIM,
    V100,
    Container,
    Machine,
    Worker,
    container,
    make_container,
    make_machine,
)


def machine_with(folder: Path, driver: str) -> Machine:
    gpu.create(folder / "cards", [V100], cuda_version="12.2", driver_version=driver, seed=str(folder))
    return Machine(folder / "cards", str(folder))


def contained(folder: Path, machine: Machine, figures: str, memory_mib: int = 2048) -> Container:
    """In a PID namespace of its own, as a driver that gives such figures shows it."""
    return make_container(
        folder,
        machine,
        memory_mib=memory_mib,
        NVIDIA_VISIBLE_DEVICES=machine.uuid(),
        GPUSLICE_SIM_PROCESS_FIGURES=figures,
    )


@pytest.mark.parametrize("driver", ["418.87.01", "470.57.02", "535.54.03", "560.35.03"])
@pytest.mark.parametrize("figures", ["full", "none", "unknown", "foreign", "twice"])
def test_contexts_and_modules_count_whatever_the_process_list_says(
    tmp_path: Path, figures: str, driver: str
) -> None:
    machine = machine_with(tmp_path, driver)
    box = contained(tmp_path / "box", machine, figures)
    with box.worker() as one, box.worker() as two:
        one.ok("start 0")
        assert box.card().used_bytes == machine.used() > 0
        one.ok(f"alloc 0 plain {300 * MIB}")
        two.ok("start 0")
        two.ok(f"alloc 0 module {64 * MIB}")
        two.ok("alloc 1 context 1")
        assert box.card().used_bytes == machine.used()
        assert one.ask(f"alloc 1 plain {1800 * MIB}") == OUT_OF_MEMORY
        two.ok("free 1")
        one.ok("free 0")
        assert box.card().used_bytes == machine.used()


def test_a_stranger_with_our_number_is_not_taken_for_us(tmp_path: Path) -> None:
    """NVML names processes by the host's numbers, and one of them is the number we have in our namespace."""
    machine = machine_with(tmp_path, "470.57.02")
    box = contained(tmp_path / "box", machine, "foreign")
    with box.worker() as worker:
        with gpu.Machine(machine.state) as cards:
            cards.add_ghost(0, worker.pid - 1, 5000, "somebody else")
        before = machine.used()
        worker.ok("start 0")
        worker.ok(f"alloc 0 module {64 * MIB}")
        assert box.card().used_bytes == machine.used() - before < 1000 * MIB


def test_long_entries_of_some_drivers_are_read_rightly(tmp_path: Path) -> None:
    """Of the drivers 535.43 to 535.86, which put a word more into the list's third form."""
    machine = machine_with(tmp_path, "535.54.03")
    with gpu.Machine(machine.state) as cards:
        for pid in (4_000_001, 4_000_002):
            cards.add_ghost(0, pid, 2000, "somebody else")
    before = machine.used()
    box = make_container(tmp_path / "box", machine)
    with box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 module {64 * MIB}")
        assert box.card().used_bytes == machine.used() - before


def test_a_driver_that_knows_the_first_form_alone_is_understood(tmp_path: Path) -> None:
    with container(tmp_path, cuda="10.1") as box, box.worker() as one, box.worker() as two:
        for worker in (one, two):
            worker.ok("start 0")
            worker.ok(f"alloc 0 module {32 * MIB}")
        assert box.card().used_bytes == box.machine.used()


def test_without_nvml_the_driver_itself_is_asked(tmp_path: Path) -> None:
    """As in a container that was not given the utility libraries. A first context is told by nobody."""
    driver = tmp_path / "driver"
    driver.mkdir()
    (driver / "libcuda.so.1").symlink_to(SIM / "libcuda.so.1")
    box = make_container(tmp_path / "box", make_machine(tmp_path, profile="H200"), memory_mib=2048)
    with box.worker(LD_LIBRARY_PATH=str(driver)) as worker:
        worker.ok("start 0")
        more = box.card().used_bytes - box.machine.used()
        assert 0 <= more <= 64 * MIB, "a context counts by the multiprocessors of its card"
        worker.ok(f"alloc 0 module {64 * MIB}")
        worker.ok(f"launch-lazily {20 * MIB}")
        worker.ok("alloc 1 context 1")
        assert box.card().used_bytes - box.machine.used() == more
        assert worker.ask(f"alloc 2 plain {1500 * MIB}") == OUT_OF_MEMORY
        worker.ok("free 1")
        worker.ok("free 0")
        assert box.card().used_bytes - box.machine.used() == more


# ---- what nobody told us of


@pytest.mark.parametrize("figures", ["full", "none"])
def test_a_context_that_came_unseen_is_counted_when_it_is_used(tmp_path: Path, figures: str) -> None:
    """The runtime and libraries that draw have ways to the driver without a name."""
    machine = make_machine(tmp_path)
    box = contained(tmp_path / "box", machine, figures)
    with box.worker() as worker, box.worker() as other:
        other.ok("start 0")
        worker.ok("start-unseen 0")
        worker.ok(f"alloc 0 plain {100 * MIB}")
        assert box.card().used_bytes == machine.used()
        worker.ok("reset")
        assert box.card().used_bytes == machine.used()


def test_code_that_came_unseen_is_counted_while_the_program_allocates(tmp_path: Path) -> None:
    box = make_container(tmp_path / "box", machine_with(tmp_path, "560.35.03"))
    with box.worker() as worker:
        worker.ok("start 0")
        worker.ok("alloc 0 plain 1")
        worker.ok(f"load-unseen {200 * MIB}")
        until = time.monotonic() + HANG_S
        while box.card().used_bytes < box.machine.used():
            assert time.monotonic() < until, "never counted"
            worker.ok(f"alloc 1 plain {2 * MIB}")
            worker.ok("free 1")
        assert box.card().used_bytes == box.machine.used()


@pytest.mark.parametrize("figures", ["full", "none"])
def test_code_that_comes_with_a_first_launch_is_counted(tmp_path: Path, figures: str) -> None:
    """Also where there is no figure for the process: by what the card lost during that launch."""
    box = contained(tmp_path / "box", machine_with(tmp_path, "560.35.03"), figures)
    with box.worker() as worker:
        worker.ok("start 0")
        worker.ok("alloc 0 plain 1")
        before = box.machine.used()
        for _ in range(3):
            worker.ok(f"launch-lazily {20 * MIB}")
        assert box.machine.used() >= before + 60 * MIB
        until = time.monotonic() + HANG_S
        while box.card().used_bytes < box.machine.used() and time.monotonic() < until:
            worker.ok(f"alloc 1 plain {2 * MIB}")
            worker.ok("free 1")
        assert box.card().used_bytes == box.machine.used()
        worker.ok("reset")
        assert box.card().used_bytes == box.machine.used()


def test_a_neighbour_that_takes_much_during_a_first_launch_is_not_us(tmp_path: Path) -> None:
    """No kernel brings that much."""
    machine = machine_with(tmp_path, "560.35.03")
    box = contained(tmp_path / "box", machine, "none")
    with box.worker() as worker:
        worker.ok("start 0")
        before = box.card().used_bytes
        worker.ok(f"launch-lazily {400 * MIB}")
        assert machine.used() >= before + 400 * MIB
        assert box.card().used_bytes == before


# ---- what may be in the driver's figure or not


def test_managed_memory_on_the_host_hides_nothing_of_the_drivers_own(tmp_path: Path) -> None:
    """It counts in full, the driver's figure has what of it is on the card: the difference is nobody's."""
    machine = machine_with(tmp_path, "560.35.03")
    box = make_container(tmp_path / "box", machine, memory_mib=8192)
    with box.worker() as worker:
        with gpu.Machine(machine.state) as cards:
            cards.add_ghost(0, 4_000_001, 13_500, "leaves room for little")
        worker.ok("start 0")
        own = box.card().processes[0].own_bytes
        assert own > 0
        worker.ok(f"alloc 2 plain {64 * MIB}")
        worker.ok(f"alloc 0 managed {6000 * MIB}")
        worker.ok("free 2")
        worker.ok(f"alloc 1 module {32 * MIB}")
        assert box.card().processes[0].own_bytes >= own
        worker.ok("free 0")
        worker.ok("free 1")
        assert box.card().processes[0].own_bytes == own


# ---- a driver that asks for itself


FORWARDING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
static void *behind(const char *name)
{
    static void *library;
    if (!library)
        library = dlopen(BEHIND, RTLD_NOW | RTLD_LOCAL);
    return dlsym(library, name);
}
#define FORWARD(name, parameters, arguments) \
    int name parameters { return ((int(*) parameters)behind(#name)) arguments; }
FORWARD(cuInit, (unsigned flags), (flags))
FORWARD(cuDeviceGet, (int *device, int ordinal), (device, ordinal))
FORWARD(cuDeviceGetUuid, (void *uuid, int device), (uuid, device))
FORWARD(cuDevicePrimaryCtxGetState, (int device, unsigned *flags, int *active), (device, flags, active))
FORWARD(cuDevicePrimaryCtxRetain, (void **context, int device), (context, device))
FORWARD(cuCtxSetCurrent, (void *context), (context))
FORWARD(cuCtxGetCurrent, (void **context), (context))
FORWARD(cuCtxGetDevice, (int *device), (device))
FORWARD(cuMemGetInfo_v2, (unsigned long *free_bytes, unsigned long *total), (free_bytes, total))
FORWARD(cuMemAlloc_v2, (unsigned long long *address, unsigned long bytes), (address, bytes))
FORWARD(cuMemFree_v2, (unsigned long long address), (address))
"""


def test_a_driver_that_leads_to_another_behind_it_is_held(tmp_path: Path) -> None:
    """WSL's libcuda.so.1 looks up each function in the library of the real driver."""
    front = tmp_path / "front"
    front.mkdir()
    source, library = front / "forward.c", front / "libcuda.so.1"
    source.write_text(FORWARDING)
    behind = front / "libcuda.so.1.1"
    behind.symlink_to(SIM / "libcuda.so.1")
    command = ["cc", "-shared", "-fPIC", f'-DBEHIND="{behind}"', "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    with container(tmp_path) as box, box.worker(LD_LIBRARY_PATH=f"{front}:{SIM}") as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 plain {200 * MIB}")
        assert worker.ask(f"alloc 1 plain {900 * MIB}") == OUT_OF_MEMORY
        assert box.card().used_bytes == box.machine.used()


# ---- the driver's figures, which the agent publishes where NVML has none here


class Publisher:
    """The agent's part: what the simulated driver says, for one container, as often as the test likes."""

    def __init__(self, box: Container, less: Mapping[int, int] | None = None, fault: str = "") -> None:
        self._box = box
        self._less = less or {}
        """By pid, bytes that the driver's figure lacks."""
        self._fault = fault
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def publish(self) -> None:
        at_ns = time.monotonic_ns() + {"stale": -6 * 10**9, "to come": 10**10}.get(self._fault, 0)
        with gpu.Machine(self._box.machine.state) as cards:
            held = [
                (each.pid, each.bytes) for each in cards.holdings() if each.pid and each.kind != "managed"
            ]
        sums = {pid: sum(amount for other, amount in held if other == pid) for pid, _ in held}
        seen = [(identity_of(pid), amount - self._less.get(pid, 0)) for pid, amount in sums.items()]
        later = 1 if self._fault == "another start" else 0
        uuid, path = self._box.machine.uuid(), self._box.root / "etc/gpuslice/figures"
        figures = [Figure(uuid, who.pid, who.start_time + later, amount) for who, amount in seen if who]
        if self._fault in ("damaged", "cut short"):
            data = format_figures(figures, at_ns)
            path.write_bytes(data[:-8] if self._fault == "cut short" else data[:-1] + b"?")
        else:
            write_figures(path, figures, at_ns)

    def _run(self) -> None:
        self.publish()
        while not self._stop.wait(0.03):
            self.publish()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def slow_machine(folder: Path) -> Machine:
    """One on which a context takes a while to be made, as on a real card: neighbours grow meanwhile."""
    gpu.create(folder / "cards", [V100], driver_version="560.35.03", seed=str(folder), context_ms=300)
    return Machine(folder / "cards", str(folder))


def start_while_a_neighbour_takes(worker: Worker, machine: Machine, mib: int) -> str:
    """The answer to a context that is made while a neighbour grows."""
    before = machine.used()
    worker.say("start 0")
    with gpu.Machine(machine.state) as cards:
        while machine.used() == before:  # it has begun
            time.sleep(0.001)
        cards.add_ghost(0, 4_000_001, mib, "a neighbour")
    return worker.heard()


@pytest.mark.parametrize("mib", [700, 3000])
def test_a_context_beside_a_growing_neighbour_is_charged_what_the_driver_says(
    tmp_path: Path, mib: int
) -> None:
    """3000 MiB are more than the limit, and no reason to refuse the context."""
    machine = slow_machine(tmp_path)
    box = contained(tmp_path / "box", machine, "none")
    with box.worker() as worker, Publisher(box):
        assert start_while_a_neighbour_takes(worker, machine, mib) == "ok"
        own = machine.used() - mib * MIB
        worker.ok(f"alloc 0 plain {2048 * MIB - own - 4 * MIB}")
        assert box.card().used_bytes == machine.used() - mib * MIB


def test_without_figures_a_neighbours_growth_is_charged_until_it_gives_it_back(tmp_path: Path) -> None:
    """The driver's own use is no more than what the card has in use beside all else that is known."""
    machine = slow_machine(tmp_path)
    box = contained(tmp_path / "box", machine, "none")
    with box.worker() as worker:
        assert start_while_a_neighbour_takes(worker, machine, 700) == "ok"
        own = machine.used() - 700 * MIB
        assert box.card().used_bytes == own + 700 * MIB
        assert worker.ask(f"alloc 0 plain {2048 * MIB - own - 300 * MIB}") == OUT_OF_MEMORY
        with gpu.Machine(machine.state) as cards:
            cards.remove_ghost(4_000_001)
        worker.ok(f"alloc 0 plain {2048 * MIB - own - 300 * MIB}")
        assert machine.used() <= box.card().used_bytes <= 2048 * MIB


def test_nobody_is_refused_for_what_an_idle_process_was_charged_too_much(tmp_path: Path) -> None:
    """It makes no call in which it could settle its account, so others read the driver's figure for it."""
    machine = slow_machine(tmp_path)
    box = contained(tmp_path / "box", machine, "none")
    with box.worker() as idle, box.worker() as worker:
        assert start_while_a_neighbour_takes(idle, machine, 700) == "ok"
        assert box.card().used_bytes >= machine.used()
        with Publisher(box):
            worker.ok("start 0")
            room = 2048 * MIB - (machine.used() - 700 * MIB)
            worker.ok(f"alloc 0 plain {room - 4 * MIB}")
            assert worker.ask(f"alloc 1 plain {8 * MIB}") == OUT_OF_MEMORY
            free, _ = worker.ok("info")
            assert free == room - (room - 4 * MIB)


def test_managed_memory_of_an_idle_process_is_nobodys_room(tmp_path: Path) -> None:
    """The driver's figure lacks it while it is on the host, and it may come back any time."""
    machine = slow_machine(tmp_path)
    box = contained(tmp_path / "box", machine, "none")
    with box.worker() as idle, box.worker() as worker:
        idle.ok("start 0")
        idle.ok(f"alloc 0 managed {1000 * MIB}")
        with gpu.Machine(machine.state) as cards:
            elsewhere = sum(each.bytes for each in cards.holdings(idle.pid) if each.kind == "managed")
        with Publisher(box, less={idle.pid: elsewhere}):
            worker.ok("start 0")
            assert worker.ask(f"alloc 0 plain {1100 * MIB}") == OUT_OF_MEMORY


@pytest.mark.parametrize("fault", ["stale", "to come", "damaged", "cut short", "another start"])
def test_figures_that_cannot_be_right_are_not_believed(tmp_path: Path, fault: str) -> None:
    machine = slow_machine(tmp_path)
    box = contained(tmp_path / "box", machine, "none")
    with box.worker() as worker:
        assert start_while_a_neighbour_takes(worker, machine, 700) == "ok"
        counted = box.card().used_bytes
        with Publisher(box, fault=fault):
            for _ in range(3):
                assert worker.ask(f"alloc 0 plain {2050 * MIB - counted}") == OUT_OF_MEMORY
        assert box.card().used_bytes == counted


# ---- NVML is the program's, too

TAKES_CODE = """
import ctypes, os
nvml, cuda = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.CDLL("libcuda.so.1")
fat = (0xBA55ED50).to_bytes(4, "little") + (1).to_bytes(2, "little") + (16).to_bytes(2, "little")
fat += (300 << 20).to_bytes(8, "little") + bytes(64)
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
{before}
print(*(cuda.cuModuleLoadData(ctypes.byref(ctypes.c_void_p()), fat) for _ in range(4)))
"""


@pytest.mark.parametrize(
    "before",
    [
        "[nvml.nvmlShutdown() for _ in range(3)]",  # so the library's own start of it is taken back
        "os.environ['GPUSLICE_SIM_PROCESS_FIGURES'] = 'none'",  # as where NVML's descriptors are closed
    ],
)
def test_a_program_that_takes_nvml_away_hides_nothing_by_that(tmp_path: Path, before: str) -> None:
    """Code came uncounted from then on, since NVML had told of this process before: 1,321 MiB of 1,024."""
    with container(tmp_path, memory_mib=1024) as box:
        done = box.run(sys.executable, "-c", TAKES_CODE.format(before=before))
    assert done.stderr == ""
    assert done.stdout.split() == ["0", "0", "2", "2"]
