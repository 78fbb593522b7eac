"""A lock shared by users who cannot rely on each other: waited for briefly, then done without.

Anyone who may read a file may hold its lock for ever. So this lock only keeps users out of each other's way;
what they do under it must be safe without it.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from gpuslice.core.errors import printable

from .living import PROC

PATIENCE_S = 3.0
LOOK_EVERY_S = 0.02


@contextlib.contextmanager
def locked(path: Path, patience_s: float = PATIENCE_S) -> Iterator[str]:
    """Yields "" if the lock is ours, otherwise why not and who has it."""
    with contextlib.ExitStack() as stack:
        try:
            lock = _opened(path)
        except OSError as error:
            why_not = f"the lock {path} cannot be opened ({error.strerror})"
        else:
            stack.callback(os.close, lock)
            why_not, deadline_s = "", time.monotonic() + patience_s
            while not why_not:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline_s:
                        why_not = f"{_holder(lock)} holds the lock {path}"
                    else:
                        time.sleep(LOOK_EVERY_S)
        yield why_not


def _opened(path: Path) -> int:
    """First without O_CREAT: kernels may refuse that for another user's file in a sticky folder.

    It may be a pipe or a link that somebody put there, which must neither block nor mislead us.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        lock = os.open(path, flags | os.O_CREAT, 0o644)
        with contextlib.suppress(PermissionError):  # just created by somebody else
            os.fchmod(lock, 0o644)
        return lock


def _holder(lock: int) -> str:
    """Who has a lock on the same file, as far as /proc/locks shows."""
    number = str(os.fstat(lock).st_ino)
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (PROC / "locks").read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == number:
                pid = int(words[4])
                command = (
                    (PROC / str(pid) / "cmdline")
                    .read_bytes()
                    .decode(errors="replace")
                    .replace("\0", " ")
                    .strip()
                )
                owner = (PROC / str(pid)).stat().st_uid
                return f"process {pid} of user id {owner} ({printable(command)[:80]})"
    return "somebody"
