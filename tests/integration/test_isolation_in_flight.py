"""A thread may be between account and driver while another measures what the driver took for itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuslice.adapters.region.figures import Figure, write_figures
from gpuslice.adapters.region.living import identity_of

from .isolation_rig import MIB, OUT_OF_MEMORY, Container, Worker, container

LIMIT_MIB = 1000


def is_reached(path: Path) -> bool:
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    return path.exists()


@contextmanager
def beside(worker: Worker, gates: Path, gate: str, command: str) -> Iterator[None]:
    """Another thread of the worker obeys, and waits at the gate meanwhile."""
    (gates / gate).touch()
    worker.ok(f"beside {command}")
    assert is_reached(gates / f"{gate}.reached")
    yield
    (gates / gate).unlink()
    assert worker.heard() == "ok"
    worker.ok("joined")


@contextmanager
def gated(folder: Path, **environment: str) -> Iterator[tuple[Container, Path]]:
    gates = folder / "gates"
    gates.mkdir()
    with container(folder, memory_mib=LIMIT_MIB, GPUSLICE_SIM_GATES=str(gates)) as box:
        box.environment.update(environment)
        yield box, gates


Measure = Callable[[Worker], None]


def measure_at_once(worker: Worker) -> None:
    worker.ok("alloc 9 module 4096")
    worker.ok("free 9")


def measure_in_passing(worker: Worker) -> None:
    """As any call for memory does once a second; less is believed the second time."""
    for _ in range(3):
        time.sleep(1.01)
        worker.ok("info")


@pytest.mark.parametrize("measure", [measure_at_once, measure_in_passing])
@pytest.mark.parametrize(("gate", "kind"), [("allocate", "plain"), ("freed", "plain"), ("freed", "managed")])
def test_what_is_on_its_way_raises_no_limit(tmp_path: Path, measure: Measure, gate: str, kind: str) -> None:
    with gated(tmp_path) as (box, gates), box.worker() as worker:
        worker.ok("start 0")
        command = f"alloc 0 {kind} {200 * MIB}"
        if gate == "freed":
            worker.ok(command)
            command = "free 0"
        with beside(worker, gates, gate, command):
            measure(worker)
        assert box.card().used_bytes >= box.machine.used()
        for number in range(1, 8):
            worker.ask(f"alloc {number} plain {200 * MIB}")
        assert box.machine.used() <= LIMIT_MIB * MIB
        worker.ok("sync")
        measure_at_once(worker)
        assert box.card().used_bytes == box.machine.used()


def test_what_the_driver_took_is_counted_beside_traffic_that_never_ends(tmp_path: Path) -> None:
    """The driver's own use converges though threads are never all at rest."""
    with gated(tmp_path, GPUSLICE_SIM_LINGER_US="300") as (box, _), box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"beside threads 3 20000 {2 * MIB} plain")
        worker.ok(f"load-unseen {128 * MIB}")
        deadline = time.monotonic() + 20
        while box.card().used_bytes < box.machine.used() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert box.card().used_bytes >= box.machine.used() - 6 * MIB
        worker.kill()


def test_a_neighbour_process_in_a_call_is_not_taken_to_hold_too_much(tmp_path: Path) -> None:
    """The agent's figure is of a moment in which another process had asked and not been given yet."""
    with gated(tmp_path, GPUSLICE_SIM_PROCESS_FIGURES="none") as (box, gates):
        box.environment["NVIDIA_VISIBLE_DEVICES"] = box.machine.uuid()
        figures = box.root / "etc/gpuslice/figures"
        with box.worker() as slow, box.worker(GPUSLICE_SIM_GATES="") as other:
            slow.ok("start 0")
            context = box.machine.used()
            with beside(slow, gates, "allocate", f"alloc 0 plain {300 * MIB}"):
                time.sleep(0.05)
                identity = identity_of(slow.pid)
                assert identity
                figure = Figure(box.machine.uuid(), slow.pid, identity.start_time, context)
                write_figures(figures, [figure], time.monotonic_ns())
                time.sleep(0.05)
                other.ok("start 0")
                while other.ask(f"alloc 0 plain {20 * MIB}") != OUT_OF_MEMORY:
                    pass
            assert box.machine.used() <= LIMIT_MIB * MIB


def test_a_process_killed_in_a_call_leaves_nothing_in_flight(tmp_path: Path) -> None:
    with gated(tmp_path) as (box, gates):
        with box.worker() as worker:
            worker.ok("start 0")
            (gates / "allocate").touch()
            worker.ok(f"beside alloc 0 plain {200 * MIB}")
            assert is_reached(gates / "allocate.reached")
            worker.kill()
        (gates / "allocate").unlink()
        with box.worker() as next_one:
            next_one.ok("start 0")
            next_one.ok(f"alloc 0 plain {500 * MIB}")
            assert box.card().used_bytes == box.machine.used()


@pytest.mark.parametrize(
    ("idle", "asked_mib", "meanwhile"),
    [
        pytest.param("none", 20, f"alloc 91 async {10 * MIB}", id="another takes of what came"),
        pytest.param("scattered", 12, f"alloc 91 async {16 * MIB}", id="the idle room is in pieces"),
        pytest.param("none", 20, "sync", id="another counts what came"),
    ],
)
def test_a_chunk_that_passes_the_limit_is_given_back(
    tmp_path: Path, idle: str, asked_mib: int, meanwhile: str
) -> None:
    """A pool takes 32 MiB for a small block where fewer are left; another comes before that is undone."""
    with gated(tmp_path) as (box, gates), box.worker() as worker:
        worker.ok("start 0")
        if idle == "scattered":
            worker.ok(f"keep {LIMIT_MIB * MIB}")
            for number, size_mib in enumerate((10, 2, 10, 2)):
                worker.ok(f"alloc {number} async {size_mib * MIB}")
            worker.ok("free 0")
            worker.ok("free 2")
        left = LIMIT_MIB * MIB - box.card().used_bytes
        worker.ok(f"alloc 50 plain {left - 24 * MIB}")
        (gates / "pool-grown").touch()
        worker.ok(f"beside alloc 90 async {asked_mib * MIB}")
        assert is_reached(gates / "pool-grown.reached")
        worker.say(meanwhile)
        time.sleep(0.1)
        (gates / "pool-grown").unlink()
        answers = [worker.heard(), worker.heard()]
        worker.ok("joined")
        assert OUT_OF_MEMORY in answers
        assert box.machine.used() <= LIMIT_MIB * MIB
        worker.ok("sync")
        assert box.card().used_bytes == box.machine.used()


@pytest.mark.parametrize("figures", ["full", "none"])
def test_code_that_comes_beside_threads_that_allocate_without_a_pause_is_counted(
    tmp_path: Path, figures: str
) -> None:
    """Each look at the driver's figure met calls in flight, as large as the code: 1,827 MiB of 1,500."""
    with (
        container(tmp_path, memory_mib=1500, GPUSLICE_SIM_PROCESS_FIGURES=figures) as box,
        box.worker() as worker,
    ):
        worker.ok("start 0")
        worker.ok(f"beside threads 2 150000 {400 * MIB} plain")
        for number in range(4):
            worker.say(f"alloc {number} module {300 * MIB}")
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            assert box.machine.used() <= 1500 * MIB
            time.sleep(0.002)
        answers = [worker.heard() for _ in range(5)]
        assert sum(answer.startswith("ok ") for answer in answers) == 1
        worker.ok("joined")
