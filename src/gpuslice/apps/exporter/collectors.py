"""The state of the exporter's sources, for the page's own health series and the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CollectorReading:
    """The state of one source."""

    success: bool = False
    took_s: float = 0.0
    errors: int = 0
    reason: str = ""


class CollectorHealth:
    """The state of all sources; a change is logged once."""

    def __init__(self) -> None:
        self.readings: dict[str, CollectorReading] = {}

    def good(self, collector: str, took_s: float) -> None:
        before = self.readings.setdefault(collector, CollectorReading(success=True))
        if not before.success:
            _log.info("collector works again", extra={"collector": collector})
        before.success, before.took_s, before.reason = True, took_s, ""

    def bad(self, collector: str, reason: str, took_s: float = 0.0) -> None:
        before = self.readings.setdefault(collector, CollectorReading(success=True))
        if before.success or before.reason != reason:
            _log.warning("collector failed", extra={"collector": collector, "reason": reason})
        before.success, before.took_s, before.reason = False, took_s, reason
        before.errors += 1

    def report(self, collector: str, took_s: float, problem: str = "") -> None:
        """`good` without a problem, else `bad`."""
        if problem:
            self.bad(collector, problem, took_s)
        else:
            self.good(collector, took_s)
