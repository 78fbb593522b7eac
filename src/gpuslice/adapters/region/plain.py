"""Files in folders owned by somebody else, a tenant or another user: read without trusting them.

A pipe instead of a file would block the reader for ever, a link could lead to another file, and a file may be
of any size.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_plain(path: Path | str) -> int:
    """A descriptor to read from. Raises OSError, also if it is not a regular file."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is no plain file", str(path))
    return file


def read_plain(path: Path | str, most_bytes: int) -> bytes:
    """The beginning of a file, at most `most_bytes`. Raises OSError."""
    file = open_plain(path)
    try:
        return os.pread(file, most_bytes, 0)
    finally:
        os.close(file)


def open_in_place(path: Path) -> int:
    """A descriptor to change a file that a container reads, and that only we may write. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o644)
    except BlockingIOError:  # the container has a lease on it (fcntl(2)): we would wait for 45 s
        path.unlink()
        file = os.open(path, flags, 0o644)
    os.fchmod(file, 0o644)
    return file
