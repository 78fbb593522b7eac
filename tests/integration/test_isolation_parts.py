"""The parts alone, under load: many threads and processes on one region, and any bytes as a limits file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.isolation_rig import BUILD


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize(("processes", "threads"), [(1, 8), (8, 1), (4, 4)])
def test_nothing_is_granted_past_the_limit_and_nothing_is_left(
    tmp_path: Path, processes: int, threads: int
) -> None:
    told = run(
        str(BUILD / "tests/stress"), str(tmp_path / "region"), str(processes), str(threads), "5000"
    ).split()
    counts = dict(zip(told[::2], map(int, told[1::2]), strict=True))
    assert counts["granted"] + counts["refused"] == processes * threads * 5000
    assert counts["granted"] > counts["refused"]
    assert (counts["overshot"], counts["left"], counts["failed"]) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_any_bytes_are_a_limits_file_or_not(seed: int) -> None:
    run(str(BUILD / "tests/fuzz_limits"), "200000", str(seed))
