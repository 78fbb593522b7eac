"""A share of compute is kept, alone and beside others, whatever shape the work has."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpuslice.adapters.region import layout
from simcluster import gpu
from tests import HANG_S
from tests.integration.isolation_rig import (
    BUILD,
    Container,
    Machine,
    Worker,
    container,
    make_container,
    make_machine,
)
from tests.shares.arithmetic import Claim

WARM_UP_MS = 400
MEASURED_MS = 1500


def busy_ns(machine: Machine, card: int = 0) -> int:
    with gpu.Machine(machine.state) as cards:
        return cards.cards()[card].busy_ns


def burn(worker: Worker, milliseconds: int, every: int, pause_us: int = 0, how: str = "kernel") -> None:
    worker.say(f"burn {milliseconds} {every} {pause_us} {how}")


def share_of_card(
    machine: Machine, worker: Worker, every: int, *, how: str = "kernel", card: int = 0
) -> float:
    """How much of the card one worker keeps busy, in percent, after the controller has found its feet."""
    burn(worker, WARM_UP_MS + MEASURED_MS + 500, every, how=how)
    time.sleep(WARM_UP_MS / 1000)
    began, busy = time.monotonic_ns(), busy_ns(machine, card)
    time.sleep(MEASURED_MS / 1000)
    share = 100 * (busy_ns(machine, card) - busy) / (time.monotonic_ns() - began)
    worker.heard()
    return share


def assert_reaches(measure: Callable[[], float], least: float, most: float = 100.0) -> None:
    """Never beyond `most`; at least `least` in one of the tries of two minutes.

    A machine that is busy with something else starves the worker itself, so one moment of quiet is enough to
    show that the library lets it have its share. That it never lets it have more needs no quiet.
    """
    shares: list[float] = []
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        shares.append(measure())
        assert shares[-1] <= most
        if shares[-1] >= least:
            return
    raise AssertionError(f"never reached {least}: {shares}")


@pytest.mark.parametrize(
    ("kernel_us", "every"),
    [(200, 0), (2000, 0), (20000, 1), (500, 1)],
    ids=["short, queued", "long, queued", "very long, one by one", "short, one by one"],
)
def test_a_container_alone_keeps_to_its_share(tmp_path: Path, kernel_us: int, every: int) -> None:
    with container(tmp_path, share=30, kernel_us=kernel_us) as box, box.worker() as worker:
        worker.ok("start 0")
        assert_reaches(lambda: share_of_card(box.machine, worker, every), 25, 35)
        assert box.card().throttled_ns > 0


def test_without_a_share_nothing_waits(tmp_path: Path) -> None:
    with container(tmp_path, kernel_us=1000) as box, box.worker() as worker:
        worker.ok("start 0")
        assert_reaches(lambda: share_of_card(box.machine, worker, 0), 85)
        assert box.card().throttled_ns == 0


def test_the_share_is_the_containers_not_the_processes(tmp_path: Path) -> None:
    with container(tmp_path, share=30, kernel_us=1000) as box, box.worker() as one, box.worker() as two:
        one.ok("start 0")
        two.ok("start 0")

        def of_both() -> float:
            burn(two, WARM_UP_MS + MEASURED_MS + 500, 1)
            share = share_of_card(box.machine, one, 1)
            two.heard()
            return share

        assert_reaches(of_both, 25, 35)


@pytest.mark.parametrize("how", ["ex", "cooperative", "graph", "fill", "fill-rows", "copy", "copy-any"])
def test_every_way_to_launch_is_held(tmp_path: Path, how: str) -> None:
    with container(tmp_path, share=30, kernel_us=1000) as box, box.worker() as worker:
        worker.ok("start 0")
        assert_reaches(lambda: share_of_card(box.machine, worker, 1, how=how), 25, 35)
        assert box.card().throttled_ns > 0


def test_a_flood_of_work_on_several_streams_is_held_from_its_first_moment(tmp_path: Path) -> None:
    """Before anything has finished nobody knows how long it takes; and more is wanted than can be timed."""
    with container(tmp_path, share=30, kernel_us=2000) as box, box.worker() as worker:
        worker.ok("start 0")
        began, before = time.monotonic_ns(), busy_ns(box.machine)
        burn(worker, 2000, 0, how="streams")
        worker.heard()
        share = 100 * (busy_ns(box.machine) - before) / (time.monotonic_ns() - began)
        assert share <= 30 + 5 + 3  # with what credit there was to begin with
        assert_charged(box)


def assert_charged(box: Container) -> None:
    """Nothing runs for free: all that was done stands in the accounts, but for what has just ended."""
    head = layout.RegionHead.from_buffer_copy(box.region_path.read_bytes())
    assert head.cards[0].charged_ns >= 0.8 * busy_ns(box.machine)


def worked_ns(machine: Machine, worker: Worker) -> int:
    with gpu.Machine(machine.state) as cards:
        return cards.worked_ns(worker.pid)


def shares_of_work(machine: Machine, workers: Sequence[Worker], seconds: float) -> list[float]:
    """Each one's percent of the card from now on."""
    began, before = time.monotonic_ns(), [worked_ns(machine, worker) for worker in workers]
    time.sleep(seconds)
    passed = time.monotonic_ns() - began
    done = [worked_ns(machine, worker) for worker in workers]
    return [100 * (after - start) / passed for start, after in zip(before, done, strict=True)]


@pytest.mark.parametrize("shares", [(30, 60), (10, 20, 30)], ids=str)
def test_busy_containers_get_their_shares_within_two_seconds(tmp_path: Path, shares: tuple[int, ...]) -> None:
    """Each its own, although all want the whole card and nobody tells them of each other."""
    machine = make_machine(tmp_path, kernel_us=1000)
    boxes = [make_container(tmp_path / f"{share}", machine, share=share) for share in shares]
    with ExitStack() as stack:
        workers = [stack.enter_context(box.worker()) for box in boxes]
        for worker in workers:
            worker.ok("start 0")

        def least_part() -> float:
            """The part of its share that the worst off got, in percent; none of them more than its share."""
            for worker in workers:
                burn(worker, 2000 + MEASURED_MS + 500, 1)
            time.sleep(2)
            found = shares_of_work(machine, workers, MEASURED_MS / 1000)
            for worker in workers:
                worker.heard()
            assert all(percent <= share + 5 for percent, share in zip(found, shares, strict=True)), found
            return min(100 * percent / share for percent, share in zip(found, shares, strict=True))

        assert_reaches(least_part, 85, 160)


def spent(worker: Worker) -> None:
    """Leaves its container without credit."""
    burn(worker, 500, 0)
    worker.heard()


def test_a_stream_that_records_never_waits(tmp_path: Path) -> None:
    """Nothing runs then; and in that mode a call too many would spoil the recording."""
    with container(tmp_path, share=5, kernel_us=20000) as box, box.worker() as worker:
        worker.ok("start 0")
        spent(worker)
        waited = box.card().throttled_ns
        took_ms, failed = worker.ok("capture 200")
        assert failed == 0
        assert box.card().throttled_ns == waited
        assert took_ms < 20 * 200  # what as many launches would have to wait at the very least


def test_the_share_is_of_the_card_that_works_however_the_cards_are_numbered(tmp_path: Path) -> None:
    """CUDA's first card is NVML's second here, and on the other one a neighbour is busy."""
    machine = make_machine(tmp_path, cards=2, kernel_us=1000)
    order = f"{machine.uuid(1)},{machine.uuid(0)}"
    box = make_container(tmp_path / "box", machine, share=30, cards=2, CUDA_VISIBLE_DEVICES=order)
    other = make_container(tmp_path / "other", machine, cards=2)
    with box.worker() as worker, other.worker() as neighbour:
        worker.ok("start 0")
        neighbour.ok("start 0")

        def of_the_second_card() -> float:
            burn(neighbour, WARM_UP_MS + MEASURED_MS, 1)
            share = share_of_card(machine, worker, 1, card=1)
            neighbour.heard()
            return share

        assert_reaches(of_the_second_card, 25, 35)


def test_work_under_way_in_a_process_that_died_holds_nobody_up(tmp_path: Path) -> None:
    with container(tmp_path, share=30, kernel_us=20000) as box, box.worker() as worker:
        worker.ok("start 0")
        with box.worker() as victim:
            victim.ok("start 0")
            spent(victim)
            burn(victim, 60000, 0)
            time.sleep(0.3)
            victim.kill()
        assert_reaches(lambda: share_of_card(box.machine, worker, 1), 22, 35)


def test_a_forked_child_launches_within_the_same_share(tmp_path: Path) -> None:
    """Neither the parent's locks nor its unfinished measurements are the child's."""
    with container(tmp_path, share=30, kernel_us=1000) as box, box.worker() as worker:
        assert worker.ask("fork") == "ok 0"
        worker.ok("start 0")
        assert_reaches(lambda: share_of_card(box.machine, worker, 1), 25, 35)


OTHER_NAMESPACE = 4026532999


def in_a_pid_namespace(box: Container) -> None:
    """As a container's first process finds itself: its own number says nothing about NVML's."""
    with box.region_path.open("r+b") as region:
        region.seek(ctypes.sizeof(layout.RegionHead) + layout.RegionSlot.pid_namespace.offset)
        region.write(OTHER_NAMESPACE.to_bytes(8, "little"))


def first_slot(box: Container) -> layout.RegionSlot:
    return layout.RegionSlot.from_buffer_copy(box.region_path.read_bytes(), ctypes.sizeof(layout.RegionHead))


def test_alone_nothing_is_corrected_whatever_nvml_says(tmp_path: Path) -> None:
    with container(tmp_path, share=30, kernel_us=1000) as box, box.worker() as worker:
        worker.ok("start 0")
        in_a_pid_namespace(box)
        assert_reaches(lambda: share_of_card(box.machine, worker, 1), 25, 35)


def test_in_a_pid_namespace_samples_show_which_number_is_ours(tmp_path: Path) -> None:
    """Neighbours were at work before us: they are somebody else. Who is new whenever we work is us."""
    machine = make_machine(tmp_path, kernel_us=500)
    box = make_container(tmp_path / "box", machine, share=10)
    other = make_container(tmp_path / "other", machine, share=40)
    with box.worker() as worker, other.worker() as neighbour:
        worker.ok("start 0")
        neighbour.ok("start 0")
        in_a_pid_namespace(box)

        def part_of_share() -> float:
            burn(neighbour, 7000, 0)
            time.sleep(1)
            burn(worker, 5500, 0)
            time.sleep(3.5)
            (found,) = shares_of_work(machine, [worker], 1.5)
            for each in (worker, neighbour):
                each.heard()
            return 10 * found

        assert_reaches(part_of_share, 85, 150)
        assert first_slot(box).host_pid == worker.pid


def test_a_clock_that_was_set_back_makes_no_samples_old(tmp_path: Path) -> None:
    with container(tmp_path, share=30, kernel_us=500) as box, box.worker() as worker:
        worker.ok("start 0")
        in_a_pid_namespace(box)
        with box.region_path.open("r+b") as region:
            region.seek(layout.RegionHead.cards.offset + layout.RegionCard.sampled_us.offset)
            region.write(((time.time_ns() + 3600 * 10**9) // 1000).to_bytes(8, "little"))
        deadline = time.monotonic() + HANG_S
        while first_slot(box).host_pid == 0 and time.monotonic() < deadline:
            burn(worker, 1000, 0)
            worker.heard()
        assert first_slot(box).host_pid == worker.pid


def test_a_process_that_copied_before_its_first_launch_is_no_stranger_to_itself(tmp_path: Path) -> None:
    """It is listed already when it begins; that nobody else is there whenever it works shows the mistake. A
    neighbour that comes afterwards is not taken for it.
    """
    with container(tmp_path, share=30, kernel_us=500) as box, box.worker() as worker:
        worker.ok("start 0")
        in_a_pid_namespace(box)
        with gpu.Machine(box.machine.state) as cards:
            cards.add_ghost(0, worker.pid, 1, "copies", percent=5)
            burn(worker, 100, 0)
            worker.heard()
            cards.remove_ghost(worker.pid)
            deadline = time.monotonic() + HANG_S
            while first_slot(box).host_pid == 0 and time.monotonic() < deadline:
                burn(worker, 2000, 0)
                worker.heard()
                cards.add_ghost(0, 4_000_000, 1, "neighbour", percent=10)
        assert first_slot(box).host_pid == worker.pid


def test_what_nobody_uses_is_lent_and_taken_back(tmp_path: Path) -> None:
    """Both may use the whole card. While one rests the other has it; when both work each has its part."""
    machine = make_machine(tmp_path, kernel_us=500)
    boxes = [make_container(tmp_path / f"{share}", machine, share=share, cap=100) for share in (30, 70)]
    with boxes[0].worker() as small, boxes[1].worker() as large:
        small.ok("start 0")
        large.ok("start 0")
        assert_reaches(lambda: share_of_card(machine, small, 0), 90)

        def part_of_the_small() -> float:
            for worker in (small, large):
                burn(worker, 3000, 0)
            time.sleep(1)
            found = shares_of_work(machine, [small, large], 1.5)
            for worker in (small, large):
                worker.heard()
            assert found[0] <= 36
            return sum(found)

        assert_reaches(part_of_the_small, 90)


def test_while_the_others_rest_most_work_is_neither_timed_nor_charged(tmp_path: Path) -> None:
    """As soon as one works again, it is."""
    machine = make_machine(tmp_path, kernel_us=200)
    boxes = [make_container(tmp_path / f"{share}", machine, share=share, cap=100) for share in (30, 70)]

    def part_charged(worker: Worker, box: Container) -> float:
        def charged_ns() -> int:
            head = layout.RegionHead.from_buffer_copy(box.region_path.read_bytes())
            return int(head.cards[0].charged_ns)

        worked, charged = worked_ns(machine, worker), charged_ns()
        burn(worker, 500, 1, 200)
        worker.heard()
        return 100 * (charged_ns() - charged) / (worked_ns(machine, worker) - worked)

    with boxes[0].worker() as small, boxes[1].worker() as large:
        for worker in (small, large):
            worker.ok("start 0")
            burn(worker, 100, 1)
            worker.heard()
        time.sleep(1.5)
        assert_reaches(lambda: 100 - part_charged(small, boxes[0]), 50)
        burn(large, 1500, 1)
        time.sleep(0.2)
        assert part_charged(small, boxes[0]) > 70
        large.heard()


def test_a_container_without_a_place_to_meet_others_keeps_to_its_share(tmp_path: Path) -> None:
    """Nobody would know what is lent to it."""
    machine = make_machine(tmp_path, kernel_us=1000)
    box = make_container(tmp_path / "box", machine, share=30, cap=100)
    (box.root / "run/gpuslice" / machine.uuid() / "own").unlink()
    with box.worker() as worker:
        worker.ok("start 0")
        assert_reaches(lambda: share_of_card(machine, worker, 1), 25, 35)


TIME_NAMESPACE = ("unshare", "--time", "--monotonic=60", "--boottime=5000", "--fork", "--kill-child")


def test_a_container_in_a_time_namespace_tells_the_hosts_time(tmp_path: Path) -> None:
    """Its clock is not its neighbours' nor the agent's, nor is the time at which its processes began."""
    if not shutil.which("unshare") or subprocess.run([*TIME_NAMESPACE, "true"], check=False).returncode:
        pytest.skip("no time namespace of our own on this machine")
    with container(tmp_path, share=30, kernel_us=500) as box:
        program = str(BUILD / "tests/worker")
        with Worker([*TIME_NAMESPACE, program, "dlsym", "12020"], box.environ()) as worker:
            worker.ok("start 0")
            burn(worker, 200, 1)
            worker.heard()
            now = time.monotonic_ns()
            claim = Claim.from_buffer_copy(
                (box.root / "run/gpuslice" / box.machine.uuid() / "own/claim").read_bytes()
            )
            assert 0 <= now - claim.busy_at_ns < HANG_S * 10**9 / 10
            (process,) = box.card().processes
            began = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[1].split()[19]
            assert process.start_time == int(began)


def test_a_neighbours_claim_cut_short_or_overwritten_harms_nobody(tmp_path: Path) -> None:
    machine = make_machine(tmp_path, kernel_us=500)
    boxes = [make_container(tmp_path / name, machine, share=40, cap=100) for name in ("one", "other")]
    claim = boxes[1].root / "run/gpuslice" / machine.uuid() / "own/claim"
    with boxes[0].worker() as worker, boxes[1].worker() as neighbour:
        worker.ok("start 0")
        neighbour.ok("start 0")
        burn(worker, 1500, 0)
        for damage in (b"", b"\0" * 20, b"\xff" * 200, claim.read_bytes()[:30]):
            claim.write_bytes(damage)
            time.sleep(0.2)
        claim.unlink()
        claim.symlink_to("/proc/self/mem")
        assert worker.heard().endswith(" 0")  # launches that failed
        assert_reaches(lambda: share_of_card(machine, worker, 0), 80)
