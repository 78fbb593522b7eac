"""Only one agent of a node is active: an update starts the next agent before it ends this one.

The next agent reads everything it needs meanwhile, so that kubelet lacks one only for a moment. A lock in the
agents' own folder decides which is active; the kernel releases it however its holder ends. Whoever can open a
folder can lock it, so it is on one that only root can open.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from gpuslice.adapters.web.clients import App
from gpuslice.adapters.web.serve import CannotServeError, Listen, serving
from gpuslice.apps.settings import SettingsError

_log = logging.getLogger(__name__)

POLL_S = 0.05
LAST_S = 10.0  # how long the end of serving kubelet may take; the container runtime kills us after 30 s
PORT_S = 60.0
"""How long an active agent waits for the port: the previous one may still be answering."""


class ActiveLock:
    """The right to write about the node and to serve kubelet. `held` is set once this agent has it.

    `folder`: the agents' own.
    """

    def __init__(self, folder: Path) -> None:
        self.held = asyncio.Event()
        self._folder = folder / "active"
        self._serving = 0
        self._served = asyncio.Event()
        self._served.set()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """While inside, the lock is kept.

        If the next agent registers before kubelet has seen this one's stream end, some versions of kubelet
        drop the next one's connection.
        """
        self._serving += 1
        self._served.clear()
        try:
            yield
        finally:
            self._serving -= 1
            if not self._serving:
                self._served.set()

    async def hold(self) -> None:
        """Take the lock as soon as nobody else has it, and keep it until cancelled."""
        with contextlib.ExitStack() as stack:
            try:
                self._folder.parent.mkdir(parents=True, exist_ok=True)
                self._folder.mkdir(mode=0o700, exist_ok=True)
                handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, handle)
                standing_by = False
                while True:
                    try:
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        if not standing_by:
                            _log.info("another agent serves this node; standing by until it ends")
                        standing_by = True
                    await asyncio.sleep(POLL_S)
            except OSError as error:  # no agent would be worse than two for a moment
                _log.warning("cannot tell whether another agent runs here", extra={"error": str(error)})
            self.held.set()
            try:
                await asyncio.Event().wait()
            finally:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_S):
                        await self._served.wait()


@contextlib.asynccontextmanager
async def serving_once_free(
    app: App, listen: Listen, lock: ActiveLock, patience_s: float = PORT_S
) -> AsyncIterator[int]:
    """As `serving`, once the previous agent has released the port; that one answers probes until then.

    Raises `SettingsError` if somebody else has the port `patience_s` after this agent became active.
    """
    async with contextlib.AsyncExitStack() as stack:
        waited_s = 0.0
        while True:
            try:
                port = await stack.enter_async_context(serving(app, listen))
                break
            except CannotServeError as error:
                if not error.in_use:
                    raise
                if waited_s > patience_s:
                    taken = f"port {listen.port} is used by another program; choose another with --port"
                    raise SettingsError(taken) from error
            waited_s += POLL_S if lock.held.is_set() else 0.0
            await asyncio.sleep(POLL_S)
        yield port
