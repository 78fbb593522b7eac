"""What the agent owns is kept as it ought to be, whoever deletes, empties, changes or restores it.

Whoever owns something says what is there and what ought to be there; where they differ, it is written. Both
come from a watch or from the disk, never from the memory of what was written, and cost the API server nothing
while they are alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gpuslice.adapters.kube.errors import AlreadyExistsError, ConflictError, KubeError, UnavailableError
from gpuslice.core.errors import GpusliceError

_log = logging.getLogger(__name__)

EVERY_S = 2.0
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 10.0
REASON = "GPUNotRepaired"


class LostError(GpusliceError):
    """It cannot be put back, only reported."""


@dataclass(frozen=True, slots=True)
class Owned:
    """One thing. `write` puts `wanted` there; it raises KubeError, OSError or LostError if it cannot."""

    what: str
    found: Any
    wanted: Any
    write: Callable[[], Awaitable[None] | None]

    @property
    def right(self) -> bool:
        return bool(self.found == self.wanted)


class Upkeep:
    """Keeps `things`. `tell` is called once for each that cannot be written, with a sentence.

    `before` is called before each look. `on_disk`: another thread reads them first, so that a slow disk
    delays nobody; they are read again before they are written, since the agent may have written meanwhile.
    """

    def __init__(
        self,
        things: Callable[[], Iterable[Owned]],
        tell: Callable[[str], None],
        *,
        every_s: float = EVERY_S,
        on_disk: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.problems: dict[str, str] = {}  # why what cannot be written
        self.settled = False  # after the last round everything was as it ought to be
        self._things = things
        self._tell = tell
        self.every_s = every_s
        self._on_disk = on_disk
        self._before = before
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Something changed: look now."""
        self._woken.set()

    async def run(self) -> None:
        """Keep everything for ever. What fails is tried again, ever more rarely."""
        retry_s = FIRST_RETRY_S
        while True:
            wait_s = self.every_s
            await self.round()
            if self.problems:
                wait_s, retry_s = retry_s, min(LONGEST_RETRY_S, 2 * retry_s)
            else:
                retry_s = FIRST_RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._woken.wait()
            self._woken.clear()

    async def round(self) -> None:
        """Write what is not as it ought to be."""
        problems: dict[str, str] = {}
        settled = True
        self._before()
        try:
            if self._on_disk and await asyncio.to_thread(lambda: all(each.right for each in self._things())):
                self.problems, self.settled = problems, True
                return
            for each in self._things():
                if each.right:
                    continue
                try:
                    written = each.write()
                    if written is not None:
                        await written
                    _log.info("written", extra={"what": each.what})
                except (ConflictError, AlreadyExistsError):  # the watch is behind, and wakes us
                    settled = False
                except (KubeError, OSError, LostError) as error:
                    problems[each.what] = str(error)
                    self._report(each.what, error)
                    if isinstance(error, KubeError):  # an API server in need has thousands of agents
                        break
        except OSError as error:
            problems["files"] = str(error)
            self._report("files", error)
        self.problems, self.settled = problems, settled and not problems

    def _report(self, what: str, error: Exception) -> None:
        if self.problems.get(what) == str(error):
            return
        _log.warning("not written, will try again", extra={"what": what, "error": str(error)})
        if not isinstance(error, UnavailableError):
            self._tell(f"{what}: {error}")
