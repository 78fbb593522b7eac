"""Pages that name tests: each of them is there, and each line of the compatibility page has an answer."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/compatibility.md").read_text()
ATTACKS = (ROOT / "docs/user/security.md").read_text()
LINES = 101


def behaviours() -> dict[str, set[str]]:
    """``test_chart`` of two folders is one name on the page, as ``-k`` of pytest would take it."""
    found: dict[str, set[str]] = {}
    for path in (*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "simulator/tests").glob("test_*.py")):
        functions = re.findall(r"^(?:async )?def test_(\w+)", path.read_text(), re.MULTILINE)
        found.setdefault(path.stem, set()).update(functions)
    return found


def test_every_test_that_is_named_is_there() -> None:
    known = behaviours()
    named = re.findall(r"`(test_\w+)::(\w+)`", PAGE)
    assert len(named) > LINES
    named += (attacked := re.findall(r"`(test_\w+)::(\w+)`", ATTACKS))
    assert len(attacked) > 20
    assert [f"{file}::{test}" for file, test in named if test not in known.get(file, ())] == []


def test_every_line_is_answered_once() -> None:
    rows = [row.split("|") for row in PAGE.splitlines() if re.match(r"\| \d", row)]
    numbers = [int(number) for row in rows for number in row[1].split(",")]
    assert numbers == list(range(1, LINES + 1))
    assert [row[1] for row in rows if len(row) != 5 or not row[3].strip()] == []
