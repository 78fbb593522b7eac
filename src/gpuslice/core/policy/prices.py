"""What a free part of a card is worth: the prices of cutting stock, by column generation.

    min Σ y_p   such that   Σ a_ip·y_p ≥ d_i ,  y ≥ 0        (d_i: how many pieces of size i are asked for)

The dual values π_i of this linear program say which part of a card a piece of size i costs when all pieces
are cut as well as possible (Gilmore and Gomory 1961). Sizes are few (at most the parts a card is divided
into), so a dense simplex with an explicit inverse of the basis is enough, and exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gpuslice.core.policy.fleet import Floats, Ints

OPTIMAL = 1e-7  # a pattern worth no more than 1 + this does not improve the solution
PIVOT = 1e-9  # smaller entries of a column count as 0
SHIFT = 1e-9  # of the demands against each other, so that no two leave the basis at once
MOST_PIVOTS_PER_SIZE = 200


@dataclass(slots=True)
class CuttingStock:
    """Prices of the pieces a card is cut into; keeps good patterns from one call for the next.

    `length`: how many parts a card has; piece sizes and free space are whole numbers of parts.
    """

    length: int
    _patterns: dict[tuple[tuple[int, int], ...], None] = field(default_factory=dict)

    def prices(self, demand: dict[int, float]) -> dict[int, float]:
        """Size → price as part of a card, for the sizes that are asked for (1 … length)."""
        wanted = {size: pieces for size, pieces in sorted(demand.items()) if pieces > 0}
        if not wanted:
            return {}
        sizes = np.array(list(wanted), dtype=np.int64)
        duals = self._solve(sizes, np.array(list(wanted.values())) / sum(wanted.values()))
        return dict(zip(wanted, duals.tolist(), strict=True))

    def _solve(self, sizes: Ints, demand: Floats) -> Floats:
        basis = _Basis(self.length // sizes, demand * (1.0 + SHIFT * np.arange(len(sizes))))
        pool = self._known_patterns(sizes)
        for _ in range(MOST_PIVOTS_PER_SIZE * len(sizes)):
            duals = basis.duals
            column = basis.surplus_worth_entering()
            if column is None:
                column = _best_of(pool, duals)
            if column is None:
                value, column = best_pattern(self.length, sizes, duals)
                if value <= 1.0 + OPTIMAL:
                    break
                pool = np.vstack([pool, column])
                self._patterns[_named(sizes, column)] = None
            basis.enter(column)
        return np.maximum(basis.duals, 0.0)

    def _known_patterns(self, sizes: Ints) -> Floats:
        place = {int(size): index for index, size in enumerate(sizes)}
        pool = np.zeros((len(self._patterns), len(sizes)))
        for line, pattern in enumerate(self._patterns):
            for size, pieces in pattern:
                if size in place:  # a pattern without some of its pieces is one, too
                    pool[line, place[size]] = pieces
        return pool


class _Basis:
    """The simplex basis: starts with one pattern for each size, as many pieces as fit."""

    def __init__(self, pieces: Ints, demand: Floats) -> None:
        self._inverse = np.diag(1.0 / pieces)
        self._level = demand / pieces
        self._cost = np.ones(len(pieces))
        self.duals = self._cost @ self._inverse

    def surplus_worth_entering(self) -> Floats | None:
        """A column that cuts more of a size than is asked for, when its price fell below 0."""
        lowest = int(self.duals.argmin())
        if self.duals[lowest] >= -PIVOT:
            return None
        column = np.zeros(len(self.duals))
        column[lowest] = -1.0
        return column

    def enter(self, column: Floats) -> None:
        """Let a column replace the one that limits it first. Its cost is 1, or 0 for a surplus."""
        direction = self._inverse @ column
        blocking = direction > PIVOT
        ratio = np.where(blocking, self._level / np.where(blocking, direction, 1.0), np.inf)
        row = int(ratio.argmin())
        step = ratio[row]
        self._level = np.maximum(self._level - step * direction, 0.0)
        self._level[row] = step
        pivot_row = self._inverse[row] / direction[row]
        self._inverse -= np.outer(direction, pivot_row)
        self._inverse[row] = pivot_row
        self._cost[row] = float(column.min() >= 0.0)
        self.duals = self._cost @ self._inverse


def best_pattern(length: int, sizes: Ints, values: Floats) -> tuple[float, Floats]:
    """The most valuable set of pieces that fits `length`, and its value (unbounded knapsack)."""
    best, last = _knapsack(length, sizes, values)
    pattern = np.zeros(len(sizes))
    space = length
    while space > 0:
        piece = last[space]
        if piece < 0:
            space -= 1
        else:
            pattern[piece] += 1.0
            space -= int(sizes[piece])
    return float(best[length]), pattern


def worth_of_space(length: int, prices: dict[int, float]) -> Floats:
    """What each space 0 … length is worth when it is filled with the dearest pieces."""
    sizes = np.array(sorted(prices), dtype=np.int64)
    values = np.array([prices[int(size)] for size in sizes], dtype=np.float64)
    return _knapsack(length, sizes, values)[0]


def _knapsack(length: int, sizes: Ints, values: Floats) -> tuple[Floats, list[int]]:
    """Best value for each space, and the piece to cut from it, -1 for none."""
    best = np.zeros(length + 1)
    last = [-1] * (length + 1)
    fitting = np.searchsorted(sizes, np.arange(length + 1), side="right")
    for space in range(1, length + 1):
        best[space] = best[space - 1]
        count = fitting[space]
        if count:
            options = best[space - sizes[:count]] + values[:count]
            piece = int(options.argmax())
            if options[piece] > best[space]:
                best[space] = options[piece]
                last[space] = piece
    return best, last


def _best_of(pool: Floats, duals: Floats) -> Floats | None:
    if not len(pool):
        return None
    values = pool @ duals
    best = int(values.argmax())
    return pool[best] if values[best] > 1.0 + OPTIMAL else None


def _named(sizes: Ints, column: Floats) -> tuple[tuple[int, int], ...]:
    return tuple((int(size), int(pieces)) for size, pieces in zip(sizes, column, strict=True) if pieces)
