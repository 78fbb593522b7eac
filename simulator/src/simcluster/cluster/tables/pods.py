"""How a pod's row reads: ready containers, the reason shown as STATUS, restarts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simcluster.cluster.moment import age, human_duration, parse_time
from simcluster.cluster.request import Object
from simcluster.cluster.tables.column import created, name


@dataclass(slots=True)
class _Tally:
    """Collected over the containers of one pod."""

    reason: str
    ready: int = 0
    restarts: int = 0
    last_restart_s: float = 0.0

    def count_restart(self, status: Object) -> None:
        self.restarts += status.get("restartCount", 0)
        finished = ((status.get("lastState") or {}).get("terminated") or {}).get("finishedAt")
        if finished:
            self.last_restart_s = max(self.last_restart_s, parse_time(finished))


def pod_row(pod: Object, now_s: float) -> list[Any]:
    spec, status = pod["spec"], pod.get("status") or {}
    tally = _tally(pod)
    if tally.restarts and tally.last_restart_s:
        restarts = f"{tally.restarts} ({human_duration(now_s - tally.last_restart_s)} ago)"
    else:
        restarts = str(tally.restarts)
    sidecars = [item for item in spec.get("initContainers") or [] if item.get("restartPolicy") == "Always"]
    count = len(spec.get("containers") or []) + len(sidecars)
    gates = spec.get("readinessGates") or []
    held = [g for g in gates if _condition(status, g["conditionType"]).get("status") == "True"]
    return [
        name(pod),
        f"{tally.ready}/{count}",
        _terminating(pod, tally.reason),
        restarts,
        age(created(pod), now_s),
        status.get("podIP") or "<none>",
        spec.get("nodeName") or "<none>",
        status.get("nominatedNodeName") or "<none>",
        f"{len(held)}/{len(gates)}" if gates else "<none>",
    ]


def _tally(pod: Object) -> _Tally:
    status = pod.get("status") or {}
    tally = _Tally(status.get("reason") or status.get("phase") or "Pending")
    if _condition(status, "PodScheduled").get("reason") == "SchedulingGated":
        tally.reason = "SchedulingGated"
    initializing = _count_init(pod, tally)
    if not initializing or _condition(status, "Initialized").get("status") == "True":
        has_running = False
        for container in reversed(status.get("containerStatuses") or []):
            tally.count_restart(container)
            state = container.get("state") or {}
            if reason := (state.get("waiting") or {}).get("reason"):
                tally.reason = reason
            elif "terminated" in state:
                tally.reason = _terminated_reason(state["terminated"])
            elif container.get("ready") and "running" in state:
                has_running = True
                tally.ready += 1
        if tally.reason == "Completed" and has_running:
            tally.reason = "Running" if _condition(status, "Ready").get("status") == "True" else "NotReady"
    return tally


def _count_init(pod: Object, tally: _Tally) -> bool:
    """True while an init container has still to finish."""
    specs = {item["name"]: item for item in pod["spec"].get("initContainers") or []}
    for position, status in enumerate((pod.get("status") or {}).get("initContainerStatuses") or []):
        tally.count_restart(status)
        state = status.get("state") or {}
        terminated = state.get("terminated")
        if terminated and terminated.get("exitCode", 0) == 0:
            continue
        if specs.get(status["name"], {}).get("restartPolicy") == "Always" and status.get("started"):
            tally.ready += bool(status.get("ready"))
            continue
        count = len(specs)
        waiting = (state.get("waiting") or {}).get("reason")
        if "terminated" in state:
            init_reason = f"Init:{_terminated_reason(state['terminated'])}"
        elif waiting and waiting != "PodInitializing":
            init_reason = f"Init:{waiting}"
        else:
            init_reason = f"Init:{position}/{count}"
        tally.reason = init_reason
        return True
    return False


def _terminated_reason(terminated: Object) -> str:
    if reason := terminated.get("reason"):
        return str(reason)
    if signal := terminated.get("signal"):
        return f"Signal:{signal}"
    return f"ExitCode:{terminated.get('exitCode', 0)}"


def _terminating(pod: Object, reason: str) -> str:
    status = pod.get("status") or {}
    if not pod["metadata"].get("deletionTimestamp"):
        return reason
    if status.get("reason") == "NodeLost":
        return "Unknown"
    return reason if status.get("phase") in ("Succeeded", "Failed") else "Terminating"


def _condition(status: Object, kind: str) -> Object:
    found: Object = next((c for c in status.get("conditions") or [] if c["type"] == kind), {})
    return found
