"""Calls into a driver that may never return, with a bound on how long anybody waits for them."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from gpuslice.adapters.gpu.source import GpuUnavailableError

T = TypeVar("T")


class BlockingWorker:
    """One daemon thread that runs blocking calls in order.

    A call that does not come back keeps the thread: until it does, further calls are refused at once instead
    of piling up threads behind a dead driver. The thread is a daemon so that it cannot hold up the exit.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any, Exception | None], None]]] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._stuck_since: datetime | None = None

    async def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """The function's result. GpuUnavailableError when it takes longer, or an earlier one still runs."""
        if self._stuck_since is not None:
            # a time, not how long ago: who repeats what is new alone would have news each second
            since = self._stuck_since.isoformat(timespec="seconds")
            raise GpuUnavailableError(f"{self._name}: a call has not come back since {since}")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            self._stuck_since = None
            if not answer.done():
                answer.set_exception(error) if error is not None else answer.set_result(result)

        def done(result: Any, error: Exception | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._calls.put((function, done))
        try:
            # before Python 3.11.3 `asyncio.timeout` fails in clean-up
            await asyncio.wait({answer}, timeout=timeout_s)
            if answer.done():
                return answer.result()
            self._stuck_since = datetime.now(UTC)
            raise GpuUnavailableError(f"{self._name}: no answer within {timeout_s:g} s")
        finally:
            answer.cancel()

    def _run(self) -> None:
        while True:
            function, done = self._calls.get()
            try:
                done(function(), None)
            except Exception as error:
                done(None, error)
