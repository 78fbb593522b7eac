"""Fields the API server fills in when a client leaves them out, as far as others rely on them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from simcluster.cluster.amounts import quality
from simcluster.cluster.limit_range import complete_limits
from simcluster.cluster.request import Object

_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def apply_defaults(store: str, obj: Object) -> None:
    """Fills in ``obj`` in place; a second time changes nothing."""
    if default := _DEFAULTS.get(store):
        default(obj)


def _set(obj: Object, **values: Any) -> None:
    for key, value in values.items():
        obj.setdefault(key, value)


def _pod(pod: Object) -> None:
    spec = pod.setdefault("spec", {})
    pod_spec_defaults(spec)
    _set(spec, enableServiceLinks=True)
    for container in spec.get("ephemeralContainers") or []:
        _container(container, host_network=False)
    for container in _containers(spec):
        resources = container["resources"]
        if limits := resources.get("limits"):
            resources["requests"] = limits | (resources.get("requests") or {})
    status = pod.setdefault("status", {})
    _set(status, phase="Pending", qosClass=quality(spec))


def _containers(spec: Object) -> list[Object]:
    return [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]


def pod_spec_defaults(spec: Object) -> None:
    """Defaults of a pod's or a template's spec."""
    _set(
        spec,
        dnsPolicy="ClusterFirst",
        restartPolicy="Always",
        schedulerName="default-scheduler",
        securityContext={},
        terminationGracePeriodSeconds=30,
    )
    if "serviceAccountName" in spec:
        spec["serviceAccount"] = spec["serviceAccountName"]
    elif spec.get("serviceAccount"):
        spec["serviceAccountName"] = spec["serviceAccount"]
    for container in _containers(spec):
        _container(container, bool(spec.get("hostNetwork")))
    for volume in spec.get("volumes") or []:
        if set(volume) <= {"name"}:
            volume["emptyDir"] = {}
        for kind in ("secret", "configMap", "projected", "downwardAPI"):
            if kind in volume:
                _set(volume[kind], defaultMode=420)
        if "hostPath" in volume:
            _set(volume["hostPath"], type="")


def _container(container: Object, host_network: bool) -> None:
    image = container.get("image", "")
    last = image.rsplit("/", 1)[-1]
    tag = last.partition(":")[2]
    _set(
        container,
        imagePullPolicy="Always" if "@" not in last and tag in ("", "latest") else "IfNotPresent",
        resources={},
        terminationMessagePath="/dev/termination-log",
        terminationMessagePolicy="File",
    )
    for port in container.get("ports") or []:
        _set(port, protocol="TCP")
        if host_network:
            _set(port, hostPort=port.get("containerPort"))
    for probe in _PROBES:
        if probe in container:
            found = container[probe]
            _set(found, timeoutSeconds=1, periodSeconds=10, successThreshold=1, failureThreshold=3)
            if "httpGet" in found:
                _set(found["httpGet"], path="/", scheme="HTTP")
    for variable in container.get("env") or []:
        reference = (variable.get("valueFrom") or {}).get("fieldRef")
        if reference:
            _set(reference, apiVersion="v1")


def _template(template: Object) -> None:
    template.setdefault("metadata", {})
    pod_spec_defaults(template.setdefault("spec", {}))


def _deployment(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    _set(spec, replicas=1, revisionHistoryLimit=10, progressDeadlineSeconds=600)
    strategy = spec.setdefault("strategy", {})
    _set(strategy, type="RollingUpdate")
    if strategy["type"] == "RollingUpdate":
        _set(strategy.setdefault("rollingUpdate", {}), maxSurge="25%", maxUnavailable="25%")
    _template(spec.setdefault("template", {}))


def _replica_set(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    _set(spec, replicas=1)
    _template(spec.setdefault("template", {}))


def _stateful_set(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    _set(spec, replicas=1, podManagementPolicy="OrderedReady", revisionHistoryLimit=10)
    retention = spec.setdefault("persistentVolumeClaimRetentionPolicy", {})
    _set(retention, whenDeleted="Retain", whenScaled="Retain")
    strategy = spec.setdefault("updateStrategy", {})
    _set(strategy, type="RollingUpdate")
    if strategy["type"] == "RollingUpdate":
        _set(strategy.setdefault("rollingUpdate", {}), partition=0)
    _template(spec.setdefault("template", {}))


def _daemon_set(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    _set(spec, revisionHistoryLimit=10)
    strategy = spec.setdefault("updateStrategy", {})
    _set(strategy, type="RollingUpdate")
    if strategy["type"] == "RollingUpdate":
        _set(strategy.setdefault("rollingUpdate", {}), maxSurge=0, maxUnavailable=1)
    _template(spec.setdefault("template", {}))


def _job(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    if "completions" not in spec and "parallelism" not in spec:
        _set(spec, completions=1, parallelism=1)
    _set(
        spec,
        parallelism=1,
        backoffLimit=6,
        completionMode="NonIndexed",
        manualSelector=False,
        podReplacementPolicy="TerminatingOrFailed",
        suspend=False,
    )
    if not spec["manualSelector"]:
        _job_identity(obj, spec)
    _template(spec.setdefault("template", {}))


def _job_identity(job: Object, spec: Object) -> None:
    """The labels that tie a job's pods to it; they need the job's uid."""
    uid = job["metadata"].get("uid")
    if not uid or "selector" in spec:
        return
    labels = spec.setdefault("template", {}).setdefault("metadata", {}).setdefault("labels", {})
    name = job["metadata"]["name"]
    labels |= {"controller-uid": uid, "job-name": name}
    labels |= {"batch.kubernetes.io/controller-uid": uid, "batch.kubernetes.io/job-name": name}
    spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
    spec["manualSelector"] = False


def _cron_job(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    _set(
        spec,
        concurrencyPolicy="Allow",
        failedJobsHistoryLimit=1,
        successfulJobsHistoryLimit=3,
        suspend=False,
    )
    _template(spec.setdefault("jobTemplate", {}).setdefault("spec", {}).setdefault("template", {}))


def _service(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    _set(spec, sessionAffinity="None", type="ClusterIP")
    if spec["type"] != "ExternalName":
        _set(spec, internalTrafficPolicy="Cluster", ipFamilies=["IPv4"], ipFamilyPolicy="SingleStack")
    if spec["type"] in ("NodePort", "LoadBalancer"):
        _set(spec, externalTrafficPolicy="Cluster")
    if spec["type"] == "LoadBalancer":
        _set(spec, allocateLoadBalancerNodePorts=True)
    for port in spec.get("ports") or []:
        _set(port, protocol="TCP", targetPort=port.get("port"))
    obj.setdefault("status", {}).setdefault("loadBalancer", {})


def _namespace(obj: Object) -> None:
    labels = obj["metadata"].setdefault("labels", {})
    labels["kubernetes.io/metadata.name"] = obj["metadata"]["name"]
    obj.setdefault("spec", {}).setdefault("finalizers", ["kubernetes"])
    obj.setdefault("status", {}).setdefault("phase", "Active")


def _secret(obj: Object) -> None:
    _set(obj, type="Opaque")
    if texts := obj.pop("stringData", None):
        data = obj.setdefault("data", {})
        data.update({key: base64.b64encode(value.encode()).decode() for key, value in texts.items()})


def _node(obj: Object) -> None:
    obj.setdefault("spec", {})
    status = obj.setdefault("status", {})
    if "capacity" in status:
        _set(status, allocatable=dict(status["capacity"]))


def _priority_class(obj: Object) -> None:
    _set(obj, preemptionPolicy="PreemptLowerPriority", value=0)


def _webhooks(obj: Object) -> None:
    for hook in obj.get("webhooks") or []:
        _set(hook, failurePolicy="Fail", matchPolicy="Equivalent", timeoutSeconds=10)
        _set(hook, namespaceSelector={}, objectSelector={})
        for rule in hook.get("rules") or []:
            _set(rule, scope="*")
        service = (hook.get("clientConfig") or {}).get("service")
        if service:
            _set(service, port=443)


def _mutating(obj: Object) -> None:
    _webhooks(obj)
    for hook in obj.get("webhooks") or []:
        _set(hook, reinvocationPolicy="Never")


def _role_binding(obj: Object) -> None:
    group = "rbac.authorization.k8s.io"
    if "roleRef" in obj:
        _set(obj["roleRef"], apiGroup=group)
    for subject in obj.get("subjects") or []:
        if subject.get("kind") in ("User", "Group"):
            _set(subject, apiGroup=group)


def _policy(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    _set(spec, failurePolicy="Fail")
    _match_resources(spec.setdefault("matchConstraints", {}))


def _policy_binding(obj: Object) -> None:
    if "matchResources" in obj.setdefault("spec", {}):
        _match_resources(obj["spec"]["matchResources"])


def _match_resources(found: Object) -> None:
    _set(found, matchPolicy="Equivalent", namespaceSelector={}, objectSelector={})
    for rule in found.get("resourceRules") or []:
        _set(rule, scope="*")


def _event(obj: Object) -> None:
    _set(obj, reportingComponent="", reportingInstance="", type="Normal", source={})


def _endpoint_slice(obj: Object) -> None:
    for port in obj.get("ports") or []:
        _set(port, name="", protocol="TCP")


def _limit_range(obj: Object) -> None:
    for limits in (obj.get("spec") or {}).get("limits") or []:
        complete_limits(limits)


def _device_requests(spec: Object) -> None:
    for request in (spec.get("devices") or {}).get("requests") or []:
        for each in filter(None, [request.get("exactly"), *(request.get("firstAvailable") or [])]):
            _set(each, allocationMode="ExactCount")
            if each["allocationMode"] == "ExactCount":
                _set(each, count=1)


def _resource_claim(obj: Object) -> None:
    _device_requests(obj.get("spec") or {})


def _resource_claim_template(obj: Object) -> None:
    _device_requests((obj.get("spec") or {}).get("spec") or {})


_DEFAULTS: dict[str, Callable[[Object], None]] = {
    "pods": _pod,
    "deployments.apps": _deployment,
    "replicasets.apps": _replica_set,
    "statefulsets.apps": _stateful_set,
    "daemonsets.apps": _daemon_set,
    "jobs.batch": _job,
    "cronjobs.batch": _cron_job,
    "services": _service,
    "namespaces": _namespace,
    "secrets": _secret,
    "nodes": _node,
    "events": _event,
    "limitranges": _limit_range,
    "endpointslices.discovery.k8s.io": _endpoint_slice,
    "priorityclasses.scheduling.k8s.io": _priority_class,
    "mutatingadmissionpolicies.admissionregistration.k8s.io": _policy,
    "mutatingadmissionpolicybindings.admissionregistration.k8s.io": _policy_binding,
    "validatingadmissionpolicies.admissionregistration.k8s.io": _policy,
    "validatingadmissionpolicybindings.admissionregistration.k8s.io": _policy_binding,
    "mutatingwebhookconfigurations.admissionregistration.k8s.io": _mutating,
    "validatingwebhookconfigurations.admissionregistration.k8s.io": _webhooks,
    "resourceclaims.resource.k8s.io": _resource_claim,
    "resourceclaimtemplates.resource.k8s.io": _resource_claim_template,
    "rolebindings.rbac.authorization.k8s.io": _role_binding,
    "clusterrolebindings.rbac.authorization.k8s.io": _role_binding,
}
