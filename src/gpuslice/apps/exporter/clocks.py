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

    def add(self, uuid: str, bits: int, taken_at_s: float) -> None:
        """What a sample showed; the same one again counts no more."""
        seen = self._seen[uuid]
        if not seen or seen[-1][0] != taken_at_s:
            seen.append((taken_at_s, bits))
        while seen[0][0] < taken_at_s - self._window_s:
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
