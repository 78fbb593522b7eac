"""`gpuslice run` and `gpuslice ps` on a machine without Kubernetes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuslice.sim import gpu
from tests.integration.isolation_rig import BUILD, MIB, SIM, V100


class Workstation:
    """Two cards, and a base folder for budgets."""

    def __init__(self, folder: Path, cards: int = 2) -> None:
        gpu.create(folder / "cards", [V100] * cards, cuda_version="12.2", seed="desk")
        self.base = folder / "budgets"
        self.environment = gpu.environment(folder / "cards", SIM)

    def uuid(self, card: int) -> str:
        return gpu.make_uuid("GPU", "desk", card)

    def command(self, *arguments: str) -> list[str]:
        name, *rest = arguments
        start = "from gpuslice.apps.cli.main import main; main()"
        return [sys.executable, "-c", start, name, "--base", str(self.base), *rest]

    def gpuslice(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def budgets(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads(self.gpuslice("ps", "-o", "json").stdout)
        return found

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A worker in a budget, with its context made."""
        library = ("--library", str(BUILD / "lib/libgpuslice.so"))
        worker = str(BUILD / "tests/worker")
        process = subprocess.Popen(
            self.command("run", *library, *arguments, "--", worker, "dlsym"),
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert say(process, "start 0") == ["ok", "ok"]
            yield process
        finally:
            process.kill()
            process.communicate()


def say(process: subprocess.Popen[str], command: str) -> list[str]:
    """The answer; to the first command also the greeting."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(command + "\n")
    process.stdin.flush()
    first = [process.stdout.readline().strip()] if command == "start 0" else []
    return [*first, process.stdout.readline().strip()]


def test_a_program_gets_what_a_container_with_the_same_number_gets(tmp_path: Path) -> None:
    desk = Workstation(tmp_path)
    with desk.running("--mem", "4") as program:
        assert say(program, "total 0") == [f"ok {4301 * MIB}"]
        assert say(program, f"alloc 0 plain {3072 * MIB}") == ["ok"]
        assert say(program, f"alloc 1 plain {1200 * MIB}") == ["error 2"]
        (budget,) = desk.budgets()
    assert budget["limitBytes"] == 4301 * MIB
    assert budget["usedBytes"] == 3193 * MIB
    assert budget["refused"] == 1


def test_private_budgets_take_the_card_with_the_most_room(tmp_path: Path) -> None:
    desk = Workstation(tmp_path)
    with desk.running("--mem", "8"), desk.running("--mem", "4"), desk.running("--mem", "8"):
        given: dict[object, int] = {}
        for budget in desk.budgets():
            size = budget["limitBytes"]
            assert isinstance(size, int)
            given[budget["gpu"]] = given.get(budget["gpu"], 0) + size // MIB
    assert given == {desk.uuid(0): 8602, desk.uuid(1): 4301 + 8602}


def test_a_full_machine_says_how_much_is_left(tmp_path: Path) -> None:
    desk = Workstation(tmp_path, cards=1)
    with desk.running("--mem", "12"):
        refused = desk.gpuslice("run", "--mem", "4", "--", "true")
    assert refused.returncode == 1
    assert "4301 MiB are asked for" in refused.stderr
    assert f"{16130 - 16130 * 12 // 15} MiB are the most that is left" in refused.stderr


def test_a_group_shares_one_budget(tmp_path: Path) -> None:
    desk = Workstation(tmp_path)
    with (
        desk.running("--mem", "2", "--group", "team") as one,
        desk.running("--mem", "2", "--group", "team") as two,
    ):
        assert say(one, f"alloc 0 plain {1200 * MIB}") == ["ok"]
        assert say(two, f"alloc 0 plain {1200 * MIB}") == ["error 2"]
        (budget,) = desk.budgets()
        assert len(budget["programs"]) == 2  # type: ignore[arg-type]
        other = desk.gpuslice("run", "--mem", "3", "--group", "team", "--", "true")
        assert 'group "team" runs with 2150 MiB, not 3226 MiB' in other.stderr


def test_a_budget_ends_with_its_last_program(tmp_path: Path) -> None:
    desk = Workstation(tmp_path)
    with desk.running("--mem", "4"):
        assert len(desk.budgets()) == 1
    deadline = time.monotonic() + 10
    while desk.budgets() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert desk.budgets() == []
    done = desk.gpuslice("run", "--mem", "15", "--library", str(BUILD / "lib/libgpuslice.so"), "--", "true")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_program_keeps_its_exit_status_and_its_card(tmp_path: Path) -> None:
    desk = Workstation(tmp_path)
    library = str(BUILD / "lib/libgpuslice.so")
    program = ("--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exit 7")
    done = desk.gpuslice("run", "--mem", "512MiB", "--gpu", "1", "--library", library, *program)
    assert (done.returncode, done.stdout) == (7, desk.uuid(1) + "\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--mem", "4.5", "--", "true"), '--mem is "4.5", wants a whole number of GiB'),
        (("--mem", "4", "--gpu", "7", "--", "true"), 'there is no card "7": this machine has 0 (GPU-'),
        (("--mem", "4", "--group", "../x", "--", "true"), 'the group is "../x"'),
        (("--mem", "4", "--", "no-such-program"), 'there is no program "no-such-program"'),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    done = Workstation(tmp_path).gpuslice("run", *arguments)
    assert done.returncode == 1
    assert sentence in done.stderr


def test_without_a_driver_it_says_so(tmp_path: Path) -> None:
    desk = Workstation(tmp_path)
    desk.environment = {name: value for name, value in desk.environment.items() if name != "LD_LIBRARY_PATH"}
    done = desk.gpuslice("run", "--mem", "4", "--", "true")
    assert done.returncode == 1
    assert "no NVIDIA driver that answers" in done.stderr


def test_ps_shows_a_table(tmp_path: Path) -> None:
    desk = Workstation(tmp_path)
    assert "Nothing runs here" in desk.gpuslice("ps").stdout
    with desk.running("--mem", "4", "--share", "25", "--group", "alice") as program:
        shown = desk.gpuslice("ps").stdout.splitlines()
    assert shown[0].split()[:5] == ["NAME", "GPU", "USED", "LIMIT", "SHARE"]
    assert shown[1].split()[:6] == ["alice", desk.uuid(0)[:12], "121MiB", "4301MiB", "25%", "0"]
    assert str(program.pid) in shown[1]
