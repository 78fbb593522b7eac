"""The clock of all waiting within a process."""

from __future__ import annotations

import asyncio


def loop_time() -> float:
    """The event loop's clock in seconds, which tests set by hand."""
    return asyncio.get_running_loop().time()
