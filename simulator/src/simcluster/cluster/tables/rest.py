"""Rows of access, scheduling, storage and admission kinds, and the row of everything else."""

from __future__ import annotations

from typing import Any

from simcluster.cluster.moment import age
from simcluster.cluster.request import Object
from simcluster.cluster.selector import selector_text
from simcluster.cluster.tables.column import Printer, created, name, printer, shortened


def _plain_row(obj: Object, now_s: float) -> list[Any]:
    return [name(obj), age(created(obj), now_s)]


def _created_row(obj: Object, _now_s: float) -> list[Any]:
    return [name(obj), created(obj)]


def _subjects(obj: Object, kind: str) -> str:
    found = [item for item in obj.get("subjects") or [] if item.get("kind") == kind]
    names = [f"{s['namespace']}/{s['name']}" if s.get("namespace") else s["name"] for s in found]
    return ", ".join(names)


def _binding_row(obj: Object, now_s: float) -> list[Any]:
    role = obj.get("roleRef") or {}
    return [
        name(obj),
        f"{role.get('kind', '')}/{role.get('name', '')}",
        age(created(obj), now_s),
        *(_subjects(obj, kind) for kind in ("User", "Group", "ServiceAccount")),
    ]


def _lease_row(obj: Object, now_s: float) -> list[Any]:
    holder = (obj.get("spec") or {}).get("holderIdentity", "")
    return [name(obj), holder, age(created(obj), now_s)]


def _priority_row(obj: Object, now_s: float) -> list[Any]:
    return [
        name(obj),
        obj.get("value", 0),
        str(bool(obj.get("globalDefault"))).lower(),
        age(created(obj), now_s),
        obj.get("preemptionPolicy", "PreemptLowerPriority"),
    ]


def _webhooks_row(obj: Object, now_s: float) -> list[Any]:
    return [name(obj), len(obj.get("webhooks") or []), age(created(obj), now_s)]


def _runtime_row(obj: Object, now_s: float) -> list[Any]:
    return [name(obj), obj.get("handler", ""), age(created(obj), now_s)]


def _storage_class_row(obj: Object, now_s: float) -> list[Any]:
    return [
        name(obj),
        obj.get("provisioner", ""),
        obj.get("reclaimPolicy", "Delete"),
        obj.get("volumeBindingMode", "Immediate"),
        str(bool(obj.get("allowVolumeExpansion"))).lower(),
        age(created(obj), now_s),
    ]


def _csi_node_row(obj: Object, now_s: float) -> list[Any]:
    return [name(obj), len((obj.get("spec") or {}).get("drivers") or []), age(created(obj), now_s)]


def _slice_row(obj: Object, now_s: float) -> list[Any]:
    ports = [str(port.get("port", "*")) for port in obj.get("ports") or []]
    addresses = [a for endpoint in obj.get("endpoints") or [] for a in endpoint.get("addresses") or []]
    return [
        name(obj),
        obj.get("addressType", ""),
        shortened(ports) if ports else "<unset>",
        shortened(addresses) if addresses else "<unset>",
        age(created(obj), now_s),
    ]


def _policy_row(obj: Object, now_s: float) -> list[Any]:
    return [name(obj), selector_text(obj["spec"].get("podSelector")), age(created(obj), now_s)]


def _ingress_row(obj: Object, now_s: float) -> list[Any]:
    spec = obj.get("spec") or {}
    hosts = [rule["host"] for rule in spec.get("rules") or [] if rule.get("host")]
    return [
        name(obj),
        spec.get("ingressClassName") or "<none>",
        shortened(hosts) if hosts else "*",
        "",
        "80, 443" if spec.get("tls") else "80",
        age(created(obj), now_s),
    ]


def _device_slice_row(obj: Object, now_s: float) -> list[Any]:
    spec = obj["spec"]
    where = spec.get("nodeName") or ("<all nodes>" if spec.get("allNodes") else "<unset>")
    return [name(obj), where, spec.get("driver", ""), spec["pool"]["name"], age(created(obj), now_s)]


def _resource_claim_row(obj: Object, now_s: float) -> list[Any]:
    status = obj.get("status") or {}
    states = ["deleted"] if obj["metadata"].get("deletionTimestamp") else []
    states += ["allocated"] if status.get("allocation") else [] if states else ["pending"]
    states += ["reserved"] if status.get("reservedFor") else []
    return [name(obj), ",".join(states), age(created(obj), now_s)]


_BINDING = printer("Name, Role, Age, Users+, Groups+, ServiceAccounts+", _binding_row)
_ROLE = printer("Name, Created At", _created_row)
_WEBHOOKS = printer("Name, Webhooks#, Age", _webhooks_row)

DEFAULT = printer("Name, Age", _plain_row)

REST: dict[str, Printer] = {
    "roles.rbac.authorization.k8s.io": _ROLE,
    "clusterroles.rbac.authorization.k8s.io": _ROLE,
    "rolebindings.rbac.authorization.k8s.io": _BINDING,
    "clusterrolebindings.rbac.authorization.k8s.io": _BINDING,
    "leases.coordination.k8s.io": printer("Name, Holder, Age", _lease_row),
    "priorityclasses.scheduling.k8s.io": printer(
        "Name, Value#, Global-Default, Age, PreemptionPolicy", _priority_row
    ),
    "mutatingwebhookconfigurations.admissionregistration.k8s.io": _WEBHOOKS,
    "validatingwebhookconfigurations.admissionregistration.k8s.io": _WEBHOOKS,
    "runtimeclasses.node.k8s.io": printer("Name, Handler, Age", _runtime_row),
    "storageclasses.storage.k8s.io": printer(
        "Name, Provisioner, ReclaimPolicy, VolumeBindingMode, AllowVolumeExpansion, Age", _storage_class_row
    ),
    "csinodes.storage.k8s.io": printer("Name, Drivers#, Age", _csi_node_row),
    "endpointslices.discovery.k8s.io": printer("Name, AddressType, Ports, Endpoints, Age", _slice_row),
    "networkpolicies.networking.k8s.io": printer("Name, Pod-Selector, Age", _policy_row),
    "ingresses.networking.k8s.io": printer("Name, Class, Hosts, Address, Ports, Age", _ingress_row),
    "resourceslices.resource.k8s.io": printer("Name, Node, Driver, Pool, Age", _device_slice_row),
    "resourceclaims.resource.k8s.io": printer("Name, State, Age", _resource_claim_row),
    "limitranges": _ROLE,
}
