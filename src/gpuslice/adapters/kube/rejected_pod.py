"""A pod that kubelet did not let start, as its status shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.slim import SlimPod
from gpuslice.core.contract import AMOUNT_NAMES
from gpuslice.core.rejections import KubeletRefusal, refusal_of

REFUSED_START = b"PreStartContainer"


def refusal_in(pod: objects.Pod | SlimPod) -> KubeletRefusal | None:
    """kubelet's refusal; None if it let the pod start, or has not said anything yet."""
    status = pod.status
    if status.phase != "Failed" and not (isinstance(pod, SlimPod) and _may_be_refused(pod)):
        return None
    found = refusal_of(status.phase, status.reason, status.message, list(_containers(pod)))
    return found and replace(found, asks_others=_asks_others(pod), at_s=_seconds(status.start_time))


def _may_be_refused(pod: SlimPod) -> bool:
    """Without reading its containers, since nearly no pod is."""
    status = pod.status
    both = status.container_statuses, status.init_container_statuses
    return status.phase == "Pending" and any(REFUSED_START in memoryview(each).tobytes() for each in both)


def _containers(pod: objects.Pod | SlimPod) -> Iterator[Mapping[str, Any]]:
    for raw in (pod.status.init_container_statuses, pod.status.container_statuses):
        found = msgspec.json.decode(raw) if isinstance(raw, msgspec.Raw) and memoryview(raw) else raw
        for each in found if isinstance(found, list) else ():
            shown = each if isinstance(each, dict) else msgspec.to_builtins(each)
            if isinstance(shown, dict):
                yield shown


def _asks_others(pod: objects.Pod | SlimPod) -> bool:
    """Whether it asks for devices of other plugins than ours."""
    spec = pod.spec
    limits = [
        name
        for each in (*(spec.init_containers or ()), *spec.containers)
        for name in (each.resources.limits or () if each.resources is not None else ())
    ]
    return any("/" in name and name not in AMOUNT_NAMES for name in limits)


def _seconds(text: str | None) -> float:
    """Since the epoch; 0 if it is no time."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return 0.0
