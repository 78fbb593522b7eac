"""Counters of the process as Prometheus reads them, with what the ledger says at that moment."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass

from gpuslice.adapters.kube.http import NO_STRINGS, ApiResponse
from gpuslice.adapters.kube.transport import Transport
from gpuslice.adapters.web.exposition import Family, MetricKind, labels
from gpuslice.core.ledger import Ledger

NO_COUNTS: Mapping[str, int] = {}
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
NOMINATION_RESULTS = ("used", "late", "missed", "withdrawn")


@dataclass(slots=True)
class ApiTimes:
    """Requests to the API server and the seconds they took; watches are not counted."""

    requests: int = 0
    seconds: float = 0.0


class TimedTransport:
    """A transport that counts what goes through it: what a bind takes beside that is our own work."""

    def __init__(self, inner: Transport, times: ApiTimes) -> None:
        self._inner = inner
        self._times = times

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = NO_STRINGS,
        headers: Mapping[str, str] = NO_STRINGS,
        body: bytes = b"",
    ) -> ApiResponse:
        began = time.perf_counter()
        try:
            return await self._inner.request(method, path, query=query, headers=headers, body=body)
        finally:
            self._times.requests += 1
            self._times.seconds += time.perf_counter() - began

    def stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = NO_STRINGS,
        headers: Mapping[str, str] = NO_STRINGS,
    ) -> AsyncGenerator[bytes]:
        return self._inner.stream(method, path, query=query, headers=headers)


class Metrics:
    """Counters of the process; `families` adds what the ledger says now."""

    def __init__(self, ledger: Ledger, api_times: ApiTimes) -> None:
        self._ledger = ledger
        self._api_times = api_times
        self.calls: dict[tuple[str, str], int] = {}  # (verb, result)
        self.seconds: dict[str, float] = {}
        self.times: dict[str, list[int]] = {}  # by verb, calls within each of the bounds and beyond
        self.asked_while_not_ready = 0

    def observe(self, verb: str, result: str, seconds: float) -> None:
        self.calls[verb, result] = self.calls.get((verb, result), 0) + 1
        self.seconds[verb] = self.seconds.get(verb, 0.0) + seconds
        counts = self.times.setdefault(verb, [0] * (len(BOUNDS_S) + 1))
        counts[bisect_left(BOUNDS_S, seconds)] += 1

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
    ) -> list[Family]:
        """What a scrape gets. `sampled`: pods refused because not all nodes were asked about."""
        fleet, ledger = self._ledger.flush(), self._ledger
        calls = [
            (count, {"verb": verb, "result": result}) for (verb, result), count in sorted(self.calls.items())
        ]
        times = Family("gpuslice_extender_request_seconds", MetricKind.HISTOGRAM, "Time of a call.")
        for verb, counts in sorted(self.times.items()):
            times.add_histogram(BOUNDS_S, counts, self.seconds[verb], verb=verb)
        waiting = sum(not pod.node and ledger.allocation(uid) is None for uid, pod in ledger.pods.items())
        results = [(nominations.get(each, 0), {"result": each}) for each in NOMINATION_RESULTS]
        made = [(count, {"result": each}) for each, count in sorted(preemptions.items())]
        return [
            _counter("requests_total", "Calls by verb and result.", calls),
            times,
            _counter(
                "asked_while_not_ready_total",
                "Calls to a replica that does not lead, or has not read the cluster.",
                self.asked_while_not_ready,
            ),
            _counter("api_requests_total", "Requests to the API server.", self._api_times.requests),
            _counter("api_seconds_total", "Time waited for the API server.", self._api_times.seconds),
            _counter(
                "sampled_pods_total",
                "Pods refused on the sample of nodes that kube-scheduler showed, though another would do.",
                sampled,
            ),
            _counter("preemptions_total", "Preemption attempts by result.", made),
            _counter("preempted_pods_total", "Pods evicted for others.", preempted),
            _counter("nominations_total", "Nodes nominated for waiting pods, by result.", results),
            _counter("wakeups_total", "Times all waiting pods were woken for one that fits.", wakeups),
            _gauge("units", "Units of all usable cards.", int(fleet.size.sum())),
            _gauge("free_units", "Units nobody holds.", int(fleet.left.sum())),
            _gauge("nodes", "Nodes with shared cards.", len(fleet.row_of)),
            _gauge("pods", "Living pods that ask for GPU memory.", len(ledger.pods)),
            _gauge("waiting_pods", "Pods of these that hold nothing yet.", waiting),
            _gauge("assumed_pods", "Placements the API server has not shown yet.", len(ledger.assumed())),
            _gauge("nominated_pods", "Waiting pods that cards are kept for.", len(ledger.nominations)),
            _gauge("ready", "1 when calls are answered from a full ledger.", int(ready)),
            _gauge("leader", "1 on the replica that may bind.", int(leading)),
        ]


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
