"""The parts of Kubernetes objects that we read, as msgspec structs.

Partial on purpose: what is not named here (managedFields above all) is skipped while decoding, which keeps
10,000 pods at 28 MB. ``gc=False`` is safe because the structs hold no cycles, and keeps full collections
short.
"""

from __future__ import annotations

from typing import Any

import msgspec


class _Object(msgspec.Struct, gc=False, rename="camel", omit_defaults=True, kw_only=True):
    pass


class Metadata(_Object):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    finalizers: list[str] | None = None


class Resources(_Object):
    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None


class Container(_Object):
    name: str = ""
    image: str = ""
    resources: Resources | None = None
    restart_policy: str | None = None  # "Always" on an init container makes it a sidecar


class Toleration(_Object):
    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


class PodSpec(_Object):
    node_name: str = ""
    scheduler_name: str = ""
    containers: list[Container] = []
    init_containers: list[Container] | None = None
    resources: Resources | None = None
    overhead: dict[str, str | int | float] | None = None
    node_selector: dict[str, str] | None = None
    tolerations: list[Toleration] | None = None
    affinity: dict[str, Any] | None = None
    priority: int | None = None
    preemption_policy: str = ""
    scheduling_gates: list[Any] | None = None
    restart_policy: str = ""


class ContainerStatus(_Object):
    name: str = ""
    container_id: str = msgspec.field(default="", name="containerID")
    ready: bool = False
    restart_count: int = 0
    state: dict[str, Any] | None = None
    last_state: dict[str, Any] | None = None


class Condition(_Object):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class PodStatus(_Object):
    phase: str = ""
    reason: str = ""
    nominated_node_name: str = ""
    conditions: list[Condition] | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None


class Pod(_Object):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class Address(_Object):
    type: str = ""
    address: str = ""


class Taint(_Object):
    key: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(_Object):
    unschedulable: bool = False
    taints: list[Taint] | None = None


class NodeStatus(_Object):
    capacity: dict[str, str] | None = None
    allocatable: dict[str, str] | None = None
    addresses: list[Address] | None = None
    conditions: list[Condition] | None = None


class Node(_Object):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: NodeSpec = msgspec.field(default_factory=NodeSpec)
    status: NodeStatus = msgspec.field(default_factory=NodeStatus)


class ConfigMap(_Object):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    data: dict[str, str] | None = None


class EventSource(_Object):
    component: str = ""
    host: str = ""


class ObjectReference(_Object):
    api_version: str = ""
    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    field_path: str = ""


class Event(_Object):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    involved_object: ObjectReference = msgspec.field(default_factory=ObjectReference)
    reason: str = ""
    message: str = ""
    type: str = ""
    count: int = 0
    source: EventSource = msgspec.field(default_factory=EventSource)
    first_timestamp: str | None = None
    last_timestamp: str | None = None


class LeaseSpec(_Object):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(_Object):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: LeaseSpec = msgspec.field(default_factory=LeaseSpec)
