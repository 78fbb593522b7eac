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
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from gpuslice.adapters.web.clients import App
from gpuslice.adapters.web.serve import CannotServeError, Listen, serving
from gpuslice.apps.agent.upkeep import LostError, Owned
from gpuslice.apps.settings import SettingsError

_log = logging.getLogger(__name__)

MODE = 0o700
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
        self._handle: int | None = None  # of the locked folder
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

    def owned(self) -> Iterator[Owned]:
        """The folder at its path must be the one that is locked: the next agent would lock another."""
        if self._handle is not None:
            found, mode = False, 0
            with contextlib.suppress(OSError):
                status = self._folder.stat()
                found, mode = os.path.samestat(status, os.fstat(self._handle)), stat.S_IMODE(status.st_mode)
            yield Owned(f"folder {self._folder}", (found, mode), (True, MODE), self._mend)

    def _mend(self) -> None:
        assert self._handle is not None
        with contextlib.suppress(OSError):
            if os.path.samestat(self._folder.stat(), os.fstat(self._handle)):
                os.fchmod(self._handle, MODE)
                return
        if (handle := self._taken()) is None:
            raise LostError("another agent has locked it meanwhile")
        os.dup2(handle, self._handle, inheritable=False)
        os.close(handle)

    def _taken(self) -> int | None:
        """The locked folder; None if another agent has locked it. Raises OSError."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        if not self._folder.is_dir():
            self._folder.unlink(missing_ok=True)
        self._folder.mkdir(mode=MODE, exist_ok=True)
        handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fchmod(handle, MODE)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        return handle

    async def hold(self) -> None:
        """Take the lock as soon as nobody else has it, and keep it until cancelled."""
        standing_by = False
        with contextlib.ExitStack() as stack:
            try:
                while (handle := self._taken()) is None:
                    if not standing_by:
                        _log.info("another agent serves this node; standing by until it ends")
                    standing_by = True
                    await asyncio.sleep(POLL_S)
                self._handle = handle
                stack.callback(os.close, handle)
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
