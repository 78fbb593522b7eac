"""From containers to the status of a pod: phase and conditions by kubelet's rules (1.36), without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpuslice.core.model import ContainerKind
from simcluster.cluster.amounts import Object
from simcluster.kubelet.records import ContainerRecord, RunningState, TerminatedState, WaitingState

Conditions = Mapping[str, Mapping[str, Any]]
_REPORTED = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady")


def phase_of(pod: Object, records: Sequence[ContainerRecord]) -> str:
    """Pending, Running, Succeeded or Failed."""
    policy = pod["spec"].get("restartPolicy", "Always")
    init = [one for one in records if one.kind is not ContainerKind.APP]
    apps = [one for one in records if one.kind is ContainerKind.APP]
    if (
        any(
            isinstance(one.state, TerminatedState) and one.state.exit_code != 0
            for one in init
            if one.kind is ContainerKind.INIT
        )
        and policy == "Never"
    ):
        return "Failed"
    ended = [_ended(one) for one in apps]
    if any(isinstance(one.state, WaitingState) and one.last is None for one in apps):
        return "Pending"
    # A pod has not ended before its sidecars have
    if (
        any(one is None for one in ended)
        or not apps
        or any(one.kind is ContainerKind.SIDECAR and isinstance(one.state, RunningState) for one in init)
    ):
        return "Running"
    if policy == "Always" or any(isinstance(one.state, WaitingState) for one in apps):
        return "Running"
    if all(one is not None and one.exit_code == 0 for one in ended):
        return "Succeeded"
    return "Failed" if policy == "Never" else "Running"


def final_phase(records: Iterable[ContainerRecord]) -> str:
    """For a deleted pod whose containers are gone: kubelet never leaves it Running (since 1.27)."""
    ended = [_ended(one) for one in records]
    return "Failed" if any(one is None or one.exit_code != 0 for one in ended) else "Succeeded"


def _ended(record: ContainerRecord) -> TerminatedState | None:
    """How it ended, even if it waits to be restarted; None while it runs."""
    if isinstance(record.state, RunningState):
        return None
    return record.state if isinstance(record.state, TerminatedState) else record.last


def conditions(phase: str, records: Sequence[ContainerRecord], old: Conditions, now: str) -> list[Any]:
    """The four conditions that kubelet owns, followed by those of others, unchanged."""
    fresh = {
        "PodReadyToStartContainers": {
            "status": "True" if (phase not in ("Succeeded", "Failed")) else "False"
        },
        "Initialized": _initialized(phase, records),
        "Ready": _ready(phase, records),
        "ContainersReady": _ready(phase, records),
    }
    mine = []
    for kind in _REPORTED:
        before = old.get(kind) or {}
        same = before.get("status") == fresh[kind]["status"]
        since = before["lastTransitionTime"] if same and before["lastTransitionTime"] else now
        mine.append({"type": kind, **fresh[kind], "lastProbeTime": None, "lastTransitionTime": since})
    return mine + [dict(one) for kind, one in old.items() if kind not in _REPORTED]


def _initialized(phase: str, records: Iterable[ContainerRecord]) -> dict[str, Any]:
    if phase == "Succeeded":
        return {"status": "True", "reason": "PodCompleted"}
    incomplete = [
        one.name
        for one in records
        if (one.kind is ContainerKind.INIT and not one.ready)
        or (one.kind is ContainerKind.SIDECAR and not one.started)
    ]
    if not incomplete:
        return {"status": "True"}
    return {
        "status": "False",
        "reason": "ContainersNotInitialized",
        "message": f"containers with incomplete status: [{' '.join(incomplete)}]",
    }


def _ready(phase: str, records: Iterable[ContainerRecord]) -> dict[str, Any]:
    if phase in ("Succeeded", "Failed"):
        return {"status": "False", "reason": "PodCompleted" if phase == "Succeeded" else "PodFailed"}
    unready = [one.name for one in records if one.kind is not ContainerKind.INIT and not one.ready]
    if not unready:
        return {"status": "True"}
    return {
        "status": "False",
        "reason": "ContainersNotReady",
        "message": f"containers with unready status: [{' '.join(unready)}]",
    }


def by_type(listed: Iterable[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    return {one["type"]: one for one in listed or ()}
