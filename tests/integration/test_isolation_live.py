"""A limits file that changes while programs run: each of them follows, and none has to be started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpuslice.adapters.region.limits import write_limits
from tests import HANG_S
from tests.integration.isolation_rig import MIB, OUT_OF_MEMORY, SIM, Container, Worker, container

CONTEXT_MIB = 121


def change(box: Container, memory_mib: int, card: int = 0) -> None:
    """As the agent does."""
    box.limits[card] = replace(box.limits[card], memory_bytes=memory_mib * MIB)
    write_limits(box.limits_path, box.limits)


def soon(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def told(worker: Worker) -> int:
    """The size of the card in MiB, as the program sees it."""
    return worker.ok("info")[1] // MIB


@pytest.mark.parametrize("kind", ["plain", "async", "physical", "pitch", "array"])
def test_every_way_to_allocate_follows_a_larger_limit(tmp_path: Path, kind: str) -> None:
    with container(tmp_path, memory_mib=CONTEXT_MIB + 100) as box, box.worker() as worker:
        worker.ok("start 0")
        ask = f"pitch 0 {1 << 20} 300" if kind == "pitch" else f"alloc 0 {kind} {300 * MIB}"
        assert worker.ask(ask) == OUT_OF_MEMORY
        change(box, CONTEXT_MIB + 400)
        soon(lambda: worker.ask(ask) != OUT_OF_MEMORY)
        assert box.machine.used() >= 300 * MIB


def test_all_processes_and_nvidia_smi_show_the_new_limit(tmp_path: Path) -> None:
    with container(tmp_path, memory_mib=1024) as box, box.worker() as one, box.worker("linked") as two:
        for worker in (one, two):
            worker.ok("start 0")
            assert told(worker) == 1024
        change(box, 2048)
        for worker in (one, two):
            soon(lambda worker=worker: told(worker) == 2048)  # type: ignore[misc]
            assert worker.ok("total 0") == [2048 * MIB]
        assert "2048MiB" in box.run(str(SIM / "nvidia-smi")).stdout
        assert box.card().limit_bytes == 2048 * MIB


def test_a_smaller_limit_ends_nothing_and_grants_nothing(tmp_path: Path) -> None:
    with container(tmp_path, memory_mib=1024) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 plain {600 * MIB}")
        change(box, 512)
        soon(lambda: worker.ok("info") == [0, 512 * MIB])
        assert worker.ask(f"alloc 1 plain {2 * MIB}") == OUT_OF_MEMORY
        worker.ok("free 0")
        worker.ok(f"alloc 0 plain {300 * MIB}")
        assert worker.leave() == 0


def test_the_change_of_one_card_leaves_the_other(tmp_path: Path) -> None:
    with container(tmp_path, memory_mib=1024, cards=2) as box, box.worker() as worker:
        worker.ok("start 0")
        change(box, 2048, card=1)
        soon(lambda: worker.ok("total 1") == [2048 * MIB])
        assert worker.ok("total 0") == [1024 * MIB]


@pytest.mark.parametrize("text", ["", "gpuslice 1\nend 0\n", "gpuslice 1\nGPU-", "nonsense\n"])
def test_a_file_that_says_nothing_of_the_card_changes_nothing(tmp_path: Path, text: str) -> None:
    """What was allowed last stays allowed, and the next complete file counts."""
    with container(tmp_path, memory_mib=1024) as box, box.worker() as worker:
        worker.ok("start 0")
        box.limits_path.write_text(text)
        with box.worker() as late:
            assert late.ask("start 0") == OUT_OF_MEMORY
        assert told(worker) == 1024
        worker.ok(f"alloc 0 plain {500 * MIB}")
        change(box, 2048)
        soon(lambda: told(worker) == 2048)


def test_a_child_follows_as_well(tmp_path: Path) -> None:
    with container(tmp_path, memory_mib=1024) as box, box.worker() as parent:
        parent.ok("start 0")
        change(box, 2048)
        with box.worker() as child:
            child.ok("start 0")
            assert told(child) == 2048
        soon(lambda: told(parent) == 2048)


def test_once_the_accounts_fit_a_smaller_limit_no_process_exceeds_it_any_more(tmp_path: Path) -> None:
    """Whoever lowers a limit reads the accounts once, and need not wait for the processes to notice."""
    small, large, fitted = 500, 1400, 0
    with container(tmp_path, memory_mib=large) as box, box.worker() as one, box.worker() as two:
        for worker in (one, two):
            worker.ok("start 0")
            worker.say(f"threads 6 100000000 {90 * MIB}")
        soon(lambda: box.machine.used() > small * MIB)
        for _ in range(300):
            change(box, small)
            if fits := box.card().used_bytes <= small * MIB:
                fitted += 1
            for _ in range(20):
                assert not fits or box.machine.used() <= small * MIB
            change(box, large)
            soon(lambda: box.machine.used() > small * MIB)
        one.kill()
        two.kill()
    assert fitted


def test_programs_that_size_themselves_once_are_shown_what_is_their_own(tmp_path: Path) -> None:
    with container(tmp_path, memory_mib=1024) as box, box.worker() as worker:
        worker.ok("start 0")
        box.limits[0] = replace(box.limits[0], request_bytes=512 * MIB, shows_request=True)
        change(box, 2048)
        soon(lambda: told(worker) == 512)
        assert worker.ok("total 0") == [512 * MIB]
        assert "512MiB" in box.run(str(SIM / "nvidia-smi")).stdout
        worker.ok(f"alloc 0 plain {1000 * MIB}")
        assert worker.ok("info") == [0, 512 * MIB]
