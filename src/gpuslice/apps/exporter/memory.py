"""Keeps the process's pauses short.

Python's collector examines all living objects, modules and thousands of containers, again and again: 90 ms
with 25,000 series on the page, during which no scrape is answered.
"""

from __future__ import annotations

import asyncio
import gc
import itertools

SETTLED_AFTER_S = 10.0
SETTLE_EVERY_S = 600.0
THAW_EVERY = 36
"""How often to thaw what was set aside: every six hours, with one long pause.

What died in a cycle since, such as a connection that was open then, stays until a thaw.
"""

_YOUNG = 5000


async def set_aside_what_lives(
    after_s: float = SETTLED_AFTER_S, every_s: float = SETTLE_EVERY_S, thaw_every: int = THAW_EVERY
) -> None:
    """Tell the collector periodically to ignore what is alive now; runs until cancelled."""
    gc.set_threshold(_YOUNG, 20, 20)
    await asyncio.sleep(after_s)
    for times in itertools.count(1):
        if times % thaw_every == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        await asyncio.sleep(every_s)
