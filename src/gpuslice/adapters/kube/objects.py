"""The parts of Kubernetes objects that we read, as msgspec structs.

Partial on purpose: what is not named here (managedFields above all) is skipped while decoding, which keeps
10,000 pods at 28 MB. ``gc=False`` is safe because the structs hold no cycles, and keeps full collections
short.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec


class _Object(msgspec.Struct, gc=False, rename="camel", omit_defaults=True, kw_only=True):
    pass


class OwnerReference(_Object):
    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


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
    owner_references: list[OwnerReference] | None = None

    @property
    def controller(self) -> OwnerReference | None:
        """What made it, and makes another in its place."""
        return next((owner for owner in self.owner_references or () if owner.controller), None)


class ClaimUse(_Object):
    """A claim of its pod that a container uses; `request`: that part of it alone."""

    name: str = ""
    request: str = ""


class Resources(_Object):
    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None
    claims: list[ClaimUse] | None = None


class Port(_Object):
    host_port: int = 0
    protocol: str = "TCP"
    host_ip: str = msgspec.field(default="", name="hostIP")


class Container(_Object):
    name: str = ""
    image: str = ""
    resources: Resources | None = None
    ports: list[Port] | None = None
    restart_policy: str | None = None  # "Always" on an init container makes it a sidecar


class Toleration(_Object):
    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


class PodClaim(_Object):
    """A claim that a pod names, or the template from which its own is made."""

    name: str = ""
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class VolumeClaim(_Object):
    claim_name: str = ""


class Volume(_Object):
    """Of a pod: the claim that it names, or the template of its own, which gets the pod's and its name."""

    name: str = ""
    persistent_volume_claim: VolumeClaim | None = None
    ephemeral: dict[str, Any] | None = None


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
    scheduling_gates: list[dict[str, Any]] | None = None
    scheduling_group: dict[str, Any] | None = None
    restart_policy: str = ""
    service_account_name: str = "default"
    resource_claims: list[PodClaim] | None = None
    volumes: list[Volume] | None = None
    topology_spread_constraints: list[dict[str, Any]] | None = None


class ContainerStatus(_Object):
    name: str = ""
    container_id: str = msgspec.field(default="", name="containerID")
    ready: bool = False
    restart_count: int = 0
    state: dict[str, Any] | None = None
    last_state: dict[str, Any] | None = None

    @property
    def waiting_reason(self) -> str:
        """Why kubelet does not run it at present; "" where it does, or gives no reason."""
        return str(((self.state or {}).get("waiting") or {}).get("reason") or "")


class Condition(_Object):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None
    last_heartbeat_time: str | None = None  # of a node's


class ExtendedResourceRequest(_Object):
    """The request of a claim that stands for an extended resource of a container."""

    container_name: str = ""
    request_name: str = ""


class ExtendedResourceClaim(_Object):
    """The claim that kube-scheduler itself made for a pod's extended resources (KEP-5004)."""

    resource_claim_name: str = ""
    request_mappings: list[ExtendedResourceRequest] | None = None


class PodStatus(_Object):
    phase: str = ""
    reason: str = ""
    message: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    nominated_node_name: str = ""
    start_time: str | None = None  # when kubelet had admitted it
    conditions: list[Condition] | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None
    resource_claim_statuses: list[PodClaim] | None = None  # the claims made from templates
    extended_resource_claim_status: ExtendedResourceClaim | None = None


class UsedRequest(NamedTuple):
    """A container uses a request of a claim; "" means all requests."""

    container: str
    claim: str
    request: str


class Owned(_Object):
    """Any object of which only the metadata is read."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)


class Pod(_Object):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def claims(self) -> list[PodClaim]:
        """All claims that it uses, with the names of those that exist."""
        made = {each.name: each.resource_claim_name for each in self.status.resource_claim_statuses or ()}
        found = [
            msgspec.structs.replace(
                each, resource_claim_name=each.resource_claim_name or made.get(each.name) or None
            )
            for each in self.spec.resource_claims or ()
        ]
        if (implicit := self.status.extended_resource_claim_status) is not None:
            found.append(PodClaim(resource_claim_name=implicit.resource_claim_name))
        return found

    @property
    def used_requests(self) -> list[UsedRequest]:
        """What its containers use of the claims that exist, in the containers' order."""
        names = {each.name: each.resource_claim_name for each in self.claims if each.name}
        implicit = self.status.extended_resource_claim_status or ExtendedResourceClaim()
        found: list[UsedRequest] = []
        for container in (*(self.spec.init_containers or ()), *self.spec.containers):
            found += [
                UsedRequest(container.name, name, use.request)
                for use in (container.resources and container.resources.claims) or ()
                if (name := names.get(use.name))
            ]
            found += [
                UsedRequest(container.name, implicit.resource_claim_name, each.request_name)
                for each in implicit.request_mappings or ()
                if each.container_name == container.name
            ]
        return found


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
    node_info: dict[str, Any] | None = None


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


class CapacityRequirements(_Object):
    requests: dict[str, str | int | float] | None = None


class ExactRequest(_Object):
    device_class_name: str = ""
    count: int = 1
    admin_access: bool | None = None
    capacity: CapacityRequirements | None = None


class DeviceRequest(_Object):
    exactly: ExactRequest | None = None
    first_available: list[ExactRequest] | None = None


class DeviceConstraint(_Object):
    match_attribute: str | None = None


class DeviceClaim(_Object):
    requests: list[DeviceRequest] | None = None
    constraints: list[DeviceConstraint] | None = None


class ClaimSpec(_Object):
    devices: DeviceClaim = msgspec.field(default_factory=DeviceClaim)


class DeviceResult(_Object):
    """One device of an allocated claim."""

    request: str = ""
    driver: str = ""
    pool: str = ""
    device: str = ""
    share_id: str | None = msgspec.field(default=None, name="shareID")
    consumed_capacity: dict[str, str | int | float] | None = None
    admin_access: bool | None = None


class DeviceResults(_Object):
    results: list[DeviceResult] | None = None


class ClaimAllocationResult(_Object):
    devices: DeviceResults = msgspec.field(default_factory=DeviceResults)


class ClaimConsumer(_Object):
    resource: str = ""
    name: str = ""
    uid: str = ""


class ClaimStatus(_Object):
    allocation: ClaimAllocationResult | None = None
    reserved_for: list[ClaimConsumer] | None = None


class ResourceClaim(_Object):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: ClaimSpec = msgspec.field(default_factory=ClaimSpec)
    status: ClaimStatus = msgspec.field(default_factory=ClaimStatus)
