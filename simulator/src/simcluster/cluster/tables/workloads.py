"""Rows of the workload controllers' kinds."""

from __future__ import annotations

from typing import Any

from simcluster.cluster.moment import age, human_duration, parse_time
from simcluster.cluster.request import Object
from simcluster.cluster.selector import selector_text
from simcluster.cluster.tables.column import Printer, containers, created, name, plain_selector, printer


def _status(obj: Object, *fields: str) -> list[int]:
    status = obj.get("status") or {}
    return [status.get(field, 0) for field in fields]


def _template(obj: Object) -> tuple[str, str]:
    return containers(obj["spec"]["template"].get("spec") or {})


def _deployment_row(obj: Object, now_s: float) -> list[Any]:
    ready, updated, available = _status(obj, "readyReplicas", "updatedReplicas", "availableReplicas")
    return [
        name(obj),
        f"{ready}/{obj['spec'].get('replicas', 1)}",
        updated,
        available,
        age(created(obj), now_s),
        *_template(obj),
        selector_text(obj["spec"].get("selector")),
    ]


def _replica_set_row(obj: Object, now_s: float) -> list[Any]:
    return [
        name(obj),
        obj["spec"].get("replicas", 1),
        *_status(obj, "replicas", "readyReplicas"),
        age(created(obj), now_s),
        *_template(obj),
        selector_text(obj["spec"].get("selector")),
    ]


def _replication_controller_row(obj: Object, now_s: float) -> list[Any]:
    return [
        name(obj),
        obj["spec"].get("replicas", 1),
        *_status(obj, "replicas", "readyReplicas"),
        age(created(obj), now_s),
        *_template(obj),
        plain_selector(obj["spec"].get("selector")),
    ]


def _stateful_set_row(obj: Object, now_s: float) -> list[Any]:
    (ready,) = _status(obj, "readyReplicas")
    return [name(obj), f"{ready}/{obj['spec'].get('replicas', 1)}", age(created(obj), now_s), *_template(obj)]


def _daemon_set_row(obj: Object, now_s: float) -> list[Any]:
    counts = _status(
        obj,
        "desiredNumberScheduled",
        "currentNumberScheduled",
        "numberReady",
        "updatedNumberScheduled",
        "numberAvailable",
    )
    return [
        name(obj),
        *counts,
        plain_selector(obj["spec"]["template"]["spec"].get("nodeSelector")),
        age(created(obj), now_s),
        *_template(obj),
        selector_text(obj["spec"].get("selector")),
    ]


def _job_row(obj: Object, now_s: float) -> list[Any]:
    # ``1/3`` of the completions asked for, or ``3/1 of 3`` when only the parallelism is set
    (succeeded,) = _status(obj, "succeeded")
    completions, parallelism = obj["spec"].get("completions"), obj["spec"].get("parallelism") or 0
    if completions is not None:
        job_completions = f"{succeeded}/{completions}"
    else:
        job_completions = f"{succeeded}/1 of {parallelism}" if parallelism > 1 else f"{succeeded}/1"
    status = obj.get("status") or {}
    if not status.get("startTime"):
        job_duration = ""
    else:
        finished = status.get("completionTime")
        end_s = parse_time(finished) if finished else now_s
        job_duration = human_duration(end_s - parse_time(status["startTime"]))
    return [
        name(obj),
        _job_status(obj),
        job_completions,
        job_duration,
        age(created(obj), now_s),
        *_template(obj),
        selector_text(obj["spec"].get("selector")),
    ]


def _job_status(job: Object) -> str:
    held = {c["type"] for c in (job.get("status") or {}).get("conditions") or [] if c["status"] == "True"}
    for kind, shown in (("Complete", "Complete"), ("Failed", "Failed")):
        if kind in held:
            return shown
    if job["metadata"].get("deletionTimestamp"):
        return "Terminating"
    for kind in ("Suspended", "FailureTarget", "SuccessCriteriaMet"):
        if kind in held:
            return kind
    return "Running"


def _cron_job_row(obj: Object, now_s: float) -> list[Any]:
    spec, status = obj["spec"], obj.get("status") or {}
    last = status.get("lastScheduleTime")
    return [
        name(obj),
        spec.get("schedule", ""),
        spec.get("timeZone") or "<none>",
        str(bool(spec.get("suspend"))),
        len(status.get("active") or []),
        age(last, now_s) if last else "<none>",
        age(created(obj), now_s),
        *containers(spec["jobTemplate"]["spec"]["template"].get("spec") or {}),
        selector_text(spec["jobTemplate"]["spec"].get("selector")),
    ]


def _autoscaler_row(obj: Object, now_s: float) -> list[Any]:
    spec, status = obj["spec"], obj.get("status") or {}
    reference = spec.get("scaleTargetRef") or {}
    return [
        name(obj),
        f"{reference.get('kind', '')}/{reference.get('name', '')}",
        "<unknown>",
        spec.get("minReplicas", "<unset>"),
        spec.get("maxReplicas", 0),
        status.get("currentReplicas", 0),
        age(created(obj), now_s),
    ]


def _budget_row(obj: Object, now_s: float) -> list[Any]:
    spec = obj["spec"]
    return [
        name(obj),
        str(spec.get("minAvailable", "N/A")),
        str(spec.get("maxUnavailable", "N/A")),
        (obj.get("status") or {}).get("disruptionsAllowed", 0),
        age(created(obj), now_s),
    ]


def _revision_row(obj: Object, now_s: float) -> list[Any]:
    owners = [ref for ref in obj["metadata"].get("ownerReferences") or [] if ref.get("controller")]
    owner = owners[0] if owners else None
    group = owner["apiVersion"].partition("/")[0] if owner and "/" in owner["apiVersion"] else ""
    shown = f"{owner['kind'].lower()}{'.' if group else ''}{group}/{owner['name']}" if owner else "<none>"
    return [name(obj), shown, obj.get("revision", 0), age(created(obj), now_s)]


_TEMPLATE = "Containers+, Images+, Selector+"

WORKLOADS: dict[str, Printer] = {
    "deployments.apps": printer(f"Name, Ready, Up-to-date#, Available#, Age, {_TEMPLATE}", _deployment_row),
    "replicasets.apps": printer(f"Name, Desired#, Current#, Ready#, Age, {_TEMPLATE}", _replica_set_row),
    "replicationcontrollers": printer(
        f"Name, Desired#, Current#, Ready#, Age, {_TEMPLATE}", _replication_controller_row
    ),
    "statefulsets.apps": printer("Name, Ready, Age, Containers+, Images+", _stateful_set_row),
    "daemonsets.apps": printer(
        f"Name, Desired#, Current#, Ready#, Up-to-date#, Available#, Node Selector, Age, {_TEMPLATE}",
        _daemon_set_row,
    ),
    "jobs.batch": printer(f"Name, Status, Completions, Duration, Age, {_TEMPLATE}", _job_row),
    "cronjobs.batch": printer(
        f"Name, Schedule, Timezone, Suspend, Active#, Last Schedule, Age, {_TEMPLATE}", _cron_job_row
    ),
    "horizontalpodautoscalers.autoscaling": printer(
        "Name, Reference, Targets, MinPods, MaxPods, Replicas#, Age", _autoscaler_row
    ),
    "poddisruptionbudgets.policy": printer(
        "Name, Min Available, Max Unavailable, Allowed Disruptions#, Age", _budget_row
    ),
    "controllerrevisions.apps": printer("Name, Controller, Revision#, Age", _revision_row),
}
