"""glibc's malloc. It gives each thread an arena of its own, and keeps what is freed."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_ARENA_MAX = -8
_TRIM_BYTES = 128 << 10


def share_one_arena() -> None:
    """Before any thread starts, so that what is freed goes back to the system; glibc's alone can be told."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
