"""Pods that request less than their peaks: on how many cards they fit, and how often one lacks room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuslice.apps.cli.main import command
from gpuslice.core.simulation.borrowing import Lacking, Sample, needed, played, spread

CARD = 80.0


def pod(*held: float, first: int = 0) -> list[Sample]:
    """A sample a minute; a negative one is of a pod that computes nothing."""
    return [Sample((first + at) * 60.0, size > 0, abs(size)) for at, size in enumerate(held)]


def test_requests_never_exceed_a_card_and_peaks_may() -> None:
    usage = {name: pod(40, 60) for name in "abcd"}
    assert spread(usage, CARD, 1.0, 3, seed=1) is None
    placed = spread(usage, CARD, 1.5, 2, seed=1)
    assert placed is not None
    assert sorted(map(len, placed)) == [2, 2]


def test_who_is_idle_gives_its_memory_to_who_computes_and_is_not_counted_as_lacking() -> None:
    usage = {"idle": pod(50, -50, -50, -50), "busy": pod(10, 10, 10, 60)}
    assert played(usage, [["idle", "busy"]], CARD) == Lacking(1, 5, 0)


def test_who_computes_and_finds_no_room_lacks_it_until_there_is_some() -> None:
    usage = {"a": pod(50, 50, 50, 20), "b": pod(10, 60, 60, 60, first=0)}
    assert played(usage, [["a", "b"]], CARD) == Lacking(1, 8, 2)


def test_an_idle_pod_that_wakes_finds_room_or_lacks_it() -> None:
    usage = {"sleeper": pod(50, -50, -50, -50, 50), "busy": pod(10, 10, 10, 60, 60)}
    assert played(usage, [["sleeper", "busy"]], CARD) == Lacking(1, 7, 1)


def test_pods_that_peak_at_different_times_share_cards_and_those_at_once_do_not() -> None:
    apart = {"a": pod(60, -1, 60, -1), "b": pod(-1, 60, -1, 60)}
    together = {"a": pod(60, -1, 60, -1), "b": pod(60, -1, 60, -1)}
    assert needed(apart, CARD, 2.0, 0.0, seed=1) == Lacking(1, 4, 0)
    assert needed(together, CARD, 2.0, 0.0, seed=1) == Lacking(2, 4, 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [("a", 0, 55, 5), ("a", 60, 15, 0), ("b", 0, 20, 5), ("b", 60, 60, 5), ("c", 0, 1, 5)]
    for name, column in (("memory_used_bytes", 2), ("gpu_duty_cycle", 3)):
        of = [f"{row[0]},{row[1]},{row[column] * (1 << 30 if column == 2 else 1)}" for row in rows]
        (tmp_path / f"x_{name}.csv").write_text("\n".join(("container_ip,timestamp_anon,value", *of, "")))
    return tmp_path


def test_measurements_in_a_folder_are_simulated(folder: Path) -> None:
    asked = ["simulate", "--usage", str(folder), "--borrow", "1.6", "-o", "json"]
    answer = CliRunner().invoke(command, asked, catch_exceptions=False)
    found = json.loads(answer.stdout)
    assert found["pods"] == 3
    assert (found["requested"]["cards"], found["borrowed"]["cards"]) == (2, 1)
    table = CliRunner().invoke(command, asked[:-2], catch_exceptions=False).stdout
    assert "peak / 1.6" in table


HEAD = "container_ip,timestamp_anon"


@pytest.mark.parametrize("text", ["", f"{HEAD}\na,1\n", f"{HEAD},value\na,1,x\n", f"{HEAD},value\na,1,-2\n"])
def test_tables_that_say_nothing_are_refused_in_a_sentence(folder: Path, text: str) -> None:
    (folder / "x_gpu_duty_cycle.csv").write_text(text)
    answer = CliRunner().invoke(command, ["simulate", "--usage", str(folder)])
    assert answer.exit_code != 0
    assert "Traceback" not in answer.output
