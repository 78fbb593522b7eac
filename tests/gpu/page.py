"""The page of results, written anew after every case."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.driver import Card


@dataclass
class Line:
    """One case's result. `verdict`: passed, failed, skipped or not run."""

    title: str
    verdict: str
    sentence: str
    table: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    took_s: float = 0.0
    account: str = ""


def write_page(page: Path, card: Card, lines: list[Line]) -> None:
    """In one step, so that nobody finds half a page."""
    page.parent.mkdir(parents=True, exist_ok=True)
    temporary = page.with_name(f".{page.name}")
    temporary.write_text("\n".join(_text(card, lines)))
    temporary.rename(page)


def _text(card: Card, lines: list[Line]) -> list[str]:
    from tests.gpu.stage import SIMULATED, machine_facts

    where = "the simulated driver" if SIMULATED else "a real card"
    return [
        f"# Isolation on {where}",
        "",
        f"Written by `make test-gpu` on {time.strftime('%Y-%m-%d', time.gmtime())}, commit {_commit()}.",
        "",
        f"- card: {card.name}, {card.memory_mib} MiB; driver {card.driver}",
        *(f"- {name}: {fact}" for name, fact in machine_facts()),
        "- command: `make test-gpu`",
        "",
        "| case | verdict | s | what was seen |",
        "| --- | --- | --- | --- |",
        *(_row(line) for line in lines),
        "",
        *(part for line in lines if line.table for part in (_heading(line.title), "", line.table, "")),
    ]


def _row(line: Line) -> str:
    return f"| {line.title} | {line.verdict} | {line.took_s:.0f} | {_cell(line.sentence)} |"


def _heading(title: str) -> str:
    return f"## {title[0].upper()}{title[1:]}"


def _cell(text: str) -> str:
    first = text.split("\n|", maxsplit=1)[0]
    return " ".join(first.replace("|", "/").split())[:600]


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    try:
        command = ["git", "-c", f"safe.directory={root}", "describe", "--always", "--dirty"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return os.environ.get("GPUSLICE_COMMIT", "unknown")
    return done.stdout.strip() or os.environ.get("GPUSLICE_COMMIT", "unknown")
