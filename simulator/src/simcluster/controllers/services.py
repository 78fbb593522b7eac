"""Services with a selector: the addresses of their ready pods, as Endpoints and as one EndpointSlice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simcluster.controllers.actions import Action, Create, patch, patch_status
from simcluster.controllers.ownership import controller_reference, is_going, labels_of
from simcluster.controllers.pods import is_finished, is_ready

Object = Mapping[str, Any]
BALANCERS = "203.0.113"
"""Where services of type LoadBalancer are reached from outside: addresses that are reserved for examples."""


def selects_pod(service: Object, pod: Object) -> bool:
    selector = service["spec"].get("selector") or {}
    same_namespace = service["metadata"].get("namespace") == pod["metadata"].get("namespace")
    return same_namespace and bool(selector) and selector.items() <= labels_of(pod).items()


def reconcile(
    service: Object, pods: Sequence[Object], endpoints: Object | None, slices: Sequence[Object]
) -> list[Action]:
    """``pods`` are those in the service's namespace; ``endpoints`` and ``slices`` what is stored for it."""
    if is_going(service) or not service["spec"].get("selector"):
        return []
    chosen = [pod for pod in pods if selects_pod(service, pod) and not is_finished(pod) and _address(pod)]
    chosen.sort(key=lambda pod: str(pod["metadata"]["name"]))
    return _balancer(service) + _endpoints(service, chosen, endpoints) + _slice(service, chosen, slices)


def _balancer(service: Object) -> list[Action]:
    if service["spec"].get("type") != "LoadBalancer":
        return []
    number = service["spec"]["clusterIP"].rpartition(".")[2]
    ingress = [{"ip": f"{BALANCERS}.{number}", "ipMode": "VIP"}]
    return patch_status("Service", service, {"loadBalancer": {"ingress": ingress}})


def _address(pod: Object) -> str:
    return str((pod.get("status") or {}).get("podIP") or "")


def _serves(pod: Object) -> bool:
    return is_ready(pod) and not is_going(pod)


def _endpoints(service: Object, pods: Sequence[Object], held: Object | None) -> list[Action]:
    ready = [_endpoint_address(pod) for pod in pods if _serves(pod)]
    others = [_endpoint_address(pod) for pod in pods if not _serves(pod)]
    subset: dict[str, Any] = {"addresses": ready, "notReadyAddresses": others, "ports": _ports(service, pods)}
    filled = {key: value for key, value in subset.items() if value}
    subsets = [filled] if ready or others else []
    if held is None:
        return [_create("Endpoints", service, service["metadata"]["name"], {"subsets": subsets})]
    if (held.get("subsets") or []) == subsets:
        return []
    return [patch("Endpoints", held, {"subsets": subsets})]


def _endpoint_address(pod: Object) -> dict[str, Any]:
    metadata = pod["metadata"]
    target = {"kind": "Pod", **{key: metadata[key] for key in ("name", "namespace", "uid")}}
    return {"ip": _address(pod), "nodeName": pod["spec"].get("nodeName"), "targetRef": target}


def _slice(service: Object, pods: Sequence[Object], held: Sequence[Object]) -> list[Action]:
    ports = [{"name": "", **port} for port in _ports(service, pods)]
    endpoints = [
        {
            "addresses": [_address(pod)],
            "conditions": {"ready": _serves(pod), "serving": is_ready(pod), "terminating": is_going(pod)},
            "nodeName": pod["spec"].get("nodeName"),
            "targetRef": _endpoint_address(pod)["targetRef"],
        }
        for pod in pods
    ]
    body = {"endpoints": endpoints, "ports": ports}
    if not held:
        name = f"{service['metadata']['name']}-{service['metadata']['uid'][:5]}"
        return [_create("EndpointSlice", service, name, {"addressType": "IPv4", **body})]
    stored = {key: held[0].get(key) or [] for key in body}
    return [] if stored == body else [patch("EndpointSlice", held[0], body)]


def _ports(service: Object, pods: Sequence[Object]) -> list[dict[str, Any]]:
    ports: list[dict[str, Any]] = []
    for port in service["spec"].get("ports") or []:
        # A number as it is; a name is resolved by the first pod's containers
        target = port.get("targetPort", port["port"])
        number: int | None
        if isinstance(target, int):
            number = target
        else:
            containers = [container for pod in pods[:1] for container in pod["spec"]["containers"]]
            named = [item for container in containers for item in container.get("ports") or []]
            number = next((int(item["containerPort"]) for item in named if item.get("name") == target), None)
        name = {"name": port["name"]} if port.get("name") else {}
        if number:
            ports.append({**name, "port": number, "protocol": port.get("protocol", "TCP")})
    return ports


def _create(kind: str, service: Object, name: str, body: Object) -> Create:
    own = service["metadata"]["name"]
    metadata = {
        "name": name,
        "labels": {**labels_of(service), "kubernetes.io/service-name": own},
        "ownerReferences": [controller_reference(service, "v1", "Service")],
    }
    return Create(kind, {"metadata": metadata, **body}, service["metadata"]["namespace"])
