"""Events exist in two groups: stored as core/v1, shown and accepted as events.k8s.io/v1 too."""

from __future__ import annotations

from simcluster.cluster.request import Object

# core/v1 name -> events.k8s.io/v1 name, where they differ
_RENAMED = {
    "involvedObject": "regarding",
    "message": "note",
    "reportingComponent": "reportingController",
    "source": "deprecatedSource",
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
}
_BACK = {new: old for old, new in _RENAMED.items()}


def to_events_group(event: Object) -> Object:
    return {_RENAMED.get(key, key): value for key, value in event.items()}


def to_core(event: Object) -> Object:
    return {_BACK.get(key, key): value for key, value in event.items()}
