"""Whose turn it is for work that strangers can cause."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from gpuslice.adapters.limits import Limits
from gpuslice.core.errors import GpusliceError


class TooManyError(GpusliceError):
    """Nothing was done: others asked for too much."""


class Asker(NamedTuple):
    """The address of who asks, and whether it is the first request on its connection."""

    address: str = ""
    first: bool = True


UNNAMED = Asker()


class Turns:
    """Lets a few reviews of unknown tokens or passwords go on at a time.

    Of those that wait, who comes from an address that has sent nothing wrong is next, then who has just
    connected, and of these the newest: whoever floods us waits behind himself, and others hardly at all.
    The last in this order is refused if there are too many.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._free = limits.reviews_at_once
        self._count = 0
        self._waiting: dict[asyncio.Future[bool], tuple[Asker, int]] = {}
        self._suspects: OrderedDict[str, float] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, asker: Asker) -> AsyncIterator[None]:
        """Raises `TooManyError` if it is refused."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(asker)
        try:
            yield
        finally:
            self._release()

    def was_wrong(self, asker: Asker) -> None:
        """What was shown from there is nobody's."""
        self._suspects[asker.address] = self._clock()
        self._suspects.move_to_end(asker.address)
        if len(self._suspects) > self._limits.reviews_remembered:
            self._suspects.popitem(last=False)

    async def _wait(self, asker: Asker) -> None:
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._count += 1
        self._waiting[turn] = asker, self._count
        if len(self._waiting) > self._limits.reviews_waiting - self._limits.reviews_at_once:
            last = min(self._waiting, key=self._place)
            del self._waiting[last]
            last.set_result(False)
        try:
            if not await turn:
                raise TooManyError("too many ask at once; try again")
        except asyncio.CancelledError:
            if self._waiting.pop(turn, None) is None and not turn.cancelled() and turn.result():
                self._release()
            raise

    def _place(self, turn: asyncio.Future[bool]) -> tuple[bool, bool, int]:
        """In the order of those that wait; the highest is next."""
        asker, number = self._waiting[turn]
        wrong_s = self._suspects.get(asker.address, float("-inf"))
        return self._clock() - wrong_s > self._limits.suspect_s, asker.first, number

    def _release(self) -> None:
        """Pass the turn on."""
        while self._waiting:
            turn = max(self._waiting, key=self._place)
            del self._waiting[turn]
            if not turn.done():
                turn.set_result(True)
                return
        self._free += 1
