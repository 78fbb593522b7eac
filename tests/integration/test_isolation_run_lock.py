"""`gpuslice run` while somebody holds the lock of the choice of a card, or has put something in its place."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.isolation_rig import BUILD
from tests.integration.test_isolation_run import Workstation


@pytest.fixture
def robbed(tmp_path: Path) -> Iterator[Workstation]:
    """Somebody holds the lock for ever."""
    host = Workstation(tmp_path, cards=1)
    with host.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield host


def test_a_lock_that_somebody_holds_for_ever_stops_nobody(robbed: Workstation) -> None:
    done = robbed.run("--mem", "4", "echo", "started")
    assert (done.returncode, done.stdout) == (0, "started\n")
    assert f"process {os.getpid()} of user id {os.getuid()} (" in done.stderr
    assert done.stderr.endswith(f"holds the lock {robbed.lock}: going on without it\n")


def test_a_lock_that_is_none_stops_nobody(tmp_path: Path) -> None:
    host = Workstation(tmp_path, cards=1)
    os.mkfifo(host.lock)
    assert host.run("--mem", "4", "true").returncode == 0
    host.lock.unlink()
    host.lock.symlink_to("/dev/tty")
    done = host.run("--mem", "4", "true")
    assert (done.returncode, "cannot be opened" in done.stderr) == (0, True)


@contextmanager
def together(host: Workstation, count: int, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Programs that are started at once and run until their input ends."""
    command = host.command("run", "--library", str(BUILD / "lib/libgpuslice.so"), *arguments, "cat")
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(command, env=host.environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        for _ in range(count)
    ]
    try:
        yield started
    finally:
        for each in started:
            each.kill()
            each.communicate()


def test_without_the_lock_no_card_is_given_out_twice(robbed: Workstation) -> None:
    """All have waited for it in vain, and choose at the same moment."""
    with together(robbed, 5, "--mem", "8") as started:
        while sum(each.poll() is not None for each in started) < 4:
            time.sleep(0.05)
        refused = [each for each in started if each.poll() is not None]
        assert [each.returncode for each in refused] == [125] * 4
        assert all("MiB are the most that is left" in each.communicate()[1] for each in refused)
        assert [len(budget["programs"]) for budget in robbed.budgets()] == [1]


def test_without_the_lock_a_group_is_one_all_the_same(robbed: Workstation) -> None:
    with together(robbed, 4, "--mem", "4", "--group", "lab") as started:
        for each in started:
            assert each.stdin is not None
            assert each.stdout is not None
            each.stdin.write("runs\n")
            each.stdin.flush()
            assert each.stdout.readline() == "runs\n"
        assert [len(budget["programs"]) for budget in robbed.budgets()] == [4]
