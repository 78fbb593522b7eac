"""What is wrong with a workload: its selector, its template, and what may not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simcluster.cluster.errors import Cause
from simcluster.cluster.problem import forbidden_value, immutable, invalid_value, required, unsupported
from simcluster.cluster.request import Object
from simcluster.cluster.selector import selects
from simcluster.cluster.validation_pods import check_spec

_STATEFUL_SET_MAY_CHANGE = (
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
)


def _check_workload(obj: Object) -> Iterator[Cause]:
    spec = obj["spec"]
    yield from _not_negative(spec, "replicas", "minReadySeconds", "revisionHistoryLimit")
    selector = spec.get("selector")
    labels = (spec["template"].get("metadata") or {}).get("labels") or {}
    if selector is None:
        yield required("spec.selector")
    elif not selector.get("matchLabels") and not selector.get("matchExpressions"):
        yield invalid_value("spec.selector", selector, "empty selector is invalid for deployment")
    elif not selects(selector, labels):
        text = "`selector` does not match template `labels`"
        yield invalid_value("spec.template.metadata.labels", labels, text)
    yield from check_spec(spec["template"]["spec"], "spec.template.spec")
    policy = spec["template"]["spec"].get("restartPolicy")
    if policy != "Always":
        yield unsupported("spec.template.spec.restartPolicy", policy, ("Always",))


def _not_negative(spec: Object, *fields: str) -> Iterator[Cause]:
    for field in fields:
        if spec.get(field, 0) < 0:
            yield invalid_value(f"spec.{field}", spec[field], "must be greater than or equal to 0")


def _check_stateful_set(obj: Object) -> Iterator[Cause]:
    yield from _check_workload(obj)
    policy = obj["spec"].get("podManagementPolicy")
    if policy not in ("OrderedReady", "Parallel"):
        text = "must be 'OrderedReady' or 'Parallel'"
        yield invalid_value("spec.podManagementPolicy", policy, text)
    _type = obj["spec"]["updateStrategy"]["type"]
    if _type not in ("RollingUpdate", "OnDelete"):
        yield invalid_value(
            "spec.updateStrategy", obj["spec"]["updateStrategy"], "must be 'RollingUpdate' or 'OnDelete'"
        )


def _check_deployment(obj: Object) -> Iterator[Cause]:
    yield from _check_workload(obj)
    strategy = obj["spec"]["strategy"]
    if strategy["type"] not in ("Recreate", "RollingUpdate"):
        yield unsupported("spec.strategy.type", strategy["type"], ("Recreate", "RollingUpdate"))
    if strategy["type"] == "Recreate" and strategy.get("rollingUpdate"):
        text = "may not be specified when strategy `type` is 'Recreate'"
        yield forbidden_value("spec.strategy.rollingUpdate", text)


def _check_job(obj: Object) -> Iterator[Cause]:
    spec = obj["spec"]
    yield from _not_negative(spec, "parallelism", "completions", "backoffLimit", "ttlSecondsAfterFinished")
    yield from check_spec(spec["template"]["spec"], "spec.template.spec")
    policy = spec["template"]["spec"].get("restartPolicy")
    if policy == "Always":
        yield required("spec.template.spec.restartPolicy", 'valid values: "OnFailure", "Never"')
    if spec.get("completionMode") == "Indexed" and "completions" not in spec:
        yield required("spec.completions", "when completion mode is Indexed")


def _same_selector(old: Object, new: Object) -> Iterator[Cause]:
    if old["spec"].get("selector") != new["spec"].get("selector"):
        yield immutable("spec.selector", new["spec"].get("selector"))


def _stateful_set_update(old: Object, new: Object) -> Iterator[Cause]:
    before = {key: value for key, value in old["spec"].items() if key not in _STATEFUL_SET_MAY_CHANGE}
    after = {key: value for key, value in new["spec"].items() if key not in _STATEFUL_SET_MAY_CHANGE}
    if before != after:
        listed = ", ".join(f"'{name}'" for name in _STATEFUL_SET_MAY_CHANGE[:-1])
        text = (
            f"updates to statefulset spec for fields other than {listed} and 'minReadySeconds' are forbidden"
        )
        yield forbidden_value("spec", text)


def _job_update(old: Object, new: Object) -> Iterator[Cause]:
    fields = ["selector", "template", "completionMode"]
    if new["spec"].get("completionMode") != "Indexed":
        fields.append("completions")
    if old["spec"].get("suspend"):
        fields.remove("template")
    for field in fields:
        if old["spec"].get(field) != new["spec"].get(field):
            yield immutable(f"spec.{field}", new["spec"].get(field))


CHECKS: dict[str, Callable[[Object], Iterator[Cause]]] = {
    "deployments.apps": _check_deployment,
    "replicasets.apps": _check_workload,
    "statefulsets.apps": _check_stateful_set,
    "daemonsets.apps": _check_workload,
    "jobs.batch": _check_job,
}
UPDATE_CHECKS: dict[str, Callable[[Object, Object], Iterator[Cause]]] = {
    "deployments.apps": _same_selector,
    "replicasets.apps": _same_selector,
    "statefulsets.apps": _stateful_set_update,
    "daemonsets.apps": _same_selector,
    "jobs.batch": _job_update,
}
