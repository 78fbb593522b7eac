"""Xid faults, counted by card and code, with the times that windows need."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

# Shown as 0 from the start, so that the first event of a code is an increase. Source: NVIDIA's Xid catalogue:
# faults of the card, of memory, of links and of the firmware, and those that an application causes.
KNOWN_XIDS = (13, 31, 43, 45, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120)
KEPT = 1000


@dataclass(frozen=True, slots=True)
class XidTally:
    """One code on one card. `last_s` is 0 before the first."""

    count: int
    last_s: float


class Xids:
    """Grows with each event; a card is its uuid, "" when the driver did not say which."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[int]] = defaultdict(Counter)
        self._last_s: dict[tuple[str, int], float] = {}
        self._newest: dict[str, int] = {}
        self._events: deque[tuple[float, str, int]] = deque(maxlen=KEPT)

    def add(self, uuid: str, xid: int, now_s: float) -> None:
        self._counts[uuid][xid] += 1
        self._last_s[uuid, xid] = now_s
        self._newest[uuid] = xid
        self._events.append((now_s, uuid, xid))

    def of(self, uuid: str) -> Mapping[int, XidTally]:
        """Every known code and every one that happened."""
        counts = self._counts[uuid]
        codes = sorted({*KNOWN_XIDS, *counts})
        return {xid: XidTally(counts[xid], self._last_s.get((uuid, xid), 0.0)) for xid in codes}

    def newest(self, uuid: str) -> int:
        """The last code, 0 when there was none."""
        return self._newest.get(uuid, 0)

    def within(self, uuid: str, since_s: float) -> Mapping[int, int]:
        """Codes that happened after `since_s`, with how often."""
        return Counter(xid for when_s, card, xid in self._events if card == uuid and when_s > since_s)
