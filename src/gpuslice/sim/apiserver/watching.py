"""A watch as a chunked HTTP answer."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from gpuslice.sim.cluster.request import Response
from gpuslice.sim.cluster.watch import Watch

_BOOKMARK_EVERY_S = 30.0
_LONGEST_S = 3600.0


async def stream_watch(incoming: web.Request, response: Response) -> web.StreamResponse:
    """Sends lines as they come until the watch or the client ends, or the time asked for is over."""
    watch = response.watch
    assert watch is not None
    outgoing = web.StreamResponse(headers=dict(response.headers))
    outgoing.enable_chunked_encoding()
    try:
        await outgoing.prepare(incoming)
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(watch.timeout_s or _LONGEST_S):
                await _pump(watch, outgoing)
    finally:
        watch.end()
    return outgoing


async def _pump(watch: Watch, outgoing: web.StreamResponse) -> None:
    ready = asyncio.Event()
    watch.on_ready = ready.set
    while True:
        ready.clear()
        if lines := watch.take():
            await outgoing.write(lines)
        elif watch.ended:
            return
        else:
            await _wait(watch, ready)


async def _wait(watch: Watch, ready: asyncio.Event) -> None:
    """For something to send; a bookmark when nothing comes for long."""
    try:
        async with asyncio.timeout(_BOOKMARK_EVERY_S):
            await ready.wait()
    except TimeoutError:
        if watch.wants_bookmarks:
            watch.bookmark()
