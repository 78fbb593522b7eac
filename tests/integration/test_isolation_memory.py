"""The limit holds for all of a container's processes together; what is counted is what the driver says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.isolation_rig import (
    MIB,
    OUT_OF_MEMORY,
    SIM,
    Container,
    container,
    make_container,
    make_machine,
)

CONTEXT_MIB = 121


def test_allocations_up_to_the_last_page_and_not_one_more(tmp_path: Path) -> None:
    with container(tmp_path, memory_mib=CONTEXT_MIB + 100) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 plain {98 * MIB}")
        worker.ok(f"alloc 1 plain {2 * MIB}")
        assert worker.ask("alloc 2 plain 1") == OUT_OF_MEMORY
        assert box.card().used_bytes == box.card().limit_bytes == box.machine.used()
        worker.ok("free 1")
        worker.ok(f"alloc 1 plain {2 * MIB}")
        assert box.card().refused == 1


def test_a_refused_program_goes_on(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        for _ in range(20):
            assert worker.ask(f"alloc 0 plain {2048 * MIB}") == OUT_OF_MEMORY
        worker.ok(f"alloc 0 plain {512 * MIB}")
        assert worker.leave() == 0


def test_the_limit_is_for_all_processes_together(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as one, box.worker("linked") as two:
        one.ok("start 0")
        two.ok("start 0")
        one.ok(f"alloc 0 plain {500 * MIB}")
        assert two.ask(f"alloc 0 plain {500 * MIB}") == OUT_OF_MEMORY
        two.ok(f"alloc 0 plain {280 * MIB}")
        assert box.card().used_bytes == box.machine.used()


def test_a_killed_process_returns_its_memory(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as one, box.worker() as two:
        one.ok("start 0")
        one.ok(f"alloc 0 plain {700 * MIB}")
        two.ok("start 0")
        assert two.ask(f"alloc 0 plain {700 * MIB}") == OUT_OF_MEMORY
        one.kill()
        two.ok(f"alloc 0 plain {700 * MIB}")
        assert box.card().used_bytes == box.machine.used() == (700 + CONTEXT_MIB) * MIB


def test_neighbours_have_limits_of_their_own(tmp_path: Path) -> None:
    machine = make_machine(tmp_path)
    one = make_container(tmp_path / "one", machine, memory_mib=1024)
    two = make_container(tmp_path / "two", machine, memory_mib=2048)
    with one.worker() as first, two.worker() as second:
        first.ok("start 0")
        second.ok("start 0")
        second.ok(f"alloc 0 plain {1900 * MIB}")
        first.ok(f"alloc 0 plain {900 * MIB}")
        assert first.ask(f"alloc 1 plain {100 * MIB}") == OUT_OF_MEMORY
        assert one.card().used_bytes + two.card().used_bytes == machine.used()


def test_without_a_limits_file_there_is_no_limit(tmp_path: Path) -> None:
    with container(tmp_path) as box:
        box.limits_path.unlink()
        with box.worker() as worker:
            worker.ok("start 0")
            worker.ok(f"alloc 0 plain {8000 * MIB}")
            assert worker.ok("total 0") == [16130 * MIB]


@pytest.mark.parametrize(
    "text", ["", "gpuslice 1\n", "gpuslice 2\nend 0\n", "\0" * 100, "gpuslice 1\nend 1\n"]
)
def test_a_corrupt_limits_file_refuses_everything(tmp_path: Path, text: str) -> None:
    with container(tmp_path) as box:
        box.limits_path.write_text(text)
        with box.worker() as worker:
            assert worker.ask("start 0") == OUT_OF_MEMORY


def test_a_card_that_the_limits_do_not_name_gives_nothing(tmp_path: Path) -> None:
    machine = make_machine(tmp_path, cards=2)
    box = make_container(tmp_path / "box", machine, cards=1)
    with box.worker() as worker:
        assert worker.ask("start 1") == OUT_OF_MEMORY
        worker.ok("start 0")


@pytest.mark.parametrize("order", ["1,0", "{1},{0}", "{0},{1}", "1", "{1}", "GPU-{1:.8}"])
def test_cards_are_known_by_uuid_in_any_order(tmp_path: Path, order: str) -> None:
    """A limit must not follow the number a program gives the card."""
    machine = make_machine(tmp_path, cards=2)
    box = make_container(tmp_path / "box", machine, cards=2)
    box.limits_path.write_text(
        f"gpuslice 1\n{machine.uuid(0)} memory={300 * MIB} share=-\n"
        f"{machine.uuid(1)} memory={600 * MIB} share=-\nend 2\n"
    )
    shown = order.replace("GPU-{1:.8}", machine.uuid(1)[:12]).format(machine.uuid(0), machine.uuid(1))
    first = 0 if order.startswith("{0}") else 1
    limit = [300, 600][first]
    with box.worker(CUDA_VISIBLE_DEVICES=shown) as worker:
        worker.ok("start 0")
        assert worker.ok("total 0") == [limit * MIB]
        assert worker.ask(f"alloc 0 plain {(limit - CONTEXT_MIB + 2) * MIB}") == OUT_OF_MEMORY
        worker.ok(f"alloc 0 plain {(limit - CONTEXT_MIB - 2) * MIB}")
        assert machine.used(first) > 0
        assert machine.used(1 - first) == 0


def test_the_container_is_told_its_share(tmp_path: Path) -> None:
    with container(tmp_path, memory_mib=4301) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 plain {3072 * MIB}")
        assert worker.ok("total 0") == [4301 * MIB]
        assert worker.ok("info") == [(4301 - 3193) * MIB, 4301 * MIB]
        shown = box.run(str(SIM / "nvidia-smi")).stdout
        assert "3193MiB /  4301MiB" in shown
        assert str(worker.pid) not in shown


def test_memory_beyond_the_limit_is_shown_as_none_left(tmp_path: Path) -> None:
    """A module or heap may carry the container over its limit: that is no error of the question."""
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        box.limits_path.write_text(
            box.limits_path.read_text().replace(f"memory={1024 * MIB}", f"memory={100 * MIB}")
        )
        with box.worker() as late:
            assert late.ask("start 0") == OUT_OF_MEMORY
            assert "100MiB" in box.run(str(SIM / "nvidia-smi")).stdout
        while worker.ok("info") != [0, 100 * MIB]:  # the running program follows the file
            pass


def test_small_allocations_share_pages_as_the_driver_has_them(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        for number in range(100):
            worker.ok(f"alloc {number} plain 1000")
        assert box.card().used_bytes == box.machine.used()
        for number in range(0, 100, 3):
            worker.ok(f"free {number}")
        assert box.card().used_bytes == box.machine.used()


def test_two_processes_cannot_overshoot_together_nor_both_be_turned_away(tmp_path: Path) -> None:
    """Six workers ask at once for a half of what is left, time and again: exactly two get it."""
    with container(tmp_path, memory_mib=6 * CONTEXT_MIB + 400) as box:
        workers = [box.worker() for _ in range(6)]
        try:
            for worker in workers:
                worker.ok("start 0")
            for _ in range(40):
                for worker in workers:
                    worker.say(f"alloc 0 plain {200 * MIB}")
                answers = [worker.heard() for worker in workers]
                assert sorted(answers) == ["error 2"] * 4 + ["ok"] * 2
                for worker, answer in zip(workers, answers, strict=True):
                    if answer == "ok":
                        worker.ok("free 0")
        finally:
            for worker in workers:
                worker.kill()


def test_threads_of_one_process_neither_overshoot_nor_lose_count(tmp_path: Path) -> None:
    with container(tmp_path, memory_mib=CONTEXT_MIB + 80) as box, box.worker() as worker:
        worker.ok("start 0")
        granted, refused, odd = worker.ok(f"threads 8 300 {20 * MIB}")
        assert granted + refused == 8 * 300
        assert granted > 8 * 100
        assert odd == 0
        assert box.card().used_bytes == CONTEXT_MIB * MIB == box.machine.used()
        assert box.card().peak_bytes <= (CONTEXT_MIB + 80) * MIB


def test_freeing_what_we_never_saw_reaches_the_driver(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        assert worker.ask("free 7") in ("ok", "error 1")


def limit_of(box: Container) -> int:
    limit = box.limits[0].memory_bytes
    assert limit is not None
    return limit


def test_a_reset_of_the_primary_context_returns_everything_in_it(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        for number in range(5):
            worker.ok(f"alloc {number} plain {20 * MIB}")
        worker.ok("reset")
        assert box.card().used_bytes == box.machine.used() < limit_of(box)


def test_physical_memory_counts_on_the_card_it_is_made_on(tmp_path: Path) -> None:
    """Not on the card of the thread's context."""
    with container(tmp_path, cards=2, memory_mib=500) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"physical-on 1 0 {300 * MIB}")
        assert (box.card(0).used_bytes, box.card(1).used_bytes) == (box.machine.used(0), box.machine.used(1))
        assert worker.ask(f"physical-on 1 1 {300 * MIB}") == OUT_OF_MEMORY
        worker.ok(f"alloc 2 plain {300 * MIB}")
        worker.ok("free 0")
        assert box.card(1).used_bytes == box.machine.used(1) == 0


def test_stream_ordered_memory_counts_on_the_card_of_its_stream(tmp_path: Path) -> None:
    """Not on the card of the thread's context, which has pools too."""
    with container(tmp_path, cards=2, memory_mib=800) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"async-on 1 0 {300 * MIB}")
        assert (box.card(0).used_bytes, box.card(1).used_bytes) == (box.machine.used(0), box.machine.used(1))
        assert box.card(1).used_bytes > 300 * MIB > box.card(0).used_bytes
        assert worker.ask(f"async-on 1 1 {500 * MIB}") == OUT_OF_MEMORY
        worker.ok(f"alloc 2 async {500 * MIB}")


def test_contexts_count_on_each_card_as_they_come(tmp_path: Path) -> None:
    with container(tmp_path, cards=2) as box, box.worker() as worker, box.worker() as other:
        for each in (worker, other):
            each.ok("start 0")
            each.ok("start 1")
        assert (box.card(0).used_bytes, box.card(1).used_bytes) == (box.machine.used(0), box.machine.used(1))
        assert box.card(1).used_bytes == 2 * CONTEXT_MIB * MIB


def test_contexts_are_counted_where_nvml_hides_processes(tmp_path: Path) -> None:
    """As in a container with a PID namespace of its own: by what the card lost."""
    machine = make_machine(tmp_path)
    box = make_container(tmp_path / "box", machine, NVIDIA_VISIBLE_DEVICES=machine.uuid())
    with box.worker() as one, box.worker() as two:
        one.ok("start 0")
        one.ok(f"alloc 0 plain {300 * MIB}")
        two.ok("start 0")
        two.ok("alloc 0 context 1")
        assert box.card().used_bytes == machine.used() == (3 * CONTEXT_MIB + 300) * MIB
        two.ok("free 0")
        assert box.card().used_bytes == machine.used()


def test_a_context_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with container(tmp_path, memory_mib=100) as box, box.worker() as worker:
        assert worker.ask("start 0") == OUT_OF_MEMORY
        assert box.card().used_bytes == box.machine.used() == 0
        assert box.card().refused == 1


def test_stream_ordered_memory_counts_as_the_pool_reserves_it(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        for number in range(4):
            worker.ok(f"alloc {number} async {30 * MIB}")
        assert box.card().used_bytes == box.machine.used()
        for number in range(4):
            worker.ok(f"free {number}")
        worker.ok("sync")
        assert box.card().used_bytes == box.machine.used() == CONTEXT_MIB * MIB


def test_memory_kept_by_a_pool_makes_room_when_it_is_needed(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 async {800 * MIB}")
        worker.ok("free 0")
        worker.ok(f"alloc 1 plain {800 * MIB}")
        assert box.card().used_bytes == box.machine.used()


def test_blocks_outlive_their_pool(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 pool {64 * MIB}")
        worker.ok(f"alloc 1 pool {64 * MIB}")
        worker.ok("drop-pool")
        assert box.card().used_bytes >= box.machine.used()
        worker.ok("free 0")
        worker.ok("free 1")
        worker.ok("sync")
        assert box.card().used_bytes == box.machine.used() == CONTEXT_MIB * MIB


@pytest.mark.parametrize("way", ["linked", "dlsym"])
def test_sizes_that_are_wrong_are_refused_as_the_driver_refuses_them(tmp_path: Path, way: str) -> None:
    """An overflow is an invalid value, not a lack of memory."""
    most = 2**64 - 1
    calls = [
        f"pitch 0 {most} 1",
        f"pitch 0 {2**33} {2**33}",
        f"pitch 0 {2**63} 4",
        f"pitch 0 4096 {most}",
        f"array 1 {2**31} 1 0",
        f"array 1 {2**31} {2**31} {2**31}",
        "array 1 131073 131072 0",
        f"pitch 0 {4 << 30} 1",
        "array 1 65536 65536 0",
    ]
    answers = []
    with container(tmp_path) as box:
        for preload in (box.environ()["LD_PRELOAD"], ""):
            with box.worker(way, LD_PRELOAD=preload) as worker:
                worker.ok("start 0")
                answers.append([worker.ask(call) for call in calls])
        held, raw = answers
    assert held[:7] == raw[:7] == ["error 1"] * 7
    assert held[7:] == [OUT_OF_MEMORY] * 2
    assert raw[7:] == ["ok"] * 2
