"""Who records what became of each pod: Events for its owner, spans, and the last binds."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpuslice.adapters.kube.events import EventRecorder, pod_reference
from gpuslice.adapters.kube.followed_pod import PodNews
from gpuslice.adapters.otlp.exporter import SpanExporter
from gpuslice.adapters.otlp.spans import Span, SpanContext, trace_of
from gpuslice.apps.extender.subscriber import BindResult, FilterVerdict, Subscriber
from gpuslice.core.contract import ANN_TRACEPARENT
from gpuslice.core.hold import Hold
from gpuslice.core.model import Pod

_log = logging.getLogger(__name__)

REMEMBERED = 10_000  # pods of each kind; the oldest are forgotten
KEPT_DECISIONS = 1000
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3000.0
"""Between two events for one reason. An API server forgets events after an hour."""


@dataclass(slots=True)
class _Written:
    message: str
    at_s: float
    pause_s: float = FIRST_PAUSE_S


class PodEvents(Subscriber):
    """Writes Events on pods in the background: at once for a new reason, and rarely for one that lasts.

    The same words are repeated only before the API server forgets them, others after a growing pause: what
    is free on a full cluster changes with every pod, and that is no news to a pod that waits.
    """

    def __init__(self, recorder: EventRecorder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._clock = clock
        self._written: OrderedDict[tuple[str, str], _Written] = OrderedDict()  # by pod and reason

    def pod_changed(self, news: PodNews, before: Hold | None) -> None:
        pod = news.view
        if pod.problem and not pod.finished and self.warn(pod, "GPURequestUnreadable", pod.problem):
            _log.warning("pod's annotations are unreadable", extra={"pod": pod.key, "problem": pod.problem})

    def decided(self, verdict: FilterVerdict) -> None:
        if verdict.why_not and verdict.is_known:
            self.warn(verdict.pod, "InsufficientGPU", verdict.why_not)

    def bound(self, result: BindResult) -> None:
        if result.why_not and result.pod is not None and result.pod.key == result.key:
            self.warn(result.pod, "GPUBindFailed", result.why_not)

    def note(self, pod: Pod, reason: str, message: str) -> None:
        """Tell the owner of this pod what was done."""
        self._recorder.add(pod_reference(pod.namespace, pod.name, pod.uid), reason, message)

    def warn(self, pod: Pod, reason: str, message: str) -> bool:
        """Tell the owner of this pod what is wrong, by one CamelCase word and a sentence; False if known."""
        key, now_s = (pod.uid or pod.key, reason), self._clock()
        written = self._written.get(key)
        if written is None:
            self._written[key] = _Written(message, now_s)
            if len(self._written) > REMEMBERED:
                self._written.popitem(last=False)
        else:
            pause_s = LONGEST_PAUSE_S if message == written.message else written.pause_s
            if now_s < written.at_s + pause_s:
                return False
            self._written[key] = _Written(message, now_s, min(LONGEST_PAUSE_S, 2 * written.pause_s))
        self._recorder.add(pod_reference(pod.namespace, pod.name, pod.uid), reason, message, type="Warning")
        return True


class PodTraces(Subscriber):
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
        about = {**_who(uid, verdict.pod.key), "gpuslice.nodes.passed": len(verdict.passed)}
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


class Decisions(Subscriber):
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
