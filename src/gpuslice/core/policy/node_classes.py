"""Finds nodes that are in the same state: what a pod costs on one of them, it costs on all of them.

A large cluster has many nodes but few states, as long as whole nodes and whole cards come and go. Finding the
states again for each shape would cost ten times as much as pricing them, so they are kept up to date.
"""

from __future__ import annotations

import numpy as np

from gpuslice.core.policy.fleet import Fleet, Ints, Rows

MOST_STATES = 2  # per row: at most one state per row is current, the others are past ones


class NodeClasses:
    """The state of each row of a fleet as a number, updated for rows that have changed."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._numbers: dict[bytes, int] = {}  # by everything that can make a difference
        self._number = np.zeros(0, dtype=np.int64)  # of each row
        self._clock = -1
        self._width = 0

    @property
    def states(self) -> int:
        """The number of known states, including past ones."""
        return len(self._numbers)

    def distinct(self, rows: Rows) -> tuple[Rows, Ints]:
        """Some of `rows`, each in a different state, and for every row which of these is in its state."""
        self._renew()
        numbers = self._number.take(rows)
        lines = np.full(len(self._numbers), -1)
        lines[numbers[::-1]] = np.arange(len(rows) - 1, -1, -1)  # the first line of each state
        present = np.flatnonzero(lines >= 0)
        first = lines[present]
        lines[present] = np.arange(len(present))
        return rows[first], lines[numbers]

    def _renew(self) -> None:
        fleet = self._fleet
        width = fleet.left.shape[1]
        if (len(self._number), self._width) != (fleet.rows, width) or self.states > MOST_STATES * fleet.rows:
            self._numbers, self._number, self._clock = {}, np.zeros(fleet.rows, dtype=np.int64), -1
            self._width = width
        if self._clock == fleet.clock:
            return
        changed = fleet.changed_since(self._clock)
        self._clock = fleet.clock
        by_card = (fleet.left, fleet.compute_left, fleet.size)
        by_node = (fleet.model, fleet.cpu_left, fleet.memory_left)
        parts = [part.take(changed, axis=0).view(np.uint8) for part in by_card]
        parts += [part.take(changed)[:, None].view(np.uint8) for part in by_node]
        table = np.concatenate(parts, axis=1)
        raw, bytes_each, numbers = table.tobytes(), table.shape[1], self._numbers
        states = [raw[start : start + bytes_each] for start in range(0, len(raw), bytes_each)]
        self._number[changed] = [numbers.setdefault(state, len(numbers)) for state in states]
