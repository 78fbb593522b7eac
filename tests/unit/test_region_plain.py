"""What other users put into the folders that all budgets of a machine are in harms nobody."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpuslice.adapters.region.budget import BudgetError, Budgets, Member
from gpuslice.adapters.region.limits import LimitsEntry
from gpuslice.adapters.region.living import start_time_of
from gpuslice.adapters.region.plain import read_plain

LIMITS = [LimitsEntry("GPU-1", 1 << 30)]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    library = tmp_path / "lib" / "libgpuslice.so"
    library.parent.mkdir()
    library.touch()
    return library


@pytest.fixture
def budgets(tmp_path: Path, library: Path) -> Budgets:
    budgets = Budgets(tmp_path / "base")
    with budgets.locked():
        budgets.make("mine", LIMITS, library, me("train"))
    return budgets


def base_of(tmp_path: Path) -> Path:
    return tmp_path / f"base-{os.getuid()}"


def me(*command: str) -> Member:
    started = start_time_of(os.getpid())
    assert started is not None
    return Member(os.getpid(), started, "me", command)


@pytest.mark.parametrize("place", ["etc/gpuslice/limits", "members/1-1", "var/lib/gpuslice/region"])
def test_a_pipe_in_anybodys_budget_holds_nobody_up(budgets: Budgets, tmp_path: Path, place: str) -> None:
    path = base_of(tmp_path) / "theirs" / place
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert [each.name for each in budgets.list()] == ["mine"]
    with budgets.locked():
        pass


@pytest.mark.parametrize(
    "note",
    [
        "[" * 100_000,
        '{"pid": 1}',
        "7",
        b"\xff\xfe",
        '{"pid": "\\u0000", "start_time": 1, "user": "me", "command": []}',
        '{"pid": 1, "start_time": 1, "user": "me", "command": [7]}',
    ],
)
def test_a_note_that_cannot_be_read_is_none(budgets: Budgets, tmp_path: Path, note: str | bytes) -> None:
    text = note.encode() if isinstance(note, str) else note
    (base_of(tmp_path) / "mine" / "members" / "1-1").write_bytes(text)
    assert [each.members for each in budgets.list()] == [(me("train"),)]


def test_nothing_is_called_what_a_terminal_obeys(budgets: Budgets, tmp_path: Path) -> None:
    told = {"command": ["\x1b[2Jtrain", "ü"], "user": "\x1b[1mroot"}
    note = {**json.loads(read_plain(*one_note(tmp_path))), **told}
    one_note(tmp_path)[0].write_text(json.dumps(note))
    (base_of(tmp_path) / "mine").rename(base_of(tmp_path) / "\x1b[1mours")
    (budget,) = budgets.list()
    assert budget.name == "?[1mours"
    assert budget.members == (replace(me("?[2Jtrain", "ü"), user="?[1mroot"),)


def test_a_link_in_the_place_of_a_note_leads_nobody_to_write_elsewhere(
    budgets: Budgets, tmp_path: Path
) -> None:
    """The maker of the budget sees us start, and knows the name of our note before we write it."""
    treasure, folder = tmp_path / "treasure", base_of(tmp_path) / "mine"
    treasure.write_text("mine\n")
    (note,) = (folder / "members").iterdir()
    note.unlink()
    note.symlink_to(treasure)
    with pytest.raises(BudgetError, match="cannot be joined: File exists"):
        budgets.join(folder, me("train"))
    assert treasure.read_text() == "mine\n"


def test_a_new_budget_is_in_a_folder_of_its_own(budgets: Budgets, tmp_path: Path, library: Path) -> None:
    """The owner of the folder says which library is loaded into its programs."""
    theirs = tmp_path / "theirs"
    (base_of(tmp_path) / "next").symlink_to(theirs)
    guessed = base_of(tmp_path) / f".{me().pid}-{me().start_time}"
    guessed.mkdir()
    folder = budgets.make("next", LIMITS, library, me("train"))
    assert (folder.name, theirs.exists(), [*guessed.iterdir()]) == ("next~2", False, [])


def put_a_file(path: Path) -> None:
    path.touch()


def put_a_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to(path.parent / "elsewhere")


def put_anothers_folder(path: Path) -> None:
    path.mkdir()
    os.chown(path, 1001, -1)


NOT_OURS = [put_a_file, put_a_link]
NOT_OURS += [put_anothers_folder] if os.getuid() == 0 else []


@pytest.mark.parametrize("put", NOT_OURS)
def test_what_stands_in_the_place_of_our_folder_is_named_and_not_used(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    """In another's folder its owner could put another library in the place of ours."""
    put(base_of(tmp_path))
    cannot = pytest.raises(
        BudgetError, match=rf"kept under {base_of(tmp_path)}: user id \d+ put something there"
    )
    with cannot as refused, Budgets(tmp_path / "base").locked():
        pass
    assert "--base" in str(refused.value)


def test_a_folder_that_bears_anothers_name_is_nobodys(budgets: Budgets, tmp_path: Path) -> None:
    base_of(tmp_path).rename(tmp_path / f"base-{os.getuid() + 1}")
    assert budgets.list() == ()


def test_each_user_has_a_folder_that_only_they_may_change(budgets: Budgets, tmp_path: Path) -> None:
    base_of(tmp_path).chmod(0o777)
    with budgets.locked():
        assert stat.S_IMODE(base_of(tmp_path).stat().st_mode) == 0o755


def test_what_the_disk_refuses_is_said(budgets: Budgets, library: Path) -> None:
    cannot = pytest.raises(BudgetError, match=r"budgets cannot be kept under .*: File name too long")
    with cannot, budgets.locked():
        budgets.make("next", LIMITS, library, Member(10**300, 1, "me", ()))


def one_note(tmp_path: Path) -> tuple[Path, int]:
    (note,) = (base_of(tmp_path) / "mine" / "members").iterdir()
    return note, 10_000


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "socket", "nothing"])
def test_what_is_no_plain_file_is_read_by_nobody(tmp_path: Path, kind: str) -> None:
    """A pipe would hold the reader up for ever, a link lead it to somebody else's file."""
    place, other = tmp_path / "region", tmp_path / "other"
    other.write_bytes(b"somebody else's")
    with contextlib.ExitStack() as stack:
        match kind:
            case "pipe":
                os.mkfifo(place)
            case "link":
                place.symlink_to(other)
            case "folder":
                place.mkdir()
            case "socket":
                stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(place))
        with pytest.raises(OSError):
            read_plain(place, 100)


def test_of_a_plain_file_no_more_than_asked_for_is_read(tmp_path: Path) -> None:
    with (tmp_path / "region").open("wb") as file:
        file.truncate(1 << 40)
    assert read_plain(tmp_path / "region", 100) == bytes(100)


def test_a_device_is_no_file() -> None:
    """Where nobody mounts a tenant's folder `nodev`, it may be any."""
    with pytest.raises(OSError, match="is no plain file"):
        read_plain("/dev/zero", 100)
