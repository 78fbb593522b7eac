"""The clock by which everything in the extender waits: that of its event loop, which tests move by hand."""

from __future__ import annotations

import asyncio


def loop_time() -> float:
    """Seconds."""
    return asyncio.get_running_loop().time()
