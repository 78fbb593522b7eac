"""Removes folders that a tenant has written in, whatever is in them: no recursion, and in bounded time.

A tree of 2,500 nested folders ends a recursive removal, its paths are longer than the kernel takes, and
300,000 files take a quarter of a minute. So each subfolder's own subfolders are moved up to the top, where
one step reaches them, and the work stops at its deadline and goes on the next time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(folder: Path, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> bool:
    """Whether nothing is left of `folder`; else call again. Follows no link.

    Raises OSError for what cannot be removed, which stops nothing else of the folder from being so.
    """
    try:
        top = os.open(folder, _FOLDER)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        folder.unlink()  # a file, or a link
        return True
    failure: OSError | None = None  # of whatever could not be removed
    try:
        going_on = True
        while going_on:  # until a pass finds nothing more that it can remove
            going_on = False
            with os.scandir(top) as entries:
                for entry in entries:
                    if clock() >= deadline_s:
                        return False
                    try:
                        if not entry.is_dir(follow_symlinks=False):
                            os.unlink(entry.name, dir_fd=top)
                        elif not _empty(entry.name, top, deadline_s, clock):
                            return False
                        going_on = True
                    except OSError as error:
                        failure = error
    finally:
        os.close(top)
    try:
        folder.rmdir()
    except OSError as error:
        raise failure or error from None
    return True


def _empty(name: str, top: int, deadline_s: float, clock: Callable[[], float]) -> bool:
    """Remove folder `name` of `top` and its files; its subfolders become those of `top`. False: no time."""
    below = os.open(name, _FOLDER, dir_fd=top)
    try:
        with os.scandir(below) as entries:
            for entry in entries:
                if clock() >= deadline_s:
                    return False
                if entry.is_dir(follow_symlinks=False):
                    os.rename(entry.name, secrets.token_hex(8), src_dir_fd=below, dst_dir_fd=top)
                else:
                    os.unlink(entry.name, dir_fd=below)
    finally:
        os.close(below)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=top)
    return True
