"""The processes of a sequence (see `sequences`), what they can hold, and what is known of each."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .isolation_rig import Worker

NAMESPACE: Final = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
CLOCK: Final = ("unshare", "--time", "--boottime", "5000", "--fork", "--kill-child")
"""Start times in /proc are other ones there."""
KINDS: Final = (
    "plain", "plain", "pitch", "managed", "physical", "physical", "mapped", "array", "array3d", "mipmap",
    "async", "async", "pool", "graph", "captured", "group", "tile",
)  # fmt: skip
"""Contexts and code are not among them: they are measured, not counted, and what of them was given back is
believed later where shared or managed memory leaves the driver's figure open to doubt."""
WHOLE: Final = ("plain", "managed", "physical")
"""Kinds whose bytes are those asked for, in whole pages: of them a refusal can be judged."""


@dataclass
class Thing:
    """What a process holds under a number."""

    kind: str
    card: int
    bytes: int = 0


@dataclass
class Player:
    """A process and what is known of it."""

    worker: Worker
    card: int
    inside: bool
    """In a PID namespace of its own: another process cannot take its descriptors by its number."""
    forked: bool
    """Started by another program, whose child it is."""
    held: dict[int, Thing] = field(default_factory=dict)
    last: int = 0
    headless: bool = False
    has_shared: bool = False

    def number(self) -> int:
        self.last += 1
        return self.last


@dataclass(frozen=True)
class Descriptor:
    """An exported descriptor: where it is open."""

    player: Player = field(repr=False)
    pid: int
    file: int
    card: int


def first_child(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def can_make_namespaces() -> bool:
    return bool(shutil.which("unshare")) and not any(
        subprocess.run([*start, "true"], check=False).returncode for start in (NAMESPACE, CLOCK)
    )
