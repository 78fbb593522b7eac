"""A story as data: what is said, what is typed, what should come out."""

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
    """One command. It is run again until it prints what is expected, or `within_s` is over.

    `before` changes the simulated world first. `on_node` runs it on that node, not where the user is. `typed`
    goes to a terminal that is given to the command.
    """

    say: str
    command: str
    expected: Expected
    within_s: float = 30.0
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
    files: Mapping[str, str] = field(default_factory=dict)  # laid beside those that install the product
