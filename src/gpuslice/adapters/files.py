"""Files that others replace while we run: certificates, tokens, configuration."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SETTLED_S = 1.0


@dataclass(slots=True)
class FollowedFile:
    """Its content as of now, read again only when it has changed: by rename, in place, or behind a link.

    A change counts once nobody has gone on writing for `settled_s`: half a file may look like a whole one.
    """

    path: str
    settled_s: float = SETTLED_S
    clock: Callable[[], float] = time.monotonic
    _content: bytes | None = None
    _seen: tuple[int, ...] = ()
    _changed_s: float | None = None

    def read(self) -> bytes:
        """Raises OSError, also while there is no file."""
        now = os.stat(self.path)
        seen = (now.st_dev, now.st_ino, now.st_size, now.st_ctime_ns)
        if seen != self._seen:
            self._seen, self._changed_s = seen, self.clock()
        changed_s = self._changed_s
        if self._content is None:
            self._content = Path(self.path).read_bytes()
        elif changed_s is not None and self.clock() - changed_s >= self.settled_s:
            self._content, self._changed_s = Path(self.path).read_bytes(), None
        return self._content


@contextlib.contextmanager
def in_memory(content: bytes) -> Iterator[str]:
    """The path of a file in memory, for a library that wants a file: a private key never touches a disk."""
    with open(os.memfd_create("gpuslice"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
