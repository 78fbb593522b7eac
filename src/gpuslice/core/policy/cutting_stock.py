"""What a free part of a card is worth: prices of the cutting-stock problem, by column generation.

    max Σ d_i·π_i   such that   Σ a_ip·π_i ≤ 1 for every pattern p ,  π ≥ 0   (d_i pieces of size i requested)

This is the dual of the program that cuts all pieces from as few cards as possible: π_i is the fraction of a
card that a piece of size i costs if all are cut optimally (Gilmore and Gomory 1961). HiGHS solves it for the
known patterns, and an unbounded knapsack finds the pattern that violates the constraint most at these prices;
this repeats until no pattern does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import highspy
import numpy as np

from gpuslice.core.policy.fleet import Floats, Ints

OPTIMAL = 1e-7  # a pattern worth at most 1 + this does not improve the solution
SHIFT = 1e-6  # of the demands, so that of equal optima the one favouring large pieces is found every time
MOST_PATTERNS_PER_SIZE = 200
MOST_KEPT_PATTERNS = 500  # for the next call, the latest of all


class _SilentProgram(highspy.Highs):  # type: ignore[misc]
    """Silent from the start: highspy 1.16 prints a banner to standard output in its constructor."""

    def enableCallbacks(self) -> None:  # the constructor calls it
        self.silent()
        super().enableCallbacks()


@dataclass(slots=True)
class CuttingStock:
    """Prices of the pieces that a card is cut into; keeps good patterns for the next call.

    `length`: the number of parts of a card; piece sizes and free space are whole numbers of parts.
    """

    length: int
    _patterns: dict[tuple[tuple[int, int], ...], None] = field(default_factory=dict)

    def prices(self, demand: dict[int, float]) -> dict[int, float]:
        """Size → price as a fraction of a card, for the sizes in demand (1 … length)."""
        asked = {size: pieces for size, pieces in sorted(demand.items()) if pieces > 0}
        if not asked:
            return {}
        sizes, total = list(asked), sum(asked.values())
        program = _SilentProgram()
        program.silent()  # where the constructor does not call it
        for column, pieces in enumerate(asked.values()):
            program.addVar(0.0, highspy.kHighsInf)
            program.changeColCost(column, -pieces / total * (1.0 + SHIFT * column))  # it minimizes
        for column, size in enumerate(sizes):
            _add_pattern(program, {column: self.length // size})
        column_of = {size: column for column, size in enumerate(sizes)}
        for pattern in self._patterns:  # a pattern without some of its pieces is a pattern, too
            known = {column_of[size]: pieces for size, pieces in pattern if size in column_of}
            if known:
                _add_pattern(program, known)
        prices = np.zeros(len(sizes))
        for _ in range(MOST_PATTERNS_PER_SIZE * len(sizes)):
            program.run()
            prices = np.maximum(np.array(program.getSolution().col_value), 0.0)
            value, found = best_pattern(self.length, np.array(sizes), prices)
            if value <= 1.0 + OPTIMAL:
                break
            _add_pattern(program, found)
            self._patterns[tuple((sizes[column], pieces) for column, pieces in found.items())] = None
        for pattern in list(self._patterns)[:-MOST_KEPT_PATTERNS]:
            del self._patterns[pattern]
        return dict(zip(sizes, prices.tolist(), strict=True))


def _add_pattern(program: highspy.Highs, pieces: dict[int, int]) -> None:
    """The pieces cut from one card (by column) may not cost more than the card."""
    columns = np.array(list(pieces), dtype=np.int32)
    program.addRow(
        -highspy.kHighsInf, 1.0, len(columns), columns, np.array(list(pieces.values()), dtype=float)
    )


def best_pattern(length: int, sizes: Ints, values: Floats) -> tuple[float, dict[int, int]]:
    """The most valuable pieces that fit `length`: their value, and the count of each size by its position."""
    best = _knapsack(length, sizes, values)
    pattern: dict[int, int] = {}
    space = length
    while best[space] > 0.0:
        fitting = np.flatnonzero(sizes <= space)
        piece = int(fitting[(best[space - sizes[fitting]] + values[fitting]).argmax()])
        pattern[piece] = pattern.get(piece, 0) + 1
        space -= int(sizes[piece])
    return float(best[length]), dict(sorted(pattern.items()))


def value_of_space(length: int, prices: dict[int, float]) -> Floats:
    """What each space 0 … length is worth when filled with the most valuable pieces."""
    sizes = np.array(sorted(prices), dtype=np.int64)
    values = np.array([prices[int(size)] for size in sizes], dtype=np.float64)
    return _knapsack(length, sizes, values)


def _knapsack(length: int, sizes: Ints, values: Floats) -> Floats:
    """Best value for each space, however many pieces of a size are cut from it (sizes are 1 at least)."""
    best = np.zeros(length + 1)
    for size, value in zip(sizes.tolist(), values.tolist(), strict=True):
        if value > 0.0:
            for start in range(size, length + 1, size):  # the value of one piece less is known already
                stretch = best[start : start + size]
                np.maximum(stretch, best[start - size : start][: len(stretch)] + value, out=stretch)
    return best
