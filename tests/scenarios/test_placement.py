"""Placement scenarios: each file says what happens and what comes of it.

A behaviour that was changed on purpose is taken over with ``REWRITE_SCENARIOS=1 pytest tests/scenarios`` and
reviewed as a diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.scenarios.stage import Stage

FOLDER = Path(__file__).parent / "placement"
LINE = "----"


def played(text: str) -> str:
    """The scenario with the answers as they are now: a block is commands, a line of dashes, answers."""
    stage = Stage()
    return "\n\n".join(_block(stage, block) for block in text.strip().split("\n\n")) + "\n"


def _block(stage: Stage, block: str) -> str:
    commands = block.split(f"\n{LINE}", maxsplit=1)[0].splitlines()
    answers = [stage.run(line) for line in commands if not line.startswith("#")]
    told = [answer for answer in answers if answer != "ok"]
    return "\n".join([*commands, LINE, *told]) if told else "\n".join(commands)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    expected = path.read_text()
    found = played(expected)
    if os.environ.get("REWRITE_SCENARIOS"):
        path.write_text(found)
    else:
        assert found == expected
