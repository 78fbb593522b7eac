"""What containers used in the last hour, in steps of half a minute: a few bytes per step and pod."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from gpuslice.diagnosis.prometheus import TeamHours

STEPS = 120
STEP_S = 30.0
UNKNOWN = 0xFFFFFFFF
_UNKNOWN_PERCENT = 0xFF


class Point(NamedTuple):
    """None is unknown. `refused`: how often memory was refused during the step."""

    used_mib: int | None
    sm_percent: int | None
    refused: int = 0


@dataclass(slots=True)
class _Series:
    used_mib: array[int] = field(default_factory=lambda: array("I", [UNKNOWN]) * STEPS)
    sm_percent: array[int] = field(default_factory=lambda: array("B", [_UNKNOWN_PERCENT]) * STEPS)
    refused: dict[int, int] = field(default_factory=dict)  # by slot; most pods have none
    last: int = 0  # the number of the last step that was written


class UsageHistory:
    """A ring of steps; `step` begins the next one and forgets pods without data for an hour."""

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}
        self._times: deque[float] = deque(maxlen=STEPS)
        self._step = 0
        self._teams: deque[tuple[float, Mapping[str, TeamHours]]] = deque(maxlen=STEPS)

    def step(self, now_s: float) -> bool:
        """Begin the next step if the last one is over."""
        if self._times and now_s - self._times[-1] < STEP_S:
            return False
        self._step += 1
        self._times.append(now_s)
        for key in [key for key, each in self._series.items() if self._step - each.last > STEPS]:
            del self._series[key]
        return True

    def put(self, key: str, point: Point) -> None:
        """Add to the current step; steps without data stay unknown."""
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = _Series(last=self._step - 1)
        for missed in range(max(series.last + 1, self._step - STEPS + 1), self._step):
            series.used_mib[missed % STEPS] = UNKNOWN
            series.sm_percent[missed % STEPS] = _UNKNOWN_PERCENT
            series.refused.pop(missed % STEPS, None)
        slot, series.last = self._step % STEPS, self._step
        series.refused.pop(slot, None)
        if point.refused:
            series.refused[slot] = point.refused
        series.used_mib[slot] = UNKNOWN if point.used_mib is None else min(point.used_mib, UNKNOWN - 1)
        series.sm_percent[slot] = _UNKNOWN_PERCENT if point.sm_percent is None else min(100, point.sm_percent)

    def of(self, key: str) -> list[tuple[float, Point]]:
        """Time and point of each step since the pod was first seen, the oldest first."""
        series = self._series.get(key)
        if series is None:
            return []
        first = self._step - len(self._times) + 1
        points = []
        for number, time_s in enumerate(self._times, start=first):
            slot = number % STEPS
            used, percent = series.used_mib[slot], series.sm_percent[slot]
            refused = series.refused.get(slot, 0)
            if number > series.last:
                used, percent, refused = UNKNOWN, _UNKNOWN_PERCENT, 0
            known = None if used == UNKNOWN else used, None if percent == _UNKNOWN_PERCENT else percent
            points.append((time_s, Point(*known, refused)))
        while points and points[0][1] == Point(None, None):
            points.pop(0)
        return points

    def put_teams(self, now_s: float, amounts: Mapping[str, TeamHours]) -> None:
        """Record the amounts of each namespace at this step, as rates per hour."""
        self._teams.append((now_s, amounts))

    def team_hours(self) -> tuple[float, dict[str, TeamHours]]:
        """Over how many seconds, and the totals by namespace; a step lasts since the previous one."""
        sums: dict[str, list[float | None]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        steps = list(self._teams)
        for (before_s, _), (at_s, amounts) in pairwise(steps):
            hours = (at_s - before_s) / 3600
            for namespace, each in amounts.items():
                sums[namespace] = [
                    None if had is None or amount is None else had + amount * hours
                    for had, amount in zip(sums[namespace], each, strict=True)
                ]
        span_s = steps[-1][0] - steps[0][0] if steps else 0.0
        return span_s, {name: TeamHours(held or 0.0, used, sm) for name, (held, used, sm) in sums.items()}
