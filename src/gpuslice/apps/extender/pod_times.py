"""When each pod was asked about, bound, and shown bound: how long pods queue and how far the watch lags."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpuslice.adapters.web.histogram import WAIT_S, Histogram

REMEMBERED = 10_000  # pods of each kind; the oldest are forgotten


class PodTimes:
    """Records the steps of each pod, in seconds of `clock`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.queue = Histogram(
            "gpuslice_extender_queue_seconds",
            "From filter's first question about a pod until it was bound.",
            bounds=WAIT_S,
        )
        self.watch_delay = Histogram(
            "gpuslice_extender_watch_delay_seconds",
            "From the API server's yes to a binding until the watch showed it.",
        )
        self._clock = clock
        self._asked: dict[str, float] = {}  # by uid
        self._unshown: dict[str, float] = {}  # when they were bound, oldest first

    def asked(self, uid: str) -> None:
        """filter is asked about the pod, for the first time or again."""
        _remember(self._asked, uid, self._clock())

    def bound(self, uid: str, *, shown: bool) -> None:
        """The API server has accepted the binding; `shown`: the watch has shown it already."""
        now_s = self._clock()
        if (asked_s := self._asked.pop(uid, None)) is None:
            return  # a repeated bind, or one without a filter before it
        self.queue.observe(now_s - asked_s)
        if shown:
            self.watch_delay.observe(0.0)
        else:
            _remember(self._unshown, uid, now_s)

    def shown(self, uid: str) -> None:
        """The watch shows the pod bound."""
        if (bound_s := self._unshown.pop(uid, None)) is not None:
            self.watch_delay.observe(self._clock() - bound_s)

    def gone(self, uid: str) -> None:
        """The pod no longer exists."""
        self._asked.pop(uid, None)
        self._unshown.pop(uid, None)

    def longest_unshown_s(self) -> float:
        """How long ago the pod was bound that the watch has failed to show for the longest time."""
        oldest_s = next(iter(self._unshown.values()), None)
        return 0.0 if oldest_s is None else self._clock() - oldest_s


def _remember(times: dict[str, float], uid: str, now_s: float) -> None:
    times.setdefault(uid, now_s)
    if len(times) > REMEMBERED:
        del times[next(iter(times))]
