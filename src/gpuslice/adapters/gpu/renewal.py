"""When it is time to reopen the driver.

NVML enumerates the cards only when it is opened. A card that was added or reset, or a reloaded driver, is
seen only after everybody in the process has closed it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LOST_EVERY_S = 60.0
"""How often to look for a card that does not answer by reopening the driver."""


class Renewal:
    """Decides by the folder in which the driver lists its cards (``/proc/driver/nvidia/gpus``), and by the
    result of the last query."""

    def __init__(
        self, cards: Path, lost_every_s: float = LOST_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = cards
        self._lost_every_s = lost_every_s
        self._clock = clock
        self.done()

    def reason(self, *, failing: bool = False, lost: bool) -> str:
        """Why to reopen now, or "". `failing`: the driver does not answer; `lost`: a card does not."""
        if self._list() != self._listed:
            return "cards came or went"
        if failing:
            return "the driver does not answer"
        if lost and self._clock() - self._opened_s >= self._lost_every_s:
            return "a card does not answer"
        return ""

    def done(self) -> None:
        self._opened_s, self._listed = self._clock(), self._list()

    def _list(self) -> frozenset[str]:
        try:
            return frozenset(os.listdir(self._folder))
        except OSError:  # no such driver yet, or hidden from this container
            return frozenset()
