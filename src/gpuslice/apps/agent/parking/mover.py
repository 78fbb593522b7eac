"""Moves the processes of one container together, off their cards and back.

All are locked before any is taken off, so that none waits for one that is gone; if one cannot be, all are put
back. Which of them are off is never remembered: each move begins by asking the driver.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

from gpuslice.apps.agent.parking.checkpointer import (
    NO_SUCH_PROCESS,
    Checkpointer,
    CheckpointRefusedError,
    HelperEndedError,
    ProcessState,
)

_log = logging.getLogger(__name__)

LOCK_MS = 2000
TRIES = 5
"""Of a helper that ends in the midst, each time it is started again."""


class Mover:
    """Whoever calls it sees to the room: while something may be put back, nobody else may have it."""

    def __init__(self, calls: Checkpointer, *, lock_ms: int = LOCK_MS) -> None:
        self._calls = calls
        self._lock_ms = lock_ms

    async def states(self, pids: Collection[int]) -> Mapping[int, ProcessState]:
        """Of those that use a card. Raises `CheckpointRefusedError`, `HelperEndedError`."""
        for left in reversed(range(TRIES)):
            try:
                found = {pid: await self._calls.state(pid) for pid in pids}
                return {pid: state for pid, state in found.items() if state is not None}
            except HelperEndedError:
                if not left:
                    raise
        raise AssertionError

    async def park(self, pids: Collection[int], objection: Callable[[], Awaitable[str]] | None = None) -> str:
        """Take all of them off their cards, or none: why not, "" if they are off.

        `objection` says, once they are locked, why they must not be, or "".
        """
        try:
            locked = [pid for pid in pids if await self._exists(self._calls.lock(pid, self._lock_ms))]
            if objection is not None and (problem := await objection()):
                await self.wake(pids)
                return problem
            for pid in locked:
                await self._exists(self._calls.checkpoint(pid))
        except (CheckpointRefusedError, HelperEndedError) as error:
            problem = await self.wake(pids)
            return f"{error}; {problem}" if problem else str(error)
        return ""

    async def wake(self, pids: Collection[int]) -> str:
        """Put all of them back and let them run, whatever was done with them before; what went wrong."""
        for _ in range(TRIES):
            try:
                return await self._wake(pids)
            except HelperEndedError as error:
                _log.warning("put back again", extra={"error": str(error)})
                problem = str(error)
            except CheckpointRefusedError as error:
                problem = str(error)
        return problem

    async def _wake(self, pids: Collection[int]) -> str:
        lost = []
        for pid, state in (await self.states(pids)).items():
            off = state is ProcessState.CHECKPOINTED
            if state is ProcessState.FAILED or (off and not await self._restored(pid)):
                lost.append(pid)
        for pid, state in (await self.states(pids)).items():
            if state is ProcessState.LOCKED:
                await self._exists(self._calls.unlock(pid))
        return f"the driver lost process {lost[0]}: its calls never return" if lost else ""

    async def _restored(self, pid: int) -> bool:
        try:
            await self._calls.restore(pid)
        except CheckpointRefusedError as error:
            return error.code == NO_SUCH_PROCESS
        return True

    async def _exists(self, call: Awaitable[object]) -> bool:
        """Whether the process was there for it."""
        try:
            await call
        except CheckpointRefusedError as error:
            if error.code != NO_SUCH_PROCESS:
                raise
            return False
        return True
