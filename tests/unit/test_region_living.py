"""Slots of the dead are told from those of the living, by start time and innermost pid."""

from __future__ import annotations

import os
from pathlib import Path

from gpuslice.adapters.region import layout
from gpuslice.adapters.region.living import living, of_the_living, start_time_of
from gpuslice.adapters.region.reader import CardUsage, ProcessUsage


def process(pid: int, start_time: int, used_bytes: int = 100) -> ProcessUsage:
    return ProcessUsage(pid, start_time, 1, used_bytes, 0)


def put(
    proc: Path,
    host_pid: int,
    start_time: int,
    pids: str,
    *,
    state: str = "S",
    name: bytes = b"a) b)",
    threads: int = 1,
) -> None:
    folder = proc / str(host_pid)
    folder.mkdir(parents=True)
    fields = " ".join([state, *["0"] * 16, str(threads), "0", str(start_time), "0"])
    (folder / "stat").write_bytes(b"%d (%b) %b\n" % (host_pid, name, fields.encode()))
    (folder / "status").write_bytes(b"Name:\t%b\nNSpid:\t%b\n" % (name, pids.encode()))


def test_a_process_of_a_container_is_known_by_its_innermost_pid(tmp_path: Path) -> None:
    put(tmp_path, 4711, 900, "4711\t7")
    put(tmp_path, 4712, 901, "4712\t8", state="Z")
    put(tmp_path, 7, 500, "7")
    alive, zombie, reused, gone = process(7, 900), process(8, 901), process(7, 800), process(9, 902)
    assert living((alive, zombie, reused, gone), tmp_path) == (alive,)


def test_a_process_lives_while_one_of_its_threads_does(tmp_path: Path) -> None:
    """Its first thread may end before the others: then the kernel shows a zombie that holds all it held."""
    put(tmp_path, 4711, 900, "4711\t7", state="Z", threads=3)
    put(tmp_path, 4712, 901, "4712\t8", state="Z", threads=1)
    assert living((process(7, 900), process(8, 901)), tmp_path) == (process(7, 900),)


def test_what_the_dead_left_is_not_in_use(tmp_path: Path) -> None:
    put(tmp_path, 50, 900, "50\t7")
    card = CardUsage("GPU-1", 1000, None, 350, 400, 0, 0, (process(7, 900, 100), process(8, 901, 200)))
    usage = of_the_living(card, tmp_path)
    assert (usage.used_bytes, len(usage.processes)) == (150, 1)  # 50 are orphaned: nobody's and still held


class Incomparable(ProcessUsage):
    """To look each process up among all the others took 8.6 s of a region that a tenant had filled."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("processes were compared with each other")


def test_a_region_full_of_the_dead_is_gone_through_once(tmp_path: Path) -> None:
    put(tmp_path, 50, 900, "50\t7")
    many = tuple(Incomparable(7 + number, 900 + number, 1, 100, 0) for number in range(layout.SLOTS))
    usage = of_the_living(CardUsage("GPU-1", 1000, None, 100 * len(many), 0, 0, 0, many), tmp_path)
    assert (usage.used_bytes, [each.pid for each in usage.processes]) == (100, [7])


def test_any_name_that_a_program_gives_itself_is_no_error(tmp_path: Path) -> None:
    """prctl(PR_SET_NAME) takes any bytes, and /proc shows them as they are."""
    put(tmp_path, 50, 900, "50\t7", name=b"\xff\xfe")
    put(tmp_path, 51, 901, "51", name=b"\xc3")
    assert living((process(7, 900), process(9, 901)), tmp_path) == (process(7, 900),)


def test_we_are_alive() -> None:
    start = start_time_of(os.getpid())
    assert start is not None
    assert living((process(os.getpid(), start),)) == (process(os.getpid(), start),)
    assert living(()) == ()
