"""Memory that something else than its handle keeps, and memory that the driver takes for itself: counted for
as long as the driver's own accounts have it, and to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.isolation_rig import (
    MIB,
    OUT_OF_MEMORY,
    Container,
    Machine,
    Worker,
    container,
    make_container,
    make_machine,
)

CONTEXT_MIB = 121
FOLLOWED_POOLS = 512


@contextmanager
def started(folder: Path) -> Iterator[tuple[Container, Worker]]:
    with container(folder) as box, box.worker() as worker:
        worker.ok("start 0")
        yield box, worker


def assert_counted(box: Container, mib: int) -> None:
    assert box.card().used_bytes == box.machine.used() == (CONTEXT_MIB + mib) * MIB


# ---- groups, tiles, handles ----


def test_a_group_keeps_its_members_until_they_are_unbound(tmp_path: Path) -> None:
    with started(tmp_path) as (box, worker):
        worker.ok(f"alloc 0 group {64 * MIB}")
        assert_counted(box, 64)
        worker.ok(f"unbind 0 0 {64 * MIB}")
        assert_counted(box, 0)
        for number, offset in ((1, 0), (2, 32)):
            worker.ok(f"alloc {number} physical {32 * MIB}")
            worker.ok(f"bind {number} 0 {offset * MIB}")
            worker.ok(f"free {number}")
        assert_counted(box, 64)
        worker.ok(f"unbind 0 {32 * MIB} {32 * MIB}")
        assert_counted(box, 32)
        worker.ok("free 0")
        assert_counted(box, 0)


def test_a_group_that_is_mapped_keeps_its_members_without_a_handle(tmp_path: Path) -> None:
    """Else a container could have memory that nobody counts: bound, mapped as a group, all handles gone."""
    with started(tmp_path) as (box, worker):
        worker.ok(f"alloc 0 group {600 * MIB}")
        worker.ok("map 0")
        worker.ok("free 0")
        assert_counted(box, 600)
        assert worker.ask(f"alloc 1 plain {400 * MIB}") == OUT_OF_MEMORY
        worker.ok("unmap 0")
        assert_counted(box, 0)


def test_a_handle_that_comes_again_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    with started(tmp_path) as (box, worker):
        for _ in range(20):
            worker.ok(f"alloc 0 group {64 * MIB}")
            worker.ok(f"alloc 1 physical {32 * MIB}")
            worker.ok("free 0")
            worker.ok(f"alloc 0 physical {32 * MIB}")
            worker.ok("free 1")
            worker.ok("free 0")
        assert_counted(box, 0)


def test_a_sparse_array_keeps_its_tiles_until_it_is_destroyed(tmp_path: Path) -> None:
    with started(tmp_path) as (box, worker):
        for number in range(3):
            worker.ok(f"alloc {number} tile {64 * MIB}")
        assert_counted(box, 192)
        worker.ok("free 1")
        assert_counted(box, 128)
        worker.ok("free-array 0")
        worker.ok("free-array 2")
        assert_counted(box, 0)


def test_a_handle_counts_until_the_last_of_its_references(tmp_path: Path) -> None:
    with started(tmp_path) as (box, worker):
        worker.ok(f"alloc 0 physical {64 * MIB}")
        worker.ok("map 0")
        worker.ok("free 0")
        assert_counted(box, 64)
        worker.ok("retain 0")
        worker.ok("retain 0")
        worker.ok("unmap 0")
        assert_counted(box, 64)
        worker.ok("free 0")
        assert_counted(box, 64)
        worker.ok("free 0")
        assert_counted(box, 0)


def test_what_a_handle_maps_counts_though_it_was_given_back(tmp_path: Path) -> None:
    with started(tmp_path) as (box, worker):
        worker.ok(f"alloc 0 physical {64 * MIB}")
        worker.ok("map 0")
        worker.ok("free 0")
        worker.ok("map-again 1 0")
        worker.ok("unmap 0")
        assert_counted(box, 64)
        worker.ok("unmap 1")
        assert_counted(box, 0)


def test_what_an_importer_of_a_handle_keeps_alive_stays_counted(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as opener:
        opener.ok("start 0")
        with box.worker() as maker:
            maker.ok("start 0")
            maker.ok(f"alloc 0 physical {500 * MIB}")
            opener.ok(f"receive 0 {' '.join(map(str, maker.ok('share 0')))}")
        assert opener.ask(f"alloc 1 plain {600 * MIB}") == OUT_OF_MEMORY
        assert box.card().used_bytes >= box.machine.used()
        opener.ok("free 0")
        opener.ok(f"alloc 1 plain {600 * MIB}")
        assert_counted(box, 600)


# ---- pools, managed memory ----


def test_what_a_pool_keeps_counts_until_it_is_trimmed_or_needed(tmp_path: Path) -> None:
    with started(tmp_path) as (box, worker):
        worker.ok(f"keep {1 << 40}")
        for number in range(4):
            worker.ok(f"alloc {number} async {64 * MIB}")
        for number in range(4):
            worker.ok(f"free {number}")
        worker.ok("sync")
        assert_counted(box, 256)
        worker.ok("trim-default")
        assert_counted(box, 0)
        worker.ok(f"alloc 0 async {512 * MIB}")
        worker.ok("free 0")
        worker.ok("sync")
        assert_counted(box, 512)
        worker.ok(f"alloc 1 plain {800 * MIB}")
        assert_counted(box, 800)


def test_a_pool_that_keeps_nothing_gives_back_at_the_next_wait(tmp_path: Path) -> None:
    with started(tmp_path) as (box, worker):
        worker.ok("keep 0")
        worker.ok(f"alloc 0 async {256 * MIB}")
        worker.ok("free 0")
        worker.ok("sync")
        assert_counted(box, 0)


def test_managed_memory_moved_to_and_fro_counts_the_same(tmp_path: Path) -> None:
    with started(tmp_path) as (box, worker):
        worker.ok(f"alloc 0 managed {300 * MIB}")
        assert_counted(box, 300)
        worker.ok("advise 0")
        assert_counted(box, 300)
        assert worker.ask(f"alloc 1 managed {700 * MIB}") == OUT_OF_MEMORY


def test_a_pool_more_than_can_be_followed_gives_no_memory(tmp_path: Path) -> None:
    with (
        container(tmp_path, cuda="13.0", memory_mib=2048, pool_chunk_mib=2) as box,
        box.worker(version=13000) as worker,
    ):
        worker.ok("start 0")
        for number in range(FOLLOWED_POOLS):
            worker.ok(f"alloc {number} managed-pool {MIB}")
        assert worker.ask(f"alloc {FOLLOWED_POOLS} managed-pool {MIB}") == OUT_OF_MEMORY
        assert box.card().used_bytes == box.machine.used()
        worker.ok("free 0")
        worker.ok(f"alloc 0 managed-pool {MIB}")


def test_graphs_keep_their_memory_for_the_next_until_it_is_trimmed(tmp_path: Path) -> None:
    with started(tmp_path) as (box, worker):
        for kind in ("graph", "node", "captured"):
            worker.ok(f"alloc 0 {kind} {500 * MIB}")
            assert_counted(box, 500)
            assert worker.ask(f"alloc 1 plain {500 * MIB}") == OUT_OF_MEMORY
            worker.ok("free 0")
            worker.ok("sync")
            assert_counted(box, 0)


def test_a_graph_with_memory_on_two_cards_is_held_to_the_limit_of_each(tmp_path: Path) -> None:
    with container(tmp_path, cards=2, memory_mib=800) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 plain {500 * MIB}")
        assert worker.ask(f"alloc 1 graph-on-two {300 * MIB}") == OUT_OF_MEMORY
        assert box.card(0).used_bytes == box.machine.used(0) < 800 * MIB
        assert box.card(1).used_bytes == box.machine.used(1) == 0
        worker.ok(f"alloc 2 graph-on-two {100 * MIB}")
        assert box.card(0).used_bytes == box.machine.used(0)
        assert box.card(1).used_bytes == box.machine.used(1) == 2 * MIB


# ---- what the driver takes for itself ----


def hidden(folder: Path, machine: Machine, memory_mib: int = 1024) -> Container:
    """A container with a PID namespace of its own: NVML lists no process there."""
    return make_container(folder, machine, memory_mib=memory_mib, NVIDIA_VISIBLE_DEVICES=machine.uuid())


def test_modules_heaps_and_contexts_count_where_nvml_hides_processes(tmp_path: Path) -> None:
    machine = make_machine(tmp_path, cuda="12.8")
    box = hidden(tmp_path / "box", machine)
    with box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 plain {100 * MIB}")
        at_rest = machine.used()
        for kind in ("module", "green", "context"):
            worker.ok(f"alloc 1 {kind} {64 * MIB}")
            assert box.card().used_bytes == machine.used() > at_rest, kind
            worker.ok("free 1")
            assert box.card().used_bytes == machine.used() == at_rest, kind
        for heap_mib in (64, 256, 8):
            worker.ok(f"heap {heap_mib * MIB}")
            assert box.card().used_bytes == machine.used()


@pytest.mark.parametrize("seen", [True, False], ids=["listed", "hidden"])
def test_what_does_not_fit_is_undone_and_refused(tmp_path: Path, seen: bool) -> None:
    machine = make_machine(tmp_path)
    make = make_container if seen else hidden
    box = make(tmp_path / "box", machine, memory_mib=600)
    with box.worker() as worker:
        worker.ok("start 0")
        at_rest = machine.used()
        assert worker.ask(f"alloc 0 module {900 * MIB}") == OUT_OF_MEMORY
        assert worker.ask(f"heap {900 * MIB}") == OUT_OF_MEMORY
        assert box.card().used_bytes == machine.used() == at_rest
        assert box.card().refused == 2
        worker.ok(f"alloc 0 module {300 * MIB}")
        assert box.card().used_bytes == machine.used()


def test_a_module_goes_with_its_context_where_nvml_hides_processes(tmp_path: Path) -> None:
    machine = make_machine(tmp_path)
    box = hidden(tmp_path / "box", machine)
    with box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 module {64 * MIB}")
        worker.ok("reset")
        assert box.card().used_bytes == machine.used()


def test_a_neighbour_that_only_holds_memory_changes_nothing(tmp_path: Path) -> None:
    machine = make_machine(tmp_path)
    box, other = hidden(tmp_path / "box", machine), hidden(tmp_path / "other", machine, 4096)
    with box.worker() as worker, other.worker() as neighbour:
        neighbour.ok("start 0")
        worker.ok("start 0")
        neighbour.ok(f"alloc 0 plain {3000 * MIB}")
        worker.ok(f"alloc 0 module {64 * MIB}")
        neighbour.ok("free 0")
        assert box.card().used_bytes + other.card().used_bytes == machine.used()
        worker.ok("free 0")
        assert box.card().used_bytes + other.card().used_bytes == machine.used()
