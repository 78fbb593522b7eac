"""A queue of keys: each is processed once at a time, again on request, with back-off after failures."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 5.0


class WorkQueue(Generic[K]):
    """``add`` for a key in process makes it run once more afterwards."""

    def __init__(self) -> None:
        self._waiting: dict[K, None] = {}
        self._timers: dict[K, tuple[float, asyncio.TimerHandle]] = {}
        self._failures: dict[K, int] = {}
        self._ready = asyncio.Event()

    def add(self, key: K) -> None:
        self._waiting[key] = None
        self._ready.set()

    def add_after(self, key: K, delay_s: float) -> None:
        """If there are several times, the earliest counts."""
        loop = asyncio.get_running_loop()
        due = loop.time() + max(delay_s, 0)
        held = self._timers.get(key)
        if held is not None:
            if held[0] <= due:
                return
            held[1].cancel()
        self._timers[key] = due, loop.call_at(due, self._due, key)

    def _due(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def failed(self, key: K) -> None:
        count = self._failures[key] = self._failures.get(key, 0) + 1
        self.add_after(key, min(_FIRST_DELAY_S * 2 ** min(count, 10), _LONGEST_DELAY_S))

    def succeeded(self, key: K) -> None:
        self._failures.pop(key, None)

    async def take(self) -> K:
        while not self._waiting:
            self._ready.clear()
            await self._ready.wait()
        key = next(iter(self._waiting))
        del self._waiting[key]
        return key

    def close(self) -> None:
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
