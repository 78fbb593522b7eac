"""What a pod's owner must know becomes an event on the pod, beside the requests and never in their way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from gpuslice.adapters.kube.events import EventRecorder, pod_reference
from gpuslice.adapters.kube.objects import ObjectReference

_log = logging.getLogger(__name__)

WAITING = 1000  # events; what comes while so many wait is dropped: a storm must not take memory
REPEAT_AFTER_S = 60.0
REMEMBERED = 10_000


class Teller:
    """Writes events on pods in the background; the same words about one pod once a minute at most."""

    def __init__(self, recorder: EventRecorder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._clock = clock
        self._queue: asyncio.Queue[tuple[ObjectReference, str, str, str]] = asyncio.Queue(WAITING)
        self._told: OrderedDict[tuple[str, str], float] = OrderedDict()

    def warn(self, namespace: str, name: str, uid: str, reason: str, message: str) -> None:
        """Tell the owner of this pod what is wrong. `reason` is one CamelCase word."""
        self._tell(namespace, name, uid, reason, message, "Warning")

    def note(self, namespace: str, name: str, uid: str, reason: str, message: str) -> None:
        """Tell the owner of this pod what was done."""
        self._tell(namespace, name, uid, reason, message, "Normal")

    def _tell(self, namespace: str, name: str, uid: str, *words: str) -> None:
        reason, message, kind = words
        key, now = (uid or f"{namespace}/{name}", message), self._clock()
        if now - self._told.get(key, float("-inf")) < REPEAT_AFTER_S:
            return
        self._told[key] = now
        self._told.move_to_end(key)
        if len(self._told) > REMEMBERED:
            self._told.popitem(last=False)
        about = pod_reference(namespace, name, uid)
        try:
            self._queue.put_nowait((about, reason, message, kind))
        except asyncio.QueueFull:
            _log.warning("event dropped", extra={"pod": f"{namespace}/{name}", "reason": reason})

    async def run(self) -> None:
        """Write what was told until cancelled."""
        while True:
            about, reason, message, kind = await self._queue.get()
            await self._recorder.create_event(about, reason, message, type=kind)
