"""The parts alone, under load: many threads and processes on one region, and any bytes as a limits file."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.isolation_rig import BUILD, SANITIZER

NATIVE = Path(__file__).resolve().parents[2] / "native"


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


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


def test_launching_threads_race_for_nothing(tmp_path: Path) -> None:
    """Under ThreadSanitizer.

    It found two races: on the pointer to the estimates, and of a program that waits before its first launch.
    """
    program = BUILD / "tests/throttled"
    if not program.exists():
        pytest.skip("gcc's ThreadSanitizer is not installed")
    done = subprocess.run(
        [str(program), str(tmp_path), "2000"],
        env={**os.environ, "TSAN_OPTIONS": "exitcode=66"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel puts programs where this ThreadSanitizer does not expect them")
    assert done.returncode == 0, done.stderr[:3000]
    assert done.stdout.count("launched") == 4


@pytest.mark.parametrize("seed", range(3))
def test_any_bytes_are_a_limits_file_or_not(seed: int) -> None:
    run(str(BUILD / "tests/fuzz_limits"), "200000", str(seed))


@pytest.mark.parametrize("seed", range(2))
def test_any_bytes_may_stand_in_the_region(seed: int) -> None:
    """Written, cut and replaced between the calls: nothing crashes, nothing is granted past the limit."""
    run(str(BUILD / "tests/fuzz_region"), "60", str(seed))


@pytest.mark.parametrize("target", ["limits", "region"])
def test_inputs_that_were_worth_keeping(target: str) -> None:
    inputs = sorted(map(str, (NATIVE / "tests/corpus" / target).iterdir()))
    assert inputs
    run(str(BUILD / "tests" / f"fuzz_{target}"), *inputs)


def _can_fuzz(built: Path) -> bool:
    """Debian's clang alone comes without the libraries (libclang-rt)."""
    command = ["clang", "-fsanitize=fuzzer,address,undefined", "-o", str(built), "-x", "c", "-"]
    target = "int LLVMFuzzerTestOneInput(const char *input, unsigned long size) { return input && !size; }"
    if shutil.which("clang") is None:
        return False
    return subprocess.run(command, input=target, text=True, check=False).returncode == 0


@pytest.mark.skipif(bool(SANITIZER), reason="clang's fuzzer brings sanitizers of its own")
@pytest.mark.parametrize("target", ["limits", "region"])
def test_the_fuzzer_finds_nothing_in_a_few_seconds(target: str, tmp_path: Path) -> None:
    if not _can_fuzz(tmp_path / "anything"):
        pytest.skip("no clang with its sanitizers' libraries on this machine: its libFuzzer is what searches")
    run("make", "-C", str(NATIVE), f"fuzz-{target}", "FUZZ_SECONDS=4", f"BUILD={tmp_path}", MAKEFLAGS="")
