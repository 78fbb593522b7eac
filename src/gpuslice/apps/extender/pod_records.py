"""Who records what became of each pod: Events for its owner, spans, times, and the last binds."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from gpuslice.adapters.kube.events import EventRecorder, pod_reference
from gpuslice.adapters.otlp.exporter import SpanExporter
from gpuslice.adapters.otlp.spans import Span, SpanContext, trace_of
from gpuslice.adapters.web.histogram import WAIT_S, Histogram
from gpuslice.apps.extender.verdict import BindResult, FilterVerdict, VerdictListener
from gpuslice.core.contract import ANN_TRACEPARENT
from gpuslice.core.model import Pod

_log = logging.getLogger(__name__)

REPEAT_AFTER_S = 60.0
REMEMBERED = 10_000  # pods of each kind; the oldest are forgotten
KEPT_DECISIONS = 1000


class PodEvents(VerdictListener):
    """Writes Events on pods in the background, the same text about one pod at most once a minute."""

    def __init__(self, recorder: EventRecorder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._clock = clock
        self._written: OrderedDict[tuple[str, str], float] = OrderedDict()

    def decided(self, verdict: FilterVerdict) -> None:
        if verdict.why_not and verdict.is_known:
            self.warn(verdict.pod, "InsufficientGPU", verdict.why_not)

    def bound(self, result: BindResult) -> None:
        if result.why_not and result.pod is not None and result.pod.key == result.key:
            self.warn(result.pod, "GPUBindFailed", result.why_not)

    def warn(self, pod: Pod, reason: str, message: str) -> None:
        """Tell the owner of this pod what is wrong. `reason` is one CamelCase word."""
        self._put(pod, reason, message, "Warning")

    def note(self, pod: Pod, reason: str, message: str) -> None:
        """Tell the owner of this pod what was done."""
        self._put(pod, reason, message, "Normal")

    def _put(self, pod: Pod, reason: str, message: str, kind: str) -> None:
        key, now = (pod.uid or pod.key, message), self._clock()
        if now - self._written.get(key, float("-inf")) < REPEAT_AFTER_S:
            return
        self._written[key] = now
        self._written.move_to_end(key)
        if len(self._written) > REMEMBERED:
            self._written.popitem(last=False)
        self._recorder.add(pod_reference(pod.namespace, pod.name, pod.uid), reason, message, type=kind)

    async def run(self) -> None:
        """Write events as they come, until cancelled."""
        await self._recorder.run()


class PodTraces(VerdictListener):
    """Spans of filter, then bind, whose context is passed on in an annotation. None without an exporter."""

    def __init__(self, exporter: SpanExporter | None, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._exporter = exporter
        self._now_ns = now_ns
        self._filtered: OrderedDict[str, SpanContext] = OrderedDict()  # by uid, of the last filter
        self._binding: dict[str, SpanContext] = {}  # by uid, while the bind is in progress

    def decided(self, verdict: FilterVerdict) -> None:
        uid = verdict.pod.uid
        if self._exporter is None or not uid:
            return
        context = SpanContext(trace_of(uid))
        self._filtered[uid] = context
        self._filtered.move_to_end(uid)
        if len(self._filtered) > REMEMBERED:
            self._filtered.popitem(last=False)
        about = {**_who(uid, verdict.pod.key), "gpuslice.nodes.passed": len(verdict.passing)}
        now_ns = self._now_ns()
        began_ns = now_ns - int(verdict.took_s * 1e9)
        span = Span("filter", context, began_ns, now_ns, attributes=about, error=verdict.error)
        self._exporter.add(span)

    def annotations(self, uid: str) -> dict[str, str]:
        """The annotation that lets the node's agent continue the trace of a pod that is being bound."""
        return {ANN_TRACEPARENT: self._context(uid).traceparent} if self._exporter is not None else {}

    def bound(self, result: BindResult) -> None:
        if self._exporter is None:
            return
        uid, context = result.uid, self._context(result.uid)
        del self._binding[uid]
        about = {**_who(uid, result.key), "k8s.node.name": result.node}
        now_ns = self._now_ns()
        parent = self._filtered.get(uid) if result.why_not else self._filtered.pop(uid, None)
        began_ns = now_ns - int(result.took_s * 1e9)
        self._exporter.add(Span("bind", context, began_ns, now_ns, parent, about, result.why_not))

    def _context(self, uid: str) -> SpanContext:
        if uid not in self._binding:
            filtered = self._filtered.get(uid)
            self._binding[uid] = SpanContext(filtered.trace_id if filtered else trace_of(uid))
        return self._binding[uid]


def _who(uid: str, key: str) -> dict[str, str | int]:
    namespace, _, name = key.partition("/")
    return {"k8s.pod.uid": uid, "k8s.namespace.name": namespace, "k8s.pod.name": name}


class PodTimes(VerdictListener):
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


class Decisions(VerdictListener):
    """The last binds, in the log and for ``/debug/decisions``, the latest last."""

    def __init__(self, policy: str, replica: str) -> None:
        self.latest: deque[dict[str, Any]] = deque(maxlen=KEPT_DECISIONS)
        self._policy = policy
        self._replica = replica

    def bound(self, result: BindResult) -> None:
        decision = {
            "pod": result.key,
            "uid": result.uid,
            "node": result.node,
            "cards": {str(part.card): part.units for part in result.slices},
            "policy": self._policy,
            "passed": result.passed,
            "nominated": result.pod is not None and bool(result.pod.nominated),
            "replica": self._replica,
            "seconds": round(result.took_s, 4),
            "error": result.why_not,
        }
        self.latest.append({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **decision})
        _log.info("bind decided", extra=decision)
