"""Memory that the driver has in another process's figure, or in nobody's: it hides nothing that a process
takes beside it, and is counted once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import HANG_S
from tests.integration.isolation_rig import (
    MIB,
    OUT_OF_MEMORY,
    Container,
    Worker,
    container,
    make_container,
    make_machine,
)

LIMIT_MIB = 1500
CONTEXT_MIB = 121


def lend(maker: Worker, taker: Worker, how: str, mib: int) -> None:
    """The maker's memory 0 becomes the taker's 0."""
    if how == "IPC":
        maker.ok(f"alloc 0 plain {mib * MIB}")
        taker.ok(f"import 0 {maker.ask('export 0').split()[1]}")
        return
    maker.ok(f"alloc 0 physical {mib * MIB}")
    pid, file = maker.ok("share 0")
    taker.ok(f"receive 0 {pid} {file}")
    maker.ok(f"shut {file}")


def until_counted_exactly(box: Container, *workers: Worker) -> None:
    until = time.monotonic() + HANG_S
    while box.card().used_bytes != box.machine.used():
        assert time.monotonic() < until, f"{box.card().used_bytes} counted of {box.machine.used()}"
        for worker in workers:
            worker.ok("sync")
            worker.ok("info")
        time.sleep(0.05)


# ---- code that comes beside it


@pytest.mark.parametrize("how", ["IPC", "descriptor"])
def test_open_memory_of_another_process_hides_no_code(tmp_path: Path, how: str) -> None:
    """2,048 MiB of 1,500 were reached: code passed for what was open, which the figure might have held."""
    with (
        container(tmp_path, memory_mib=LIMIT_MIB) as box,
        box.worker() as maker,
        box.worker() as taker,
    ):
        maker.ok("start 0")
        taker.ok("start 0")
        lend(maker, taker, how, 900)
        assert taker.ask(f"alloc 1 module {300 * MIB}") == "ok"
        assert taker.ask(f"alloc 2 module {300 * MIB}") == OUT_OF_MEMORY
        assert box.card().used_bytes == box.machine.used() == (2 * CONTEXT_MIB + 900 + 300) * MIB + 2 * MIB


@pytest.mark.parametrize(
    ("kind", "cuda", "blocks", "block"),
    [
        ("managed", "12.2", 1, 900 * MIB),
        ("managed", "12.2", 450, 4096),
        ("managed-pool", "13.0", 1, 900 * MIB),
    ],
)
def test_managed_memory_hides_no_code(tmp_path: Path, kind: str, cuda: str, blocks: int, block: int) -> None:
    """It is in no process's figure: on an H100 the card lost 128 MiB more than the process held."""
    with container(tmp_path, memory_mib=LIMIT_MIB, cuda=cuda) as box, box.worker() as worker:
        worker.ok("start 0")
        for number in range(blocks):
            worker.ok(f"alloc {number} {kind} {block}")
        assert worker.ask(f"alloc 1000 module {300 * MIB}") == "ok"
        assert worker.ask(f"alloc 1001 module {300 * MIB}") == OUT_OF_MEMORY
        until_counted_exactly(box, worker)
        for number in (1000, *range(blocks)):
            worker.ok(f"free {number}")
        until_counted_exactly(box, worker)


# ---- what was passed on


@pytest.mark.parametrize("how", ["IPC", "descriptor"])
@pytest.mark.parametrize("end", ["frees", "dies"])
def test_what_was_passed_on_is_counted_once_when_it_is_closed(tmp_path: Path, how: str, end: str) -> None:
    """It stands in the importer's figure, where it could as well be code. 2 MiB of a sequence stayed there
    for good, since the importer had given other memory away."""
    with (
        container(tmp_path, memory_mib=LIMIT_MIB) as box,
        box.worker() as maker,
        box.worker() as taker,
    ):
        maker.ok("start 0")
        taker.ok("start 0")
        taker.ok(f"alloc 1 plain {100 * MIB}")
        taker.ask("export 1")
        lend(maker, taker, how, 400)
        if end == "frees":
            maker.ok("free 0")
        else:
            maker.kill()
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            taker.ok("info")
            assert box.card().used_bytes >= box.machine.used()
            time.sleep(0.05)
        taker.ok("free 0")
        until_counted_exactly(box, taker)


def test_a_context_made_beside_what_was_passed_on_is_counted_alone_once_that_is_closed(
    tmp_path: Path,
) -> None:
    with (
        container(tmp_path, memory_mib=LIMIT_MIB, cards=2) as box,
        box.worker() as maker,
        box.worker() as taker,
    ):
        maker.ok("start 0")
        taker.ok("start 1")
        taker.ok(f"alloc 1 physical {2 * MIB}")
        lend(maker, taker, "descriptor", 400)
        maker.ok("free 0")
        taker.ok("current 0")
        taker.ok(f"alloc 2 plain {100 * MIB}")
        taker.ask("export 2")
        taker.ok("free 0")
        until_counted_exactly(box, taker)


def test_a_descriptor_alone_keeps_what_was_freed_counted(tmp_path: Path) -> None:
    with container(tmp_path, memory_mib=LIMIT_MIB) as box, box.worker() as maker:
        maker.ok("start 0")
        maker.ok(f"alloc 0 physical {900 * MIB}")
        files = [maker.ok("share 0")[1] for _ in range(2)]
        maker.ok("free 0")
        for file in files:
            assert box.card().used_bytes == box.machine.used() == (CONTEXT_MIB + 900) * MIB
            assert maker.ask(f"alloc 1 module {600 * MIB}") == OUT_OF_MEMORY
            maker.ok(f"shut {file}")
        maker.ok(f"alloc 1 plain {900 * MIB}")
        assert box.card().used_bytes == box.machine.used() == (CONTEXT_MIB + 900) * MIB


# ---- another container's


@pytest.mark.parametrize("how", ["IPC", "descriptor"])
def test_what_another_container_freed_is_counted_where_it_is_open(tmp_path: Path, how: str) -> None:
    """Two containers came to any amount together: the one allocated and freed, the other opened and kept."""
    machine = make_machine(tmp_path)
    one = make_container(tmp_path / "one", machine, memory_mib=LIMIT_MIB)
    other = make_container(tmp_path / "other", machine, memory_mib=LIMIT_MIB)
    with one.worker() as maker, other.worker() as keeper:
        maker.ok("start 0")
        keeper.ok("start 0")
        answers = [passed_on(maker, keeper, how, number) for number in range(4)]
        assert answers == ["ok", "ok", "ok", OUT_OF_MEMORY]
        assert keeper.ask(f"alloc 9 plain {MIB}") == OUT_OF_MEMORY
        assert other.card().used_bytes == (CONTEXT_MIB + 3 * 600) * MIB
        assert machine.used() == (2 * CONTEXT_MIB + 3 * 600) * MIB


def passed_on(maker: Worker, keeper: Worker, how: str, number: int) -> str:
    """What the keeper hears when it opens 600 MiB, of which the maker then keeps nothing."""
    if how == "IPC":
        maker.ok(f"alloc {number} plain {600 * MIB}")
        answer = keeper.ask(f"import {number} {maker.ask(f'export {number}').split()[1]}")
    else:
        maker.ok(f"alloc {number} physical {600 * MIB}")
        pid, file = maker.ok(f"share {number}")
        answer = keeper.ask(f"receive {number} {pid} {file}")
        maker.ok(f"shut {file}")
    maker.ok(f"free {number}")
    return answer
