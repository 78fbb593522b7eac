"""What placement sees of a pod and of a node, as plain values; `policy.fleet` makes arrays of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import msgspec

from gpuslice.core.card_links import CardLinks

UNLIMITED = inf


class Shape(msgspec.Struct, frozen=True):  # the key of most that is kept: to hash it is half the cost
    """What placement sees of a pod; pods of one shape are interchangeable.

    `units` is asked of each of `cards` cards of one node; a pod with `cards` 0 wants no GPU. `models` empty
    means any model, `names` (that of memory) empty whichever name a node offers. What is not known of a pod
    (CPU, memory) is 0: it then never keeps the pod from a node.
    """

    units: int
    cards: int = 1
    cpu_milli: int = 0
    memory_mib: int = 0
    models: frozenset[str] = frozenset()
    compute_percent: int = 0
    min_tier: int = 0
    names: str = ""

    @property
    def total_units(self) -> int:
        return self.units * self.cards

    @property
    def amounts(self) -> Shape:
        """The same of a pod that accepts any tier and names: what a workload is made of."""
        return msgspec.structs.replace(self, min_tier=0, names="") if self.min_tier or self.names else self


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A node to put into the fleet: for each card its size and what is free of it, in units.

    A card that must not be used has size 0. `names` is the name of memory, "" for any. CPU and memory that
    are not known are `UNLIMITED`, and `cpu_milli` and `memory_mib` (what the node has in all) are then left
    out of every mean.
    """

    name: str
    size: Sequence[int]
    left: Sequence[int]
    compute_left: Sequence[int] = ()
    model: str = ""
    cpu_milli: float = UNLIMITED
    memory_mib: float = UNLIMITED
    cpu_left: float = UNLIMITED
    memory_left: float = UNLIMITED
    links: CardLinks = ()  # between all its cards, usable or not
    compute_percent: int = 100  # of each card when it is free
    tier: int = 0
    names: str = ""
    packing: str = ""
    compute_required: bool = False
    avoided: bool = False
    kubelet_away: bool = False


class Listener(Protocol):
    """Called once for each of these events of a pod: a policy that learns what to expect."""

    def arrived(self, shape: Shape) -> None: ...
    def placed(self, shape: Shape) -> None: ...
    def departed(self, shape: Shape) -> None: ...
