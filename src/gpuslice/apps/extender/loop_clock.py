"""The clock of all waiting in the extender: that of its event loop, which tests set by hand."""

from __future__ import annotations

import asyncio


def loop_time() -> float:
    """In seconds."""
    return asyncio.get_running_loop().time()
