"""`gpuslice run` and `gpuslice ps` on a machine without Kubernetes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.gpu.source import DriverCard
from gpuslice.adapters.region.budget import Budgets
from gpuslice.adapters.region.limits import LimitsEntry
from gpuslice.apps.cli.run import Wish, given_budget, own_member, user_name
from simcluster import gpu
from simcluster.gpu_creation import CardSpec
from tests import HANG_S
from tests.integration.isolation_rig import BUILD, MIB, SIM, V100

STATIC = BUILD / "tests/hostile_static"


class Workstation:
    """Two cards, and a place for budgets."""

    def __init__(self, folder: Path, cards: int = 2, spec: CardSpec | str = V100) -> None:
        gpu.create(folder / "cards", [spec] * cards, cuda_version="12.2", seed="host")
        self.base, self.lock = folder / "budgets", folder / "budgets.lock"
        self.environment = gpu.environment(folder / "cards", SIM)

    def uuid(self, card: int) -> str:
        return gpu.make_uuid("GPU", "host", card)

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
            timeout=HANG_S,
        )

    def budgets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.gpuslice("ps", "-o", "json").stdout)
        return found

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """`gpuslice run` with the library of this build."""
        command = self.command("run", "--library", str(BUILD / "lib/libgpuslice.so"), *arguments)
        together = self.environment | environment
        return subprocess.run(
            command, env=together, input="", capture_output=True, text=True, check=False, timeout=HANG_S
        )

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
    host = Workstation(tmp_path)
    with host.running("--mem", "4") as program:
        assert say(program, "total 0") == [f"ok {4301 * MIB}"]
        assert say(program, f"alloc 0 plain {3072 * MIB}") == ["ok"]
        assert say(program, f"alloc 1 plain {1200 * MIB}") == ["error 2"]
        (budget,) = host.budgets()
    (card,) = budget["cards"]
    assert (card["limitBytes"], card["usedBytes"], card["refused"]) == (4301 * MIB, 3193 * MIB, 1)


def test_private_budgets_take_the_card_with_the_most_room(tmp_path: Path) -> None:
    host = Workstation(tmp_path)
    with host.running("--mem", "8"), host.running("--mem", "4"), host.running("--mem", "8"):
        given: dict[str, int] = {}
        for budget in host.budgets():
            (card,) = budget["cards"]
            given[card["gpu"]] = given.get(card["gpu"], 0) + card["limitBytes"] // MIB
    assert given == {host.uuid(0): 8602, host.uuid(1): 4301 + 8602}


def test_a_full_machine_says_how_much_is_left(tmp_path: Path) -> None:
    host = Workstation(tmp_path, cards=1)
    with host.running("--mem", "12"):
        refused = host.gpuslice("run", "--mem", "4", "--", "true")
    assert refused.returncode == 125
    assert "4301 MiB are asked for" in refused.stderr
    assert f"{16130 - 16130 * 12 // 15} MiB are the most that is left" in refused.stderr


def test_a_group_shares_one_budget(tmp_path: Path) -> None:
    host = Workstation(tmp_path)
    with (
        host.running("--mem", "2", "--group", "team") as one,
        host.running("--mem", "2", "--group", "team") as two,
    ):
        assert say(one, f"alloc 0 plain {1200 * MIB}") == ["ok"]
        assert say(two, f"alloc 0 plain {1200 * MIB}") == ["error 2"]
        (budget,) = host.budgets()
        assert len(budget["programs"]) == 2
        other = host.gpuslice("run", "--mem", "3", "--group", "team", "--", "true")
        assert 'group "team" runs with 2150 MiB, not 3226 MiB' in other.stderr


@pytest.mark.parametrize("name", [f"{user_name()}-{os.getpid()}", "~2"], ids=["guessed", "without a name"])
def test_without_a_group_nobody_joins_a_budget_whatever_its_name(tmp_path: Path, name: str) -> None:
    """The maker of a budget says what is loaded into its programs; the names of ours can be guessed."""
    budgets, library, card = (
        Budgets(tmp_path / "base"),
        BUILD / "lib/libgpuslice.so",
        DriverCard(0, "GPU-1", 16130),
    )
    with budgets.locked():
        theirs = budgets.make(name, [LimitsEntry(card.uuid, 4301 * MIB, None)], library, own_member(["bait"]))
        ours, _ = given_budget(Wish("4", None, "", None, ""), [card], budgets, library, own_member(["train"]))
    assert ours != theirs


def test_a_budget_ends_with_its_last_program(tmp_path: Path) -> None:
    host = Workstation(tmp_path)
    with host.running("--mem", "4"):
        assert len(host.budgets()) == 1
    deadline = time.monotonic() + HANG_S
    while host.budgets() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert host.budgets() == []
    done = host.gpuslice("run", "--mem", "15", "--library", str(BUILD / "lib/libgpuslice.so"), "--", "true")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_program_keeps_its_exit_status_and_its_card(tmp_path: Path) -> None:
    host = Workstation(tmp_path)
    library = str(BUILD / "lib/libgpuslice.so")
    program = ("--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exit 7")
    done = host.gpuslice("run", "--mem", "512MiB", "--gpu", "1", "--library", library, *program)
    assert (done.returncode, done.stdout) == (7, host.uuid(1) + "\n")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--mem", "4.5", "--", "true"), 125, '--mem is "4.5", must be a whole number of units'),
        (("--mem", "4", "--gpu", "7", "--", "true"), 125, 'there is no card "7": this machine has 0 (GPU-'),
        (("--mem", "4", "--gpus", "3", "true"), 125, "3 cards are asked for, and there are 2 to choose from"),
        (("--mem", "4", "--group", "../x", "--", "true"), 125, 'the group is "../x"'),
        (("--mem", "4", "--", "no-such-program"), 127, 'there is no program "no-such-program"'),
        (("--mem", "4", "--", "/etc/passwd"), 126, '"/etc/passwd" is no program that may be executed'),
        (("--mem", "4", "--", "/" + "x" * 300), 126, 'x" cannot be started: File name too long'),
        (("--memm", "4", "true"), 2, "Did you mean '--mem'?"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, arguments: tuple[str, ...], code: int, sentence: str) -> None:
    done = Workstation(tmp_path).run(*arguments)
    assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [None, b"", b"#!/bin/sh\n", b"\x7fELF" + bytes(60)])
def test_a_library_that_the_loader_would_leave_out_starts_nothing(
    tmp_path: Path, content: bytes | None
) -> None:
    """It would start the program without limits, with a line on stderr."""
    library = tmp_path / "libgpuslice.so"
    if content is not None:
        library.write_bytes(content)
    host = Workstation(tmp_path)
    done = host.gpuslice("run", "--mem", "4", "--library", str(library), "--", "echo", "started")
    assert (done.returncode, done.stdout) == (125, "")
    told = f"{library} cannot limit a program: it " if content is not None else f"there is no file {library}"
    assert f"--library: {told}" in done.stderr
    assert host.gpuslice("ps", "-o", "json").stdout == "[]\n"


@pytest.mark.skipif(not STATIC.exists(), reason="no libc to link statically on this machine")
def test_a_program_that_the_library_cannot_enter_is_started_with_a_word(tmp_path: Path) -> None:
    host = Workstation(tmp_path)
    done = host.run("--mem", "4", str(STATIC), "plain", str(8192 * MIB))
    assert (done.returncode, done.stdout) == (0, "taken\n")
    assert 'hostile_static" is linked statically: only programs that it starts are limited' in done.stderr
    held = host.run("--mem", "4", str(BUILD / "tests/hostile"), "plain", str(8192 * MIB))
    assert (held.returncode, held.stdout, held.stderr) == (1, "error 2\n", "")


def test_without_a_driver_it_says_so(tmp_path: Path) -> None:
    host = Workstation(tmp_path)
    host.environment = {name: value for name, value in host.environment.items() if name != "LD_LIBRARY_PATH"}
    done = host.gpuslice("run", "--mem", "4", "--", "true")
    assert done.returncode == 125
    assert "no NVIDIA driver that answers" in done.stderr
    mistyped = host.gpuslice("run", "--mem", "abc", "--", "true")
    assert (mistyped.returncode, '--mem is "abc", must be' in mistyped.stderr) == (125, True), mistyped.stderr


def test_ps_shows_the_table_of_its_page(tmp_path: Path) -> None:
    page = (BUILD.parents[1] / "docs/user/one-machine.md").read_text()
    ((header, row),) = re.findall(r"^    (NAME  .*)\n    (.*)", page, re.MULTILINE)
    host = Workstation(tmp_path)
    assert "Nothing runs here" in host.gpuslice("ps").stdout
    with host.running("--mem", "4", "--share", "25", "--group", "alice") as program:
        assert say(program, f"alloc 0 plain {3072 * MIB}") == ["ok"]
        assert say(program, f"alloc 1 plain {1200 * MIB}") == ["error 2"]
        shown = [line.split()[:9] for line in host.gpuslice("ps").stdout.splitlines()]
    documented, (told,) = row.split()[:9], shown[1:]
    assert shown[0] == header.split()[:9]
    for column, value in ((1, host.uuid(0)[:12]), (6, told[6]), (7, user_name()), (8, str(program.pid))):
        documented[column] = value  # of this machine and this run
    assert told == documented


def test_what_stands_behind_the_program_is_the_programs(tmp_path: Path) -> None:
    done = Workstation(tmp_path).run("--mem", "4", "echo", "--mem", "8", "--share", "--help", "-x")
    assert (done.returncode, done.stdout) == (0, "--mem 8 --share --help -x\n")


def test_a_signal_ends_the_program_as_it_would_without_us(tmp_path: Path) -> None:
    host = Workstation(tmp_path)
    assert host.run("--mem", "4", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM
    broken = host.run("--mem", "4", "bash", "-c", "yes | head -1; echo ${PIPESTATUS[0]}")
    assert broken.stdout == f"y\n{128 + signal.SIGPIPE}\n", "the interpreter's own SIGPIPE was handed on"
    assert broken.stderr == ""


def test_of_a_divided_card_its_devices_are_given(tmp_path: Path) -> None:
    """As nvidia-smi -L names them: the card itself is nothing that a program could use."""
    host = Workstation(tmp_path, cards=1, spec=CardSpec("A100-SXM4-40GB", mig=["3g.20gb", "3g.20gb"]))
    with host.running("--mem", "4") as first, host.running("--mem", "8") as second:
        assert say(first, "total 0") == [f"ok {19968 * 4 // 19 * MIB}"]
        (small, large) = (budget["cards"][0] for budget in host.budgets())
        assert small["gpu"].startswith("MIG-")
        assert small["gpu"] != large["gpu"]
        assert say(second, f"alloc 0 plain {9 << 30}") == ["error 2"]


def test_several_cards_have_the_memory_each(tmp_path: Path) -> None:
    host = Workstation(tmp_path)
    with host.running("--mem", "4", "--gpus", "2") as program:
        assert [say(program, f"total {card}") for card in (0, 1)] == [[f"ok {4301 * MIB}"]] * 2
        (budget,) = host.budgets()
        assert [card["gpu"] for card in budget["cards"]] == [host.uuid(0), host.uuid(1)]
        assert [card["limitBytes"] for card in budget["cards"]] == [4301 * MIB] * 2
        assert len(host.gpuslice("ps").stdout.splitlines()) == 3
        refused = host.run("--mem", "12", "--gpu", "0,1", "true")
    assert "that is left on card 0" in refused.stderr


def test_cards_that_were_hidden_stay_hidden(tmp_path: Path) -> None:
    host = Workstation(tmp_path)
    show = ("--mem", "4", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    for visible in ("1", host.uuid(1), host.uuid(1)[:12]):
        assert host.run(*show, CUDA_VISIBLE_DEVICES=visible).stdout == host.uuid(1) + "\n"
    none = host.run(*show, CUDA_VISIBLE_DEVICES="")
    assert none.returncode == 125
    assert 'CUDA_VISIBLE_DEVICES is "" and hides every card' in none.stderr


def test_a_budget_within_a_budget_is_not_given(tmp_path: Path) -> None:
    host = Workstation(tmp_path)
    inner = host.command("run", "--mem", "2", "true")
    done = host.run("--mem", "4", *inner)
    assert done.returncode == 125
    assert "this shell has a part of a card already" in done.stderr


def test_a_budget_stays_for_what_its_program_left_running(tmp_path: Path) -> None:
    """Also before that comes to the card: else its limit would be swept from under it."""
    host = Workstation(tmp_path)
    done = host.run("--mem", "4", "sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!")
    child = int(done.stdout)
    try:
        (budget,) = host.budgets()
        assert budget["programs"] == []
        assert "(ended)" in host.gpuslice("ps").stdout
        assert host.run("--mem", "1", "true").returncode == 0  # sweeps
        assert len(host.budgets()) == 1
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")
def test_several_users_share_a_group_and_outlive_each_other() -> None:
    """With a umask that hides everything, and folders that only their owner may remove."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        host = Workstation(folder)
        for path in folder.glob("cards*"):
            path.chmod(0o666)
        shutil.copytree(SIM, folder / "sim")
        shutil.copytree(BUILD / "lib", folder / "lib")
        host.environment |= {"LD_LIBRARY_PATH": str(folder / "sim"), "PATH": "/usr/bin:/bin"}

        def as_user(uid: int, *arguments: str) -> subprocess.Popen[str]:
            imports = (
                "import asyncio, difflib, json, os, sys; import gpuslice.apps.cli.run, gpuslice.apps.cli.ps;"
                "import gpuslice.adapters.gpu.nvml, gpuslice.adapters.gpu.mig"
            )
            become = f"os.umask(0o077); os.setgroups([]); os.setgid({uid}); os.setuid({uid})"
            start = f"{imports}; from gpuslice.apps.cli.main import main; {become}; main()"
            own = ["--library", str(folder / "lib/libgpuslice.so")] if arguments[0] == "run" else []
            command = [sys.executable, "-c", start, arguments[0], "--base", str(host.base), *own]
            pipe = subprocess.PIPE
            return subprocess.Popen(
                [*command, *arguments[1:]],
                env=host.environment,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                text=True,
            )

        group = ("run", "--mem", "4", "--group", "lab", "sh", "-c", "echo $LD_PRELOAD; read line")
        first = as_user(50001, *group)
        assert first.stdout is not None
        shared = first.stdout.readline()
        assert as_user(50002, *group).communicate("\n") == (shared, "")
        listed, complaint = as_user(50003, "ps", "-o", "json").communicate()
        assert complaint == ""
        (budget,) = json.loads(listed)
        assert [program["user"] for program in budget["programs"]] == ["uid50001"]
        assert first.communicate("\n")[1] == ""
        anew, complaint = as_user(50002, *group).communicate("\n")
        assert (anew, complaint) == (shared.replace("-50001/lab/", "-50002/lab/"), "")
