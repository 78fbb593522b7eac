"""Where kube-scheduler's own filters let a pod go, learned from its questions.

Taints, selectors, cordons, volumes: kube-scheduler asks an extender only about the nodes that its own filters
let pass. What it asked for one pod holds for a while for other pods with the same terms, except for CPU and
memory, which the ledger knows. An error costs a question about one node: kube-scheduler then asks about all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gpuslice.core.policy.fleet import Flags, Fleet, Ints

LASTS_S = 10.0
"""Nodes start and stop being feasible; one question in ten seconds follows that at no cost."""
MISSES, OF_LAST = 8, 64
LATE, LATE_PAUSE_S = 32, 2.0  # in a row: the first nominations for a new queue are always late
PAUSE_S = 60.0  # after so many nominations in vain something that we cannot see prevents them


@dataclass(slots=True)
class FeasibleNodes:
    """The rows on which pods of some terms may run, and the results of nominations to them."""

    fleet: Fleet
    rows: Flags = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    searched: int = 0  # how many nodes the last question was about
    _version: tuple[int, int] = (-1, -1)
    _since_s: float = -LASTS_S
    _paused_until_s: float = 0.0
    _tried: int = 0
    _missed: int = 0
    _late: int = 0

    def learn(self, rows: Ints, now_s: float) -> None:
        """kube-scheduler asked about these rows; negative ones are not our nodes."""
        version = self.fleet.nodes_version
        if version != self._version or now_s >= self._since_s + LASTS_S:
            self.rows = np.zeros(self.fleet.rows, dtype=np.bool_)
            self._version, self._since_s = version, now_s
        self.rows[rows[rows >= 0]] = True
        self.searched = len(rows)

    def is_known(self, now_s: float) -> bool:
        """Whether what was learned is still valid and useful."""
        fresh = self._version == self.fleet.nodes_version and now_s < self._since_s + LASTS_S
        return fresh and now_s >= self._paused_until_s

    def note_nominated(self) -> None:
        """A pod was nominated to one of these nodes."""
        self._tried += 1
        if self._tried > OF_LAST:
            self._tried = self._missed = 0

    def note_taken(self) -> None:
        """kube-scheduler tried a pod on the node that it was nominated to."""
        self._late = 0

    def note_late(self, now_s: float) -> None:
        """The nomination came after kube-scheduler had begun its search: useless, if that is frequent."""
        self._late += 1
        if self._late >= LATE:
            self._paused_until_s, self._late = now_s + LATE_PAUSE_S, 0

    def note_missed(self, row: int, now_s: float) -> bool:
        """The nominated node did not do; `row` is negative if it is gone. True if a pause begins."""
        if 0 <= row < len(self.rows):
            self.rows[row] = False
        self._missed += 1
        if self._missed < MISSES:
            return False
        self._paused_until_s = now_s + PAUSE_S
        self._tried = self._missed = 0
        return True
