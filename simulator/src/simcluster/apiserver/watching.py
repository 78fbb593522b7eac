"""A watch as a chunked HTTP answer."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from simcluster.cluster.request import Response
from simcluster.cluster.watch import Watch

_BOOKMARK_EVERY_S = 60.0
_BEFORE_THE_END_S = 2.0
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
    """Runs until the deadline. Bookmarks come each minute, and two seconds before it so that the client
    resumes from there, as from the real server's cache (``nextBookmarkTime``)."""
    ready = asyncio.Event()
    watch.on_ready = ready.set
    now = asyncio.get_running_loop().time
    last = deadline_s - _BEFORE_THE_END_S
    bookmark_s = min(now() + _BOOKMARK_EVERY_S, last)
    while True:
        ready.clear()
        if now() >= bookmark_s:
            if watch.wants_bookmarks:
                watch.bookmark()
            bookmark_s = min(now() + _BOOKMARK_EVERY_S, last) if now() < last else deadline_s + 1
        if lines := watch.take():
            await outgoing.write(lines)
        elif watch.ended or now() >= deadline_s:
            return
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(bookmark_s, deadline_s)):
                    await ready.wait()
