"""Spans as OTLP's JSON has them, and the trace context that goes from process to process with a pod.

Sources: opentelemetry-proto's trace.proto in its JSON mapping (ids in hexadecimal), W3C Trace Context.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

SERVER = 2  # the kind of a span that answers somebody
ERROR = 2  # the code of a status
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")

Attributes = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class SpanContext:
    """One span's place in a trace."""

    trace_id: str
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time. `error`: why it failed, "" where it did not. Times since the epoch."""

    name: str
    context: SpanContext
    began_ns: int
    ended_ns: int
    parent: SpanContext | None = None
    attributes: Attributes = field(default_factory=dict)
    error: str = ""


def trace_of(uid: str) -> str:
    """The trace of a pod: its uid, so that all who see the pod agree on it."""
    digits = uid.replace("-", "").lower()
    return digits if re.fullmatch(r"[0-9a-f]{32}", digits) else secrets.token_hex(16)


def parsed(traceparent: str) -> SpanContext | None:
    """What an annotation says; None for anything that is no trace context."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or not int(found[1], 16) or not int(found[2], 16):
        return None
    return SpanContext(found[1], found[2])


def as_otlp(spans: Iterable[Span], resource: Attributes, version: str) -> dict[str, Any]:
    """An ExportTraceServiceRequest."""
    scope = {"name": "gpuslice", "version": version}
    found = [
        {
            "traceId": span.context.trace_id,
            "spanId": span.context.span_id,
            "parentSpanId": span.parent.span_id if span.parent else "",
            "name": span.name,
            "kind": SERVER,
            "startTimeUnixNano": str(span.began_ns),
            "endTimeUnixNano": str(span.ended_ns),
            "attributes": _pairs(span.attributes),
            "status": {"code": ERROR, "message": span.error} if span.error else {},
        }
        for span in spans
    ]
    scoped = [{"scope": scope, "spans": found}]
    return {"resourceSpans": [{"resource": {"attributes": _pairs(resource)}, "scopeSpans": scoped}]}


def _pairs(attributes: Attributes) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        for key, value in attributes.items()
    ]
