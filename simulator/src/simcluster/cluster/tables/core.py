"""Rows of the core group's kinds."""

from __future__ import annotations

from typing import Any

from simcluster.cluster.moment import age
from simcluster.cluster.request import Object
from simcluster.cluster.tables.column import Printer, created, name, plain_selector, printer, shortened
from simcluster.cluster.tables.pods import pod_row

_ROLE_LABEL = "node-role.kubernetes.io/"


def _node_row(node: Object, now_s: float) -> list[Any]:
    info = (node.get("status") or {}).get("nodeInfo") or {}
    labels = node["metadata"].get("labels") or {}
    roles = {key.removeprefix(_ROLE_LABEL) for key in labels if key.startswith(_ROLE_LABEL)}
    roles |= {labels["kubernetes.io/role"]} if labels.get("kubernetes.io/role") else set()
    conditions = (node.get("status") or {}).get("conditions") or []
    ready = next((item["status"] for item in conditions if item["type"] == "Ready"), None)
    words = ["Unknown" if ready is None else "Ready" if ready == "True" else "NotReady"]
    if (node.get("spec") or {}).get("unschedulable"):
        words.append("SchedulingDisabled")
    return [
        name(node),
        ",".join(words),
        ",".join(sorted(role for role in roles if role)) or "<none>",
        age(created(node), now_s),
        info.get("kubeletVersion", ""),
        _address(node, "InternalIP"),
        _address(node, "ExternalIP"),
        info.get("osImage") or "<unknown>",
        info.get("kernelVersion") or "<unknown>",
        info.get("containerRuntimeVersion") or "<unknown>",
    ]


def _address(node: Object, kind: str) -> str:
    addresses = (node.get("status") or {}).get("addresses") or []
    return next((item["address"] for item in addresses if item["type"] == kind), "<none>")


def _service_row(service: Object, now_s: float) -> list[Any]:
    spec = service["spec"]
    return [
        name(service),
        spec.get("type", "ClusterIP"),
        spec.get("clusterIP") or "<none>",
        _external_ip(service),
        ",".join(_service_port(port) for port in spec.get("ports") or []) or "<none>",
        age(created(service), now_s),
        plain_selector(spec.get("selector")),
    ]


def _external_ip(service: Object) -> str:
    spec = service["spec"]
    outside = list(spec.get("externalIPs") or [])
    if spec.get("type") == "ExternalName":
        return str(spec.get("externalName") or "<none>")
    if spec.get("type") != "LoadBalancer":
        return ",".join(outside) or "<none>"
    ingress = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or []
    return ",".join([item.get("ip") or item.get("hostname", "") for item in ingress] + outside) or "<pending>"


def _service_port(port: Object) -> str:
    node_port = f":{port['nodePort']}" if port.get("nodePort") else ""
    return f"{port['port']}{node_port}/{port.get('protocol', 'TCP')}"


def _event_row(event: Object, now_s: float) -> list[Any]:
    involved, source = event.get("involvedObject") or {}, event.get("source") or {}
    first = event.get("firstTimestamp") or event.get("eventTime") or created(event)
    last = event.get("lastTimestamp") or (event.get("series") or {}).get("lastObservedTime") or first
    component = source.get("component") or event.get("reportingComponent") or ""
    return [
        age(last, now_s),
        event.get("type", ""),
        event.get("reason", ""),
        f"{involved.get('kind', '').lower()}/{involved.get('name', '')}",
        involved.get("fieldPath", ""),
        ", ".join(part for part in (component, source.get("host")) if part),
        event.get("message", "").strip(),
        age(first, now_s),
        event.get("count") or (event.get("series") or {}).get("count") or 1,
        name(event),
    ]


def _endpoints_row(endpoints: Object, now_s: float) -> list[Any]:
    pairs = [
        f"{address['ip']}:{port['port']}"
        for subset in endpoints.get("subsets") or []
        for port in subset.get("ports") or []
        for address in subset.get("addresses") or []
    ]
    return [name(endpoints), shortened(pairs), age(created(endpoints), now_s)]


def _data_count(obj: Object) -> int:
    return len(obj.get("data") or {}) + len(obj.get("binaryData") or {})


def _config_map_row(obj: Object, now_s: float) -> list[Any]:
    return [name(obj), _data_count(obj), age(created(obj), now_s)]


def _secret_row(obj: Object, now_s: float) -> list[Any]:
    return [name(obj), obj.get("type", "Opaque"), _data_count(obj), age(created(obj), now_s)]


def _account_row(obj: Object, now_s: float) -> list[Any]:
    return [name(obj), len(obj.get("secrets") or []), age(created(obj), now_s)]


def _namespace_row(obj: Object, now_s: float) -> list[Any]:
    return [name(obj), (obj.get("status") or {}).get("phase", "Active"), age(created(obj), now_s)]


def _claim_row(obj: Object, now_s: float) -> list[Any]:
    spec, status = obj["spec"], obj.get("status") or {}
    return [
        name(obj),
        status.get("phase", "Pending"),
        spec.get("volumeName", ""),
        (status.get("capacity") or {}).get("storage", ""),
        ",".join(spec.get("accessModes") or []),
        spec.get("storageClassName", ""),
        age(created(obj), now_s),
    ]


def _quota_row(obj: Object, now_s: float) -> list[Any]:
    status = obj.get("status") or {}
    used, hard = status.get("used") or {}, status.get("hard") or obj["spec"].get("hard") or {}
    parts = {key: f"{key}: {used.get(key, '0')}/{value}" for key, value in sorted(hard.items())}
    limits = [text for key, text in parts.items() if key.startswith("limits.")]
    requests = [text for key, text in parts.items() if not key.startswith("limits.")]
    return [name(obj), ", ".join(requests), ", ".join(limits), age(created(obj), now_s)]


CORE: dict[str, Printer] = {
    "pods": printer(
        "Name, Ready, Status, Restarts, Age, IP+, Node+, Nominated Node+, Readiness Gates+", pod_row
    ),
    "nodes": printer(
        "Name, Status, Roles, Age, Version, Internal-IP+, External-IP+, OS-Image+, Kernel-Version+,"
        "Container-Runtime+",
        _node_row,
    ),
    "services": printer("Name, Type, Cluster-IP, External-IP, Port(s), Age, Selector+", _service_row),
    "events": printer(
        "Last Seen, Type, Reason, Object, Subobject+, Source+, Message, First Seen+, Count#+, Name+",
        _event_row,
    ),
    "endpoints": printer("Name, Endpoints, Age", _endpoints_row),
    "configmaps": printer("Name, Data#, Age", _config_map_row),
    "secrets": printer("Name, Type, Data#, Age", _secret_row),
    "serviceaccounts": printer("Name, Secrets#, Age", _account_row),
    "namespaces": printer("Name, Status, Age", _namespace_row),
    "persistentvolumeclaims": printer(
        "Name, Status, Volume, Capacity, Access Modes, StorageClass, Age", _claim_row
    ),
    "resourcequotas": printer("Name, Request, Limit, Age", _quota_row),
}
