"""A watch as a chunked HTTP answer."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from simcluster.cluster.request import Response
from simcluster.cluster.watch import Watch

_BOOKMARK_EVERY_S = 30.0
_LONGEST_S = 3600.0


async def stream_watch(incoming: web.Request, response: Response) -> web.StreamResponse:
    """Sends lines as they arrive until the watch or the client ends, or the requested time is over."""
    watch = response.watch
    assert watch is not None
    outgoing = web.StreamResponse(headers=dict(response.headers))
    outgoing.enable_chunked_encoding()
    try:
        await outgoing.prepare(incoming)
        with contextlib.suppress(ConnectionError):
            await _pump(watch, outgoing, asyncio.get_running_loop().time() + (watch.timeout_s or _LONGEST_S))
    finally:
        watch.end()
    return outgoing


async def _pump(watch: Watch, outgoing: web.StreamResponse, deadline_s: float) -> None:
    """Runs until the deadline, which a last bookmark announces so that the client resumes from there."""
    ready = asyncio.Event()
    watch.on_ready = ready.set
    while True:
        ready.clear()
        left_s = deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0 and watch.wants_bookmarks:
            watch.bookmark()
        if lines := watch.take():
            await outgoing.write(lines)
        elif not watch.ended and left_s > 0:
            # waits for something to send; sends a bookmark if nothing arrives for long
            longest_s = min(left_s, _BOOKMARK_EVERY_S)
            try:
                async with asyncio.timeout(longest_s):
                    await ready.wait()
            except TimeoutError:
                if watch.wants_bookmarks and longest_s >= _BOOKMARK_EVERY_S:
                    watch.bookmark()
            continue
        if watch.ended or left_s <= 0:
            return
