"""Whose turn it is for work that strangers can cause."""

from __future__ import annotations

import asyncio
from collections import deque

from gpuslice.core.errors import GpusliceError


class TooManyError(GpusliceError):
    """Nothing was done: others asked for too much."""


class NewestFirst:
    """Lets `at_once` go on at a time. Of those that wait the newest is next, so that whoever floods us with
    questions waits behind himself, and others hardly at all; the oldest is refused if there are too many."""

    def __init__(self, at_once: int, most: int) -> None:
        self._free = at_once
        self._most_waiting = most - at_once
        self._waiting: deque[asyncio.Future[bool]] = deque()

    async def __aenter__(self) -> None:
        """Raises `TooManyError` if it is refused."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if len(self._waiting) > self._most_waiting:
            self._waiting.popleft().set_result(False)
        try:
            if not await turn:
                raise TooManyError("too many ask at once; try again")
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif turn.done() and not turn.cancelled() and turn.result():
                self._release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():
                turn.set_result(True)
                return
        self._free += 1
