"""Autoscaling on a container's own share of the card: Prometheus Adapter, HPA and KEDA."""

from __future__ import annotations

from typing import Any

from gpuslice.apps.exporter import catalogue as c
from gpuslice.diagnosis.prometheus import one

PROMETHEUS = "http://kube-prometheus-stack-prometheus.monitoring.svc"
MEMORY = ("pod_gpu_memory_used_bytes", "memory_used_bytes_current")  # our name, and the vendor's
_LABELS = "{<<.LabelMatchers>>}"


def of_pod(containers: str, pod: str = "cluster, namespace, pod") -> str:
    """For each pod, what its containers have together of a card; the mean over several cards."""
    return f"avg by ({pod}) (sum by ({pod}, node, gpu_uuid) ({containers}))"


def busy_percent(chosen: str, pod: str = "namespace, pod") -> str:
    """For each pod: the percentage of the last minute in which its containers computed on its card."""
    return f"{of_pod(one(f'avg_over_time({c.SM_UTILIZATION.name}{chosen}[1m])'), pod)} * 100"


def adapter_values() -> dict[str, Any]:
    """Values of the chart prometheus-community/prometheus-adapter."""
    sm, memory = c.SM_UTILIZATION.name, c.MEMORY_USED.name
    percent = busy_percent(_LABELS, "<<.GroupBy>>")
    rules = [
        _rule(sm, "pod_gpu_utilization", percent),
        _rule(sm, "duty_cycle_current", percent),  # the vendor's name of the same value
        *(_rule(memory, name, f"sum by (<<.GroupBy>>) ({one(memory + _LABELS)})") for name in MEMORY),
        *(_of_cards(name) for name in ("temperature_celsius", "power_usage_milliwatts")),
    ]
    return {"prometheus": {"url": PROMETHEUS, "port": 9090}, "rules": {"default": False, "custom": rules}}


def _of_cards(name: str) -> dict[str, Any]:
    """The vendor's old gauges for the cards that a pod is on."""
    metric = f"nvidia_gpu_{name}"
    return _rule(metric, f"{name}_current", f"max by (<<.GroupBy>>) ({metric}{_LABELS})", "_name")


def _rule(metric: str, name: str, query: str, ending: str = "") -> dict[str, Any]:
    """`ending`: of the labels that name the pod; the vendor's are namespace_name and pod_name."""
    pods = {f"{each}{ending}": {"resource": each} for each in ("namespace", "pod")}
    return {
        "seriesQuery": f'{metric}{{namespace{ending}!="",pod{ending}!=""}}',
        "resources": {"overrides": pods},
        "name": {"as": name},
        "metricsQuery": query,
    }


def autoscaler() -> dict[str, Any]:
    """Two to four replicas, depending on how busy their share of the card is."""
    metric = {
        "metric": {"name": "pod_gpu_utilization"},
        "target": {"type": "AverageValue", "averageValue": "60"},
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "infer", "namespace": "default"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "infer"},
            "minReplicas": 1,
            "maxReplicas": 4,
            "metrics": [{"type": "Pods", "pods": metric}],
            "behavior": {
                "scaleUp": {"stabilizationWindowSeconds": 30},
                "scaleDown": {"stabilizationWindowSeconds": 300},
            },
        },
    }


def scaled_object() -> dict[str, Any]:
    """The same with KEDA, which needs no adapter.

    The threshold is compared with the mean of the known pods (`metricType: Value`). KEDA would divide a sum
    by all replicas; each missing value would then lower it, and with it the number of replicas.
    """
    there = 'namespace="default"'
    of_deployment = f'{c.CONTAINER_INFO.name}{{{there},workload_kind="Deployment",workload="infer"}}'
    busy = f"{busy_percent(f'{{{there}}}')} and on (namespace, pod) last_over_time({of_deployment}[1m])"
    trigger = {
        "serverAddress": f"{PROMETHEUS}:9090",
        "query": f"avg({busy})",
        "threshold": "60",
        "activationThreshold": "5",
        "ignoreNullValues": "false",  # no values, no change; else KEDA takes none for 0
    }
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "infer", "namespace": "default"},
        "spec": {
            "scaleTargetRef": {"name": "infer"},
            "minReplicaCount": 1,
            "maxReplicaCount": 4,
            "cooldownPeriod": 300,
            "triggers": [{"type": "prometheus", "metricType": "Value", "metadata": trigger}],
        },
    }
