"""How often samples of late showed each reason for held-down clocks: DCGM_EXP_CLOCK_EVENTS_COUNT's window."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping

from gpuslice.apps.exporter.dcgm import CLOCK_EVENTS


class ClockWindows:
    """Remembers the reasons of each sample for `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: dict[str, deque[tuple[float, int]]] = defaultdict(deque)

    def add(self, uuid: str, bits: int, now_s: float) -> None:
        seen = self._seen[uuid]
        seen.append((now_s, bits))
        while seen and seen[0][0] < now_s - self._window_s:
            seen.popleft()

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """uuid → reason → samples, reasons that never showed left out."""
        return {uuid: _count(seen) for uuid, seen in self._seen.items()}


def _count(seen: deque[tuple[float, int]]) -> Mapping[str, int]:
    found: Counter[str] = Counter()
    for _, bits in seen:
        for bit, name in CLOCK_EVENTS.items():
            if bits & bit:
                found[name] += 1
    return found
