"""A story as data: what is said, what is typed, and what should be printed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuslice_demo.expected import Expected
from gpuslice_demo.nodes import NodePlan

if TYPE_CHECKING:
    from gpuslice_demo.world import World


@dataclass(frozen=True, slots=True)
class Step:
    """One command. It is repeated until it prints what is expected, or `within_s` have passed.

    `before` changes the simulated world first. `on_node`: runs on that node, not at the user's place.
    `typed`: input for the command, which then gets a terminal.
    """

    say: str
    command: str
    expected: Expected
    within_s: float = 120.0
    on_node: str = ""
    typed: str = ""
    terminal: bool = False
    before: Callable[[World], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True)
class Story:
    name: str
    title: str
    nodes: tuple[NodePlan, ...]
    steps: tuple[Step, ...]
    files: Mapping[str, str] = field(default_factory=dict)  # in the user's folder
