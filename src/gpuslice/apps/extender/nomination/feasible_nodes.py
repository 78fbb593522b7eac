"""Where kube-scheduler's own filters let a pod go, learned from what it asks.

Taints, selectors, cordons, volumes: kube-scheduler asks an extender about the nodes that its own filters let
pass. What it asked for one pod holds, for a while, for others with the same terms; CPU and memory aside, of
which the ledger knows. What is wrong costs one look at one node: then kube-scheduler asks about all again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gpuslice.core.policy.fleet import Flags, Fleet, Ints

LASTS_S = 10.0
"""Nodes come to suit and stop suiting; a question in ten seconds keeps up with that and costs nothing."""
MISSES, OF_LAST = 8, 64
LATE, LATE_PAUSE_S = 32, 2.0  # in a row: a queue that begins outruns the first ones, not the later
PAUSE_S = 60.0  # when so many nominations were in vain: something is in the way that is not seen here


@dataclass(slots=True)
class FeasibleNodes:
    """The rows on which pods of some terms may run, and how nominations to them went."""

    fleet: Fleet
    rows: Flags = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    searched: int = 0  # nodes in the last question
    _version: tuple[int, int] = (-1, -1)
    _since_s: float = -LASTS_S
    _paused_until_s: float = 0.0
    _tried: int = 0
    _missed: int = 0
    _late: int = 0

    def learn(self, rows: Ints, now_s: float) -> None:
        """kube-scheduler asked about these rows; those below 0 are none of ours."""
        version = self.fleet.nodes_version
        if version != self._version or now_s >= self._since_s + LASTS_S:
            self.rows = np.zeros(self.fleet.rows, dtype=np.bool_)
            self._version, self._since_s = version, now_s
        self.rows[rows[rows >= 0]] = True
        self.searched = len(rows)

    def is_known(self, now_s: float) -> bool:
        """Whether what was learned still holds, and is worth something."""
        fresh = self._version == self.fleet.nodes_version and now_s < self._since_s + LASTS_S
        return fresh and now_s >= self._paused_until_s

    def note_nominated(self) -> None:
        """A pod is nominated to one of these nodes."""
        self._tried += 1
        if self._tried > OF_LAST:
            self._tried = self._missed = 0

    def note_taken(self) -> None:
        """kube-scheduler tried a pod on the node that it was nominated to."""
        self._late = 0

    def note_late(self, now_s: float) -> None:
        """The nomination came when kube-scheduler looked at all nodes already: of no use, if often."""
        self._late += 1
        if self._late >= LATE:
            self._paused_until_s, self._late = now_s + LATE_PAUSE_S, 0

    def note_missed(self, row: int, now_s: float) -> bool:
        """The node would not do: its row, below 0 when it is gone. True when a pause begins."""
        if 0 <= row < len(self.rows):
            self.rows[row] = False
        self._missed += 1
        if self._missed < MISSES:
            return False
        self._paused_until_s = now_s + PAUSE_S
        self._tried = self._missed = 0
        return True
