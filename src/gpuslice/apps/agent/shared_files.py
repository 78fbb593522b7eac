"""Files that a container sees and others open as well, kept so that it cannot make them wait.

Root of a container may lease any file that it can read (``F_SETLEASE`` of fcntl(2)), on a read-only mount,
too. Whoever opens the file then waits until the lease is given up, by default for 45 s
(``/proc/sys/fs/lease-break-time``). The kernel grants no lease while others have the file open: none that
readers would wait for while somebody reads it, none at all while somebody may write it. So the agent keeps
these files open.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import weakref
from pathlib import Path

from gpuslice.apps.agent.library import LIBRARY

CLAIM_BYTES = 4096
"""More than what containers tell each other takes."""
TRIES = 100
"""Against a program that takes all of it all the time, one in thirty failed where it was tried."""
EVERY_S = 5.0
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


class SharedFiles:
    """The library's versions, the claims, and the limits below the agent's `root`.

    Limits are read by the exporter and the watchdog: what is past an unknown limit is not seen.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: dict[Path, int] = {}
        weakref.finalize(self, _close_all, self._open)

    async def run(self) -> None:
        """Keep open for ever what is there.

        An agent that stands by does so, too, so that an update leaves no moment in between.
        """
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two or three files for each container
        try:
            while True:
                with contextlib.suppress(OSError):  # of a failing disk, which the sweeper reports
                    await self.look()
                await asyncio.sleep(EVERY_S)
        finally:
            _close_all(self._open)

    async def look(self) -> None:
        """Open what is there and close what is gone. Waits for leases that were taken before we started."""
        for path, file in list(self._open.items()):
            same = False
            with contextlib.suppress(OSError):
                same = os.path.samestat(os.lstat(path), os.fstat(file))
            if not same:
                os.close(self._open.pop(path))
        read, write = _FLAGS | os.O_RDONLY, _FLAGS | os.O_WRONLY
        found = [(path, read) for path in self._root.glob(f"lib/**/{LIBRARY}")]
        found += [(path, read) for path in self._root.glob("containers/*/etc/limits")]
        found += [(path, write) for path in self._root.glob("cards/*/*/claim")]
        leased = []
        for path, flags in (each for each in found if each[0] not in self._open):
            try:
                self._open[path] = os.open(path, flags | os.O_NONBLOCK)
            except BlockingIOError:
                leased.append((path, flags))
            except OSError:
                continue  # it has gone; whatever else it is, there is a next round
        for path, flags in leased:  # who waits for the end of a lease keeps another from being taken
            with contextlib.suppress(OSError):
                file = await asyncio.to_thread(os.open, path, flags)
                if path in self._open:  # recreated meanwhile
                    os.close(file)
                else:
                    self._open[path] = file

    def new(self, path: Path) -> None:
        """Keep open a file that no container has seen yet. Raises OSError."""
        self._keep(path, os.open(path, _FLAGS | os.O_RDONLY))

    def _keep(self, path: Path, file: int) -> None:
        if path in self._open:
            os.close(self._open[path])
        self._open[path] = file

    def make_claim(self, path: Path) -> None:
        """An empty claim, whose memory is allocated from the start. Raises OSError.

        A container may have taken all memory of the card's claims for its own, also beyond the end of the
        file, and do so again and again. It needs longer for that than we for one page.
        """
        path.unlink(missing_ok=True)
        file = os.open(path, _FLAGS | os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._keep(path, file)
        os.fchmod(file, 0o666)  # any user of the container may write it
        for left in reversed(range(TRIES)):
            for other in list(self._open):
                if other.parent.parent == path.parent.parent and other != path:
                    os.ftruncate(self._open[other], CLAIM_BYTES)
            try:
                os.pwrite(file, bytes(CLAIM_BYTES), 0)
                return
            except OSError as error:
                if error.errno != errno.ENOSPC or not left:
                    raise


def _close_all(files: dict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])
