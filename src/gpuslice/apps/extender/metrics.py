"""The process's counters as Prometheus reads them, with the state of the ledger at that moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from gpuslice.adapters.kube.followed_pod import PodNews
from gpuslice.adapters.web.exposition import Family, MetricKind, labels
from gpuslice.adapters.web.histogram import WAIT_S, Histogram
from gpuslice.apps.extender.subscriber import BindResult, FilterVerdict, Subscriber
from gpuslice.core.hold import Hold
from gpuslice.core.ledger import Ledger

REMEMBERED = 10_000  # pods; the oldest are forgotten
NO_COUNTS: Mapping[str, int] = {}
NOMINATION_RESULTS = ("used", "late", "missed", "withdrawn")


def api_times() -> Histogram:
    """Durations of requests to the API server, without watches."""
    about = "Time of a request to the API server."
    return Histogram("gpuslice_extender_api_request_seconds", about, ("method", "resource"))


class Metrics:
    """Counters of the process; `families` adds the state of the ledger."""

    def __init__(self, ledger: Ledger, api: Histogram) -> None:
        self._ledger = ledger
        self.calls: dict[tuple[str, str], int] = {}  # (verb, result)
        self.asked_while_not_ready = 0
        self.requests = Histogram("gpuslice_extender_request_seconds", "Time of a call.", ("verb",))
        self.pauses = Histogram(
            "gpuslice_extender_pause_seconds", "How long answers of filter were held back to keep pace."
        )
        self.api = api
        self.pods = PodTimes()

    def observe(self, verb: str, result: str, seconds: float) -> None:
        self.calls[verb, result] = self.calls.get((verb, result), 0) + 1
        self.requests.observe(seconds, verb)

    def families(
        self,
        *,
        ready: bool,
        leading: bool,
        sampled: int = 0,
        preemptions: Mapping[str, int] = NO_COUNTS,
        preempted: int = 0,
        nominations: Mapping[str, int] = NO_COUNTS,
        wakeups: int = 0,
        watch_silent_s: Mapping[str, float] = NO_COUNTS,
    ) -> list[Family]:
        """What a scrape returns. `sampled`: pods refused because not all nodes were asked about."""
        fleet, ledger = self._ledger.flush(), self._ledger
        calls = [
            (count, {"verb": verb, "result": result}) for (verb, result), count in sorted(self.calls.items())
        ]
        waiting = [pod for uid, pod in ledger.pods.items() if not pod.node and ledger.holds.of(uid) is None]
        gated = sum(bool(pod.gates) for pod in waiting)
        results = [(nominations.get(each, 0), {"result": each}) for each in NOMINATION_RESULTS]
        made = [(count, {"result": each}) for each, count in sorted(preemptions.items())]
        times = (self.requests, self.pauses, self.pods.queue, self.pods.watch_delay, self.api)
        silent = Family(
            "gpuslice_extender_watch_silent_seconds",
            MetricKind.GAUGE,
            "Since a watch said anything; the API server sends a bookmark each minute.",
            [(labels({"resource": name}), round(seconds, 3)) for name, seconds in watch_silent_s.items()],
        )
        unshown_s = round(self.pods.longest_unshown_s(), 3)
        return [
            _counter("requests_total", "Calls by verb and result.", calls),
            *(each.family() for each in times),
            _counter(
                "asked_while_not_ready_total",
                "Calls to a replica that does not lead, or has not read the cluster.",
                self.asked_while_not_ready,
            ),
            _counter(
                "sampled_pods_total",
                "Pods refused on the sample of nodes that kube-scheduler showed, though another would do.",
                sampled,
            ),
            _counter("preemptions_total", "Preemption attempts by result.", made),
            _counter("preempted_pods_total", "Pods evicted for others.", preempted),
            _counter("nominations_total", "Nodes nominated for waiting pods, by result.", results),
            _counter("wakeups_total", "Times all waiting pods were woken for one that fits.", wakeups),
            silent,
            _gauge("watch_late_seconds", "Age of the oldest binding that no watch has shown.", unshown_s),
            _gauge("units", "Units of all usable cards.", int(fleet.size.sum())),
            _gauge("free_units", "Units nobody holds.", int(fleet.left.sum())),
            _gauge("nodes", "Nodes with shared cards.", len(fleet.row_of)),
            _gauge("pods", "Living pods that ask for GPU memory.", len(ledger.pods)),
            _gauge("waiting_pods", "Pods of these that wait for kube-scheduler.", len(waiting) - gated),
            _gauge("gated_pods", "Pods of these that wait behind a scheduling gate.", gated),
            _gauge("assumed_pods", "Placements the API server has not shown yet.", len(ledger.assumed())),
            _gauge("nominated_pods", "Waiting pods that cards are kept for.", len(ledger.holds.reserved)),
            _gauge("ready", "1 when calls are answered from a full ledger.", int(ready)),
            _gauge("leader", "1 on the replica that may bind.", int(leading)),
        ]


class PodTimes(Subscriber):
    """When each pod was asked about, bound, and shown bound: how long pods queue, how far the watch lags."""

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

    def decided(self, verdict: FilterVerdict) -> None:
        if verdict.pod.request is not None and not verdict.error:
            _remember(self._asked, verdict.pod.uid, self._clock())

    def bound(self, result: BindResult) -> None:
        if result.why_not or (asked_s := self._asked.pop(result.uid, None)) is None:
            return  # also after a repeated bind, or one without a filter before it
        now_s = self._clock()
        self.queue.observe(now_s - asked_s)
        if result.pod is not None and result.pod.node:  # the watch has shown it already
            self.watch_delay.observe(0.0)
        else:
            _remember(self._unshown, result.uid, now_s)

    def pod_changed(self, news: PodNews, before: Hold | None) -> None:
        if news.view.node and (bound_s := self._unshown.pop(news.view.uid, None)) is not None:
            self.watch_delay.observe(self._clock() - bound_s)

    def pod_gone(self, uid: str, before: Hold | None) -> None:
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


Samples = Iterable[tuple[float, Mapping[str, str]]]


def _counter(name: str, help: str, samples: float | Samples) -> Family:
    return _family(name, MetricKind.COUNTER, help, samples)


def _gauge(name: str, help: str, value: float) -> Family:
    return _family(name, MetricKind.GAUGE, help, value)


def _family(name: str, kind: MetricKind, help: str, samples: float | Samples) -> Family:
    family = Family(f"gpuslice_extender_{name}", kind, help)
    for value, names in [(samples, {})] if isinstance(samples, int | float) else samples:
        family.add(value, labels(names)) if names else family.add(value)
    return family
