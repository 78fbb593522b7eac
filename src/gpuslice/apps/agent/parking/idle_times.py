"""Since when containers do not use their cards, by what the driver reports of their processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpuslice.apps.agent.watchdog import Holder
from gpuslice.core.attribution import ProcessReading
from gpuslice.core.lending import Name
from gpuslice.core.parking import LEFT_ALONE_S, Idle, due

ACTIVE_RATIO = 0.01
"""Below this fraction of the card's time, a container is idle."""


@dataclass(frozen=True, slots=True)
class Use:
    """When a container last used its cards, and how many bytes of each it held then."""

    last_s: float
    held: Mapping[str, int]


class IdleTimes:
    """Of all containers that hold memory. One whose use the driver does not report is never idle."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.uses: dict[Name, Use] = {}
        self._clock = clock
        self._left_alone: dict[Name, float] = {}  # until when

    def learn(self, held: Mapping[Holder, Sequence[ProcessReading]]) -> None:
        """What the driver reports now."""
        now_s, seen = self._clock(), dict[Name, dict[str, int]]()
        busy = set[Name]()
        for holder, readings in held.items():
            name = holder.uid, holder.container
            seen.setdefault(name, {})[holder.card] = sum(each.memory_bytes or 0 for each in readings)
            if any(each.sm_ratio is None or each.sm_ratio >= ACTIVE_RATIO for each in readings):
                busy.add(name)
        for name, amounts in seen.items():
            use = self.uses.get(name)
            if use is None or use.held != amounts or name in busy:
                self.uses[name] = Use(now_s, amounts)
        self.uses = {name: use for name, use in self.uses.items() if name in seen}
        self._left_alone = {name: until_s for name, until_s in self._left_alone.items() if until_s > now_s}

    def leave_alone(self, name: Name) -> None:
        """It was woken, or cannot be parked."""
        self._left_alone[name] = self._clock() + LEFT_ALONE_S

    def due(self, after_s: Mapping[Name, float]) -> list[Name]:
        """Who may be parked now, the longest idle first. `after_s`: after how long, of those that consent."""
        idle = [
            Idle(name, self.uses[name].last_s, needed_s, self._left_alone.get(name, 0.0))
            for name, needed_s in after_s.items()
        ]
        return [each.name for each in due(idle, self._clock())]
