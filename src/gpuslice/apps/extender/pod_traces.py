"""The extender's spans of a pod: filter, then bind, whose context is passed on in an annotation."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from gpuslice.adapters.otlp.exporter import SpanExporter
from gpuslice.adapters.otlp.spans import Span, SpanContext, trace_of
from gpuslice.core.contract import ANN_TRACEPARENT

REMEMBERED = 10_000  # pods


class PodTraces:
    """Does nothing without an exporter."""

    def __init__(self, exporter: SpanExporter | None, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._exporter = exporter
        self._now_ns = now_ns
        self._filtered: OrderedDict[str, SpanContext] = OrderedDict()  # by uid, of the last filter
        self._binding: dict[str, SpanContext] = {}  # by uid, while the bind is in progress

    def filtered(self, uid: str, key: str, took_s: float, passed: int, error: str) -> None:
        """filter has answered how many nodes fit."""
        if self._exporter is None or not uid:
            return
        context = SpanContext(trace_of(uid))
        self._filtered[uid] = context
        self._filtered.move_to_end(uid)
        if len(self._filtered) > REMEMBERED:
            self._filtered.popitem(last=False)
        about = {**_who(uid, key), "gpuslice.nodes.passed": passed}
        now_ns = self._now_ns()
        self._exporter.add(
            Span("filter", context, now_ns - int(took_s * 1e9), now_ns, attributes=about, error=error)
        )

    def bind_begins(self, uid: str) -> None:
        if self._exporter is not None:
            filtered = self._filtered.get(uid)
            self._binding[uid] = SpanContext(filtered.trace_id if filtered else trace_of(uid))

    def annotations(self, uid: str) -> dict[str, str]:
        """The annotation that lets the node's agent continue the trace."""
        context = self._binding.get(uid)
        return {ANN_TRACEPARENT: context.traceparent} if context else {}

    def bound(self, uid: str, key: str, node: str, took_s: float, error: str) -> None:
        """The bind has ended."""
        context = self._binding.pop(uid, None)
        if self._exporter is None or context is None:
            return
        about = {**_who(uid, key), "k8s.node.name": node}
        now_ns = self._now_ns()
        parent = self._filtered.get(uid) if error else self._filtered.pop(uid, None)
        began_ns = now_ns - int(took_s * 1e9)
        self._exporter.add(Span("bind", context, began_ns, now_ns, parent, about, error))


def _who(uid: str, key: str) -> dict[str, str | int]:
    namespace, _, name = key.partition("/")
    return {"k8s.pod.uid": uid, "k8s.namespace.name": namespace, "k8s.pod.name": name}
