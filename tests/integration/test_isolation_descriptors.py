"""Exported memory that only a descriptor keeps, after the process that made it has ended."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path

from .isolation_rig import (
    MIB,
    OUT_OF_MEMORY,
    Container,
    Worker,
    container,
    descriptor_of,
    make_container,
    make_machine,
)

CONTEXT_MIB = 121


def handed_over(maker: Worker, keeper: Worker, mib: int, number: int = 0) -> int:
    """Memory that the maker exports, and its descriptor, which the keeper has then and never imports."""
    maker.ok(f"alloc {number} physical {mib * MIB}")
    pid, file = maker.ok(f"share {number}")
    kept = keeper.ok(f"take {pid} {file}")[1]
    maker.ok(f"shut {file}")
    return kept


def assert_counted(box: Container, mib: int) -> None:
    assert box.card().used_bytes == box.machine.used() == mib * MIB


def test_what_a_dead_process_left_in_a_descriptor_counts_until_that_is_closed(tmp_path: Path) -> None:
    """Three processes left 900 MiB each behind, under a limit of 1,024."""
    with container(tmp_path) as box, box.worker() as keeper:
        kept, answers = [], []
        for _ in range(3):
            with box.worker() as maker:
                maker.ok("start 0")
                answers.append(maker.ask(f"alloc 0 physical {700 * MIB}"))
                if answers[-1] == "ok":
                    pid, file = maker.ok("share 0")
                    kept.append(keeper.ok(f"take {pid} {file}")[1])
        assert answers == ["ok", OUT_OF_MEMORY, OUT_OF_MEMORY]
        with box.worker() as newcomer:
            newcomer.ok("start 0")
            assert_counted(box, CONTEXT_MIB + 700)
            assert newcomer.ask(f"alloc 0 plain {400 * MIB}") == OUT_OF_MEMORY
            keeper.ok(f"shut {kept[0]}")
            newcomer.ok(f"alloc 0 plain {400 * MIB}")
            assert_counted(box, CONTEXT_MIB + 400)


def test_each_of_several_counts_for_itself(tmp_path: Path) -> None:
    with container(tmp_path, cards=2) as box, box.worker() as keeper, box.worker() as living:
        living.ok("start 0")
        own = handed_over(living, keeper, 32)
        with box.worker() as maker:
            maker.ok("start 0")
            kept = [handed_over(maker, keeper, mib, number) for number, mib in enumerate((64, 2, 128))]
            maker.ok("current 1")
            handed_over(maker, keeper, 256, 9)
        living.ok("info")
        for left, shut in ((194, kept[1]), (192, kept[2]), (64, kept[0]), (0, None)):
            assert_counted(box, CONTEXT_MIB + 32 + left)
            if shut is not None:
                keeper.ok(f"shut {shut}")
                assert living.ask(f"alloc 7 plain {1024 * MIB}") == OUT_OF_MEMORY
        assert box.card(1).used_bytes == box.machine.used(1) == 256 * MIB
        living.ok("free 0")
        assert_counted(box, CONTEXT_MIB + 32)
        keeper.ok(f"shut {own}")
        living.ok(f"alloc 7 plain {900 * MIB}")
        assert_counted(box, CONTEXT_MIB + 900)


def test_two_descriptors_of_the_same_memory_are_one(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as keeper:
        with box.worker() as maker:
            maker.ok("start 0")
            maker.ok(f"alloc 0 physical {300 * MIB}")
            files = [maker.ok("share 0") for _ in range(2)]
            kept = [keeper.ok(f"take {pid} {file}")[1] for pid, file in files]
        keeper.ok("start 0")
        for file in kept:
            assert_counted(box, CONTEXT_MIB + 300)
            keeper.ok(f"shut {file}")
        assert keeper.ask(f"alloc 0 plain {1024 * MIB}") == OUT_OF_MEMORY
        assert_counted(box, CONTEXT_MIB)


def test_what_an_importer_lets_go_of_is_kept_by_a_descriptor(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as keeper:
        with box.worker() as maker:
            maker.ok("start 0")
            keeper.ok("start 0")
            maker.ok(f"alloc 0 physical {300 * MIB}")
            pid, file = maker.ok("share 0")
            kept = keeper.ok(f"take {pid} {file}")[1]
            keeper.ok(f"receive 0 {pid} {file}")
        keeper.ok("info")
        keeper.ok("free 0")
        assert_counted(box, CONTEXT_MIB + 300)
        keeper.ok(f"shut {kept}")
        keeper.ok(f"alloc 0 plain {900 * MIB}")
        assert_counted(box, CONTEXT_MIB + 900)


def test_a_descriptor_on_its_way_in_a_socket_counts(tmp_path: Path) -> None:
    """Nobody has it: the message that carries it does."""
    with container(tmp_path) as box:
        here, there = socket.socketpair()
        with box.worker() as maker:
            maker.ok("start 0")
            maker.ok(f"alloc 0 physical {700 * MIB}")
            pid, file = maker.ok("share 0")
            taken = descriptor_of(pid, file)
            socket.send_fds(here, [b"x"], [taken])
            os.close(taken)
        with box.worker() as newcomer:
            newcomer.ok("start 0")
            assert_counted(box, CONTEXT_MIB + 700)
            assert newcomer.ask(f"alloc 0 plain {400 * MIB}") == OUT_OF_MEMORY
            here.close()
            there.close()
            newcomer.ok(f"alloc 0 plain {400 * MIB}")
            assert_counted(box, CONTEXT_MIB + 400)


def test_who_exports_what_it_imported_counts_it(tmp_path: Path) -> None:
    """Else the maker frees it, the importer closes it, and the second descriptor keeps it for nobody."""
    with container(tmp_path) as box, box.worker() as maker, box.worker() as opener, box.worker() as keeper:
        maker.ok("start 0")
        opener.ok("start 0")
        maker.ok(f"alloc 0 physical {300 * MIB}")
        pid, file = maker.ok("share 0")
        opener.ok(f"receive 0 {pid} {file}")
        maker.ok(f"shut {file}")
        again = opener.ok("share 0")
        maker.ok("free 0")
        kept = keeper.ok(f"take {again[0]} {again[1]}")[1]
        opener.ok(f"shut {again[1]}")
        opener.ok("free 0")
        assert_counted(box, 2 * CONTEXT_MIB + 300)
        opener.kill()
        maker.ok("info")
        assert_counted(box, CONTEXT_MIB + 300)
        assert maker.ask(f"alloc 1 plain {700 * MIB}") == OUT_OF_MEMORY
        keeper.ok(f"shut {kept}")
        maker.ok(f"alloc 1 plain {700 * MIB}")
        assert_counted(box, CONTEXT_MIB + 700)


def test_an_export_of_what_was_imported_fits_or_is_refused(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as maker, box.worker() as opener:
        maker.ok("start 0")
        opener.ok("start 0")
        maker.ok(f"alloc 0 physical {500 * MIB}")
        pid, file = maker.ok("share 0")
        opener.ok(f"receive 0 {pid} {file}")
        before = len(os.listdir(f"/proc/{opener.pid}/fd"))
        assert opener.ask("share 0") == OUT_OF_MEMORY
        assert len(os.listdir(f"/proc/{opener.pid}/fd")) == before


def test_one_containers_descriptors_are_not_anothers(tmp_path: Path) -> None:
    """Though their device node may be the same file, as it is here."""
    machine = make_machine(tmp_path)
    one, other = (make_container(tmp_path / name, machine) for name in ("one", "other"))
    with other.worker() as keeper, one.worker() as newcomer:
        keeper.ok("start 0")
        for box in (one, other):
            with box.worker() as maker:
                maker.ok("start 0")
                handed_over(maker, keeper, 300)
        newcomer.ok("start 0")
        keeper.ok("info")
        for box, worker in ((one, newcomer), (other, keeper)):
            assert box.card().used_bytes == (CONTEXT_MIB + 300) * MIB
            assert worker.ask(f"alloc 5 plain {700 * MIB}") == OUT_OF_MEMORY
        assert machine.used() == 2 * (CONTEXT_MIB + 300) * MIB


def test_a_descriptor_that_cannot_be_locked_counts_as_open(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as maker:
        maker.ok("start 0")
        with (tmp_path / "cards.exports").open("w+b") as everything:
            lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 1 << 61, 1 << 61, 0)
            fcntl.fcntl(everything, fcntl.F_OFD_SETLK, lock)
            maker.ok(f"alloc 0 physical {500 * MIB}")
            maker.ok("share 0")
            maker.ok("free 0")
            assert_counted(box, CONTEXT_MIB + 500)
        assert maker.ask(f"alloc 1 plain {600 * MIB}") == OUT_OF_MEMORY


def group_of_two(maker: Worker, other: Worker, mib: int) -> None:
    """A group with a member of the maker's, both by the number 0; the other process has it as 0."""
    maker.ok("start 0")
    other.ok("start 0")
    maker.ok(f"alloc 0 group {mib * MIB}")
    pid, file = maker.ok("share 0")
    other.ok(f"receive 0 {pid} {file}")


def test_members_of_a_group_that_another_process_has_count_when_it_is_released(tmp_path: Path) -> None:
    """Each such round left its member on the card, counted for nobody."""
    with container(tmp_path) as box, box.worker() as maker, box.worker() as other:
        group_of_two(maker, other, 500)
        maker.ok("free 0")
        assert_counted(box, 2 * CONTEXT_MIB + 500)
        assert maker.ask(f"alloc 1 plain {400 * MIB}") == OUT_OF_MEMORY


def test_what_an_importer_bound_counts_when_it_releases_the_group(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as maker, box.worker() as other:
        group_of_two(maker, other, 200)
        other.ok(f"alloc 1 physical {200 * MIB}")
        other.ok("bind 1 0 0")
        other.ok("free 1")
        other.ok("free 0")
        assert_counted(box, 2 * CONTEXT_MIB + 400)
        assert other.ask(f"alloc 1 plain {400 * MIB}") == OUT_OF_MEMORY
        maker.ok(f"unbind 0 0 {200 * MIB}")
        maker.ok("free 0")
        assert_counted(box, 2 * CONTEXT_MIB + 200)
        maker.kill()
        other.kill()
        with box.worker() as newcomer:
            newcomer.ok("start 0")
            assert_counted(box, CONTEXT_MIB)


def test_what_is_unbound_from_a_shared_group_is_given_back(tmp_path: Path) -> None:
    """As NCCL and PyTorch's symmetric memory do before they release one."""
    with container(tmp_path) as box, box.worker() as maker, box.worker() as other:
        group_of_two(maker, other, 500)
        maker.ok(f"unbind 0 0 {500 * MIB}")
        assert_counted(box, 2 * CONTEXT_MIB)
        maker.ok("free 0")
        other.ok("free 0")
        maker.ok(f"alloc 1 plain {700 * MIB}")
        assert_counted(box, 2 * CONTEXT_MIB + 700)


def test_a_dead_processs_member_of_a_shared_group_counts_while_that_is_open(
    tmp_path: Path,
) -> None:
    """Whether a driver keeps it then is not known."""
    with container(tmp_path) as box, box.worker() as maker, box.worker() as other:
        group_of_two(maker, other, 500)
        maker.kill()
        assert other.ask(f"alloc 1 plain {500 * MIB}") == OUT_OF_MEMORY
        other.ok("free 0")
        other.ok(f"alloc 1 plain {500 * MIB}")
        assert_counted(box, CONTEXT_MIB + 500)
