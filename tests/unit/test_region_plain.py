"""What other users put into the folders that all budgets of a machine are in holds nobody up."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpuslice.adapters.region.budget import Budgets, Member
from gpuslice.adapters.region.limits import CardLimit
from gpuslice.adapters.region.living import start_time_of
from gpuslice.adapters.region.plain import read_plain

LIMITS = [CardLimit("GPU-1", 1 << 30)]


@pytest.fixture
def budgets(tmp_path: Path) -> Budgets:
    library = tmp_path / "lib" / "libgpuslice.so"
    library.parent.mkdir()
    library.touch()
    budgets = Budgets(tmp_path / "base")
    with budgets.locked():
        budgets.make("mine", LIMITS, library, me("train"))
    return budgets


def me(*command: str) -> Member:
    started = start_time_of(os.getpid())
    assert started is not None
    return Member(os.getpid(), started, "me", command)


@pytest.mark.parametrize("place", ["etc/gpuslice/limits", "members/1-1", "var/lib/gpuslice/region"])
def test_a_pipe_in_anybodys_budget_holds_nobody_up(budgets: Budgets, tmp_path: Path, place: str) -> None:
    path = tmp_path / "base" / "theirs" / place
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert [each.name for each in budgets.list()] == ["mine"]
    with budgets.locked():
        pass


@pytest.mark.parametrize("note", ["[" * 100_000, '{"pid": 1}', "7", b"\xff\xfe"])
def test_a_note_that_cannot_be_read_is_none(budgets: Budgets, tmp_path: Path, note: str | bytes) -> None:
    text = note.encode() if isinstance(note, str) else note
    (tmp_path / "base" / "mine" / "members" / "1-1").write_bytes(text)
    assert [each.members for each in budgets.list()] == [(me("train"),)]


def test_a_program_is_called_nothing_that_a_terminal_obeys(budgets: Budgets, tmp_path: Path) -> None:
    note = {**json.loads(read_plain(*one_note(tmp_path))), "command": ["\x1b[2Jtrain", "ü"]}
    one_note(tmp_path)[0].write_text(json.dumps(note))
    assert [each.members for each in budgets.list()] == [(me("?[2Jtrain", "ü"),)]


def one_note(tmp_path: Path) -> tuple[Path, int]:
    (note,) = (tmp_path / "base" / "mine" / "members").iterdir()
    return note, 10_000
