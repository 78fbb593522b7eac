"""The cards of a cluster: the sizes by which they are priced, and the kinds of nodes that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpuslice.core.policy.fleet import Flags, Fleet, Floats, Ints, Rows, Shape
from gpuslice.core.policy.ranking import MOST_NODE_SIZES

MOST_PARTS = 1000  # larger cards are divided into thousandths
MOST_SIZES = 12  # of cards, priced separately; a card of any further size is treated as the nearest of these


@dataclass(frozen=True, slots=True)
class CardClass:
    """Cards of one size: the number of `parts` they are divided into, and where their values start in the
    table.
    """

    size: int
    parts: int
    start: int

    def pieces(self, units: int) -> int:
        """Parts that a request takes, rounded to the nearest, as long as as many of it fit as really do.

        Rounding up would break requests that fill a card exactly: three thirds, or 0.333 + 0.267 + 0.4.
        """
        parts = (2 * units * self.parts + self.size) // (2 * self.size)
        if 0 < units <= self.size:
            parts = min(parts, self.parts // (self.size // units))
        return max(1, parts)


@dataclass(frozen=True, slots=True)
class Kind:
    """Nodes with the same cards: `sizes` of one node's, in units; `cards` of all of them, in mean cards.

    `cpu_milli`, `memory_mib`: of the largest of them.
    """

    sizes: tuple[int, ...]
    model: str
    cards: float
    cpu_milli: float
    memory_mib: float


@dataclass(frozen=True, slots=True)
class Layout:
    """The cards that exist, as arrays over [row, slot] and rows; changes only with `Fleet.cards_version`.

    A card's value is found at `start + left · parts // size`. `kind` is each node's index in `kinds`.
    `node_size` orders nodes by their number of cards, then by their largest card; 0 for the smallest nodes.
    """

    classes: tuple[CardClass, ...]
    start: Ints
    parts: Ints
    size: Ints
    kind: Ints
    kinds: tuple[Kind, ...]
    node_size: Ints
    mean_units: float
    version: int
    by_unit: bool  # each card is divided into as many parts as it has units

    def cards_of(self, rows: Rows) -> Ints:
        """[line, slot] The positions of the cards of `rows` in flattened [row, slot] arrays."""
        width = self.size.shape[1]
        cards: Ints = rows[:, None] * width + np.arange(width)
        return cards

    def place(self, at: Ints, left: Ints) -> Ints:
        """Position in the table of the value of `left` units on the cards at `at` (see `cards_of`)."""
        parts = left if self.by_unit else left * self.parts.take(at) // self.size.take(at)
        return self.start.take(at) + parts

    def pieces_of_parts(self, units: int) -> Floats:
        """[place in the table] How many pieces of this many units the free part of a card can be cut into."""
        return np.concatenate(
            [np.arange(card.parts + 1.0) // max(card.pieces(units), 1) for card in self.classes]
        )

    def allowed(self, shapes: Sequence[Shape]) -> Flags:
        """[kind, shape] Whether the cards of these nodes are large enough and of a model that the shape may
        use.
        """
        largest = np.array([max(kind.sizes, default=0) for kind in self.kinds])[:, None]
        allowed: Flags = largest >= np.array([max(shape.units, 1) for shape in shapes], dtype=np.int64)
        for column, shape in enumerate(shapes):
            if shape.models:
                allowed[:, column] &= [kind.model in shape.models for kind in self.kinds]
        return allowed

    def pieces(self, shapes: Sequence[Shape]) -> Floats:
        """[kind, shape] The same for all cards of an empty node; 0 if it has too few for such a pod."""
        width = max((len(kind.sizes) for kind in self.kinds), default=0)
        sizes = np.zeros((len(self.kinds), width, 1), dtype=np.int64)
        for line, kind in enumerate(self.kinds):
            sizes[line, : len(kind.sizes), 0] = kind.sizes
        each = sizes // np.array([max(shape.units, 1) for shape in shapes], dtype=np.int64)
        enough = (each > 0).sum(axis=1) >= np.array([shape.cards for shape in shapes], dtype=np.int64)
        pieces: Floats = (each.sum(axis=1) * enough).astype(np.float64)
        return pieces

    def hosted(self, cpu_milli: Floats, memory_mib: Floats) -> Floats:
        """[kind, request] How many times the CPU and memory of an empty node cover the request."""
        cpu = np.array([kind.cpu_milli for kind in self.kinds])[:, None] / cpu_milli
        memory = np.array([kind.memory_mib for kind in self.kinds])[:, None] / memory_mib
        hosted: Floats = np.minimum(cpu, memory)
        return hosted


def layout_of(fleet: Fleet) -> Layout:
    """Sort the cards of a fleet into classes, and its nodes into kinds."""
    present = fleet.size > 0
    sizes, numbers = np.unique(fleet.size[present], return_counts=True)
    mean = float((sizes * numbers).sum() / numbers.sum()) if len(sizes) else 1.0
    common = np.sort(sizes[np.argsort(-numbers, kind="stable")[:MOST_SIZES]]).tolist() or [1]
    found, start = [], 0
    for size in common:
        fineness = min(size, MOST_PARTS)
        found.append(CardClass(size, fineness, start))
        start += fineness + 1
    classes = tuple(found)
    known = np.array([card.size for card in classes])
    nearest = np.searchsorted((known[1:] + known[:-1]) / 2, fleet.size, side="left").astype(np.int64)
    kinds, kind = _kinds(fleet, mean)
    parts = np.array([card.parts for card in classes])[nearest]
    return Layout(
        classes=classes,
        start=np.array([card.start for card in classes])[nearest],
        parts=parts,
        size=np.maximum(fleet.size, 1).astype(np.int64),
        kind=kind,
        kinds=kinds,
        node_size=_node_sizes(kinds)[kind],
        mean_units=mean,
        version=fleet.cards_version,
        by_unit=bool((parts == fleet.size)[present].all()),
    )


def _node_sizes(kinds: Sequence[Kind]) -> Ints:
    """[kind] See `Layout.node_size`."""
    sizes = [(len(kind.sizes), max(kind.sizes, default=0)) for kind in kinds]
    order = {size: min(place, MOST_NODE_SIZES - 1) for place, size in enumerate(sorted(set(sizes)))}
    return np.array([order[size] for size in sizes], dtype=np.int64)


def _kinds(fleet: Fleet, mean: float) -> tuple[tuple[Kind, ...], Ints]:
    """Nodes of the same model with the same cards are of one kind."""
    numbers: dict[bytes, int] = {}
    cards = np.concatenate([fleet.model[:, None].astype(np.int32), np.sort(fleet.size, axis=1)], axis=1)
    kind = np.array([numbers.setdefault(line.tobytes(), len(numbers)) for line in cards], dtype=np.int64)
    first = np.zeros(len(numbers), dtype=np.int64)
    first[kind[::-1]] = np.arange(len(kind) - 1, -1, -1)
    most = np.full((2, len(numbers)), -np.inf)
    for line, amount in enumerate((fleet.cpu_milli, fleet.memory_mib)):
        np.maximum.at(most[line], kind, amount)
    many = np.bincount(kind, minlength=len(numbers))
    kinds = [
        Kind(
            sizes=tuple(size for size in cards[row, 1:].tolist() if size),
            model=fleet.models[fleet.model[row]] if fleet.models else "",
            cards=float(cards[row, 1:].sum()) * int(many[number]) / mean,
            cpu_milli=float(most[0, number]),
            memory_mib=float(most[1, number]),
        )
        for number, row in enumerate(first.tolist())
    ]
    return tuple(kinds), kind
