"""The command line starts at once, and its commands are where it says."""

from __future__ import annotations

import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from gpuslice.apps.cli.main import COMMANDS, Entry, command, load

PROGRAM = "from gpuslice.apps.cli.main import main; main({arguments!r})"
SLOW = {"asyncio", "aiohttp", "numpy", "rich", "yaml", "grpclib", "google.protobuf", "http.client", "ssl"}


def python(*arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(arguments=list(arguments))
    return subprocess.run(
        [sys.executable, *flags, "-c", program], capture_output=True, text=True, check=False
    )


def imported(*arguments: str) -> set[str]:
    told = python(*arguments, flags=("-X", "importtime")).stderr
    return set(re.findall(r"^import time:.*\|\s+(\S+)$", told, re.MULTILINE))


def test_help_imports_nothing_slow() -> None:
    modules = imported("--help")
    assert "click" in modules
    assert {name for name in modules if name in SLOW or name.partition(".")[0] in SLOW} == set()
    assert not any(name.startswith("gpuslice.adapters") for name in modules)


def test_reading_a_cluster_needs_no_event_loop() -> None:
    modules = imported("--kubeconfig", "/none", "inspect")
    assert "gpuslice.adapters.kube.sync" in modules
    assert modules & {"asyncio", "aiohttp", "numpy", "rich", "grpclib"} == set()


def test_help_names_every_command() -> None:
    told = CliRunner().invoke(command, ["--help"]).output
    for entry in COMMANDS:
        assert re.search(rf"^  {entry.name} +\S", told, re.MULTILINE)


@pytest.mark.parametrize("entry", COMMANDS, ids=[entry.name for entry in COMMANDS])
def test_every_command_is_where_the_registry_says(entry: Entry) -> None:
    found = load(entry)
    assert found.help
    told = CliRunner().invoke(command, [entry.name, "--help"])
    assert told.exit_code == 0, told.output


def test_a_command_that_is_not_installed_says_so() -> None:
    with pytest.raises(click.ClickException, match="walk is not part of this installation"):
        load(Entry("walk", "gpuslice.apps.walk.main", "command", ""))


def test_an_unknown_command_names_the_nearest() -> None:
    told = CliRunner().invoke(command, ["inspct"])
    assert told.exit_code == 2
    assert 'There is no command "inspct". Did you mean inspect?' in told.output


def test_version_is_that_of_the_package() -> None:
    assert python("version").stdout == "gpuslice 0.1.0\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str) -> None:
    told = CliRunner().invoke(command, ["completion", shell])
    assert told.exit_code == 0
    assert "_GPUSLICE_COMPLETE" in told.output
