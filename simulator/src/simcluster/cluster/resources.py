"""The kinds the API server serves: group, version, names, scope and subresources."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

STORED_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, slots=True)
class Resource:
    """``schema`` is the message's full name; ``store`` the name under which objects are kept.

    Two resources with one ``store`` are two views of the same objects (events of the two groups).
    """

    group: str
    version: str
    plural: str
    kind: str
    schema: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    has_generation: bool = False
    create_on_update: bool = False
    verbs: tuple[str, ...] = STORED_VERBS
    store: str = ""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def singular(self) -> str:
        return self.kind.lower()

    @property
    def is_virtual(self) -> bool:
        """Answered without being stored, such as an access review."""
        return self.verbs == ("create",)


@dataclass(slots=True)
class _Group:
    group: str
    version: str
    package: str
    resources: list[Resource] = field(default_factory=list)

    def add(
        self,
        plural: str,
        kind: str,
        short: str = "",
        *,
        cluster: bool = False,
        sub: str = "",
        all_category: bool = False,
        generation: bool = False,
        upsert: bool = False,
        virtual: bool = False,
        store: str = "",
    ) -> None:
        self.resources.append(
            Resource(
                group=self.group,
                version=self.version,
                plural=plural,
                kind=kind,
                schema=f"{self.package}.{kind}",
                namespaced=not cluster,
                short_names=tuple(short.split()),
                categories=("all",) if all_category else (),
                subresources=tuple(sub.split()),
                has_generation=generation,
                create_on_update=upsert,
                verbs=("create",) if virtual else STORED_VERBS,
                store=store or (f"{plural}.{self.group}" if self.group else plural),
            )
        )


def _core() -> list[Resource]:
    core = _Group("", "v1", "core.v1")
    pod_parts = "binding ephemeralcontainers eviction exec log portforward proxy resize status"
    core.add("bindings", "Binding", virtual=True)
    core.add("configmaps", "ConfigMap", "cm")
    core.add("endpoints", "Endpoints", "ep", upsert=True)
    core.add("events", "Event", "ev", upsert=True)
    core.add("limitranges", "LimitRange", "limits")
    core.add("namespaces", "Namespace", "ns", cluster=True, sub="finalize status")
    core.add("nodes", "Node", "no", cluster=True, sub="status")
    core.add("persistentvolumeclaims", "PersistentVolumeClaim", "pvc", sub="status")
    core.add("persistentvolumes", "PersistentVolume", "pv", cluster=True, sub="status")
    core.add("pods", "Pod", "po", sub=pod_parts, all_category=True, generation=True)
    core.add("podtemplates", "PodTemplate")
    core.add(
        "replicationcontrollers",
        "ReplicationController",
        "rc",
        sub="status",
        all_category=True,
        generation=True,
    )
    core.add("resourcequotas", "ResourceQuota", "quota", sub="status")
    core.add("secrets", "Secret")
    core.add("serviceaccounts", "ServiceAccount", "sa", sub="token")
    core.add("services", "Service", "svc", sub="status", all_category=True)
    return core.resources


def _cluster_wide() -> list[Resource]:
    events = _Group("events.k8s.io", "v1", "events.v1")
    events.add("events", "Event", "ev", store="events", upsert=True)
    leases = _Group("coordination.k8s.io", "v1", "coordination.v1")
    leases.add("leases", "Lease", upsert=True)
    scheduling = _Group("scheduling.k8s.io", "v1", "scheduling.v1")
    scheduling.add("priorityclasses", "PriorityClass", "pc", cluster=True, generation=True)
    node = _Group("node.k8s.io", "v1", "node.v1")
    node.add("runtimeclasses", "RuntimeClass", cluster=True)
    discovery = _Group("discovery.k8s.io", "v1", "discovery.v1")
    discovery.add("endpointslices", "EndpointSlice", generation=True)
    networking = _Group("networking.k8s.io", "v1", "networking.v1")
    networking.add("ingressclasses", "IngressClass", cluster=True, generation=True)
    networking.add("ingresses", "Ingress", "ing", sub="status", generation=True)
    networking.add("networkpolicies", "NetworkPolicy", "netpol", generation=True)
    devices = _Group("resource.k8s.io", "v1", "resource.v1")
    devices.add("deviceclasses", "DeviceClass", cluster=True, generation=True)
    devices.add("resourceclaims", "ResourceClaim", sub="status")
    devices.add("resourceclaimtemplates", "ResourceClaimTemplate")
    devices.add("resourceslices", "ResourceSlice", cluster=True, generation=True)
    storage = _Group("storage.k8s.io", "v1", "storage.v1")
    storage.add("csidrivers", "CSIDriver", cluster=True)
    storage.add("csinodes", "CSINode", cluster=True)
    storage.add("csistoragecapacities", "CSIStorageCapacity")
    storage.add("storageclasses", "StorageClass", "sc", cluster=True)
    storage.add("volumeattachments", "VolumeAttachment", cluster=True, sub="status")
    groups = (events, leases, scheduling, node, networking, discovery, storage, devices)
    return [resource for group in groups for resource in group.resources]


class Catalog:
    """All resources, looked up by group, version and plural name."""

    def __init__(self, resources: Iterable[Resource]) -> None:
        self.resources = tuple(resources)
        self._by_path = {(r.group, r.version, r.plural): r for r in self.resources}

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        return self._by_path.get((group, version, plural))

    def group_versions(self) -> list[tuple[str, str]]:
        """Core first, then in table order, each once."""
        return list(dict.fromkeys((r.group, r.version) for r in self.resources))

    def of(self, group: str, version: str) -> list[Resource]:
        return [r for r in self.resources if (r.group, r.version) == (group, version)]


def standard_catalog() -> Catalog:
    apps = _Group("apps", "v1", "apps.v1")
    apps.add("controllerrevisions", "ControllerRevision")
    apps.add("daemonsets", "DaemonSet", "ds", sub="status", all_category=True, generation=True)
    apps.add("deployments", "Deployment", "deploy", sub="scale status", all_category=True, generation=True)
    apps.add("replicasets", "ReplicaSet", "rs", sub="scale status", all_category=True, generation=True)
    apps.add("statefulsets", "StatefulSet", "sts", sub="scale status", all_category=True, generation=True)
    batch = _Group("batch", "v1", "batch.v1")
    batch.add("cronjobs", "CronJob", "cj", sub="status", all_category=True, generation=True)
    batch.add("jobs", "Job", sub="status", all_category=True, generation=True)
    scaling = _Group("autoscaling", "v2", "autoscaling.v2")
    scaling.add("horizontalpodautoscalers", "HorizontalPodAutoscaler", "hpa", sub="status", all_category=True)
    policy = _Group("policy", "v1", "policy.v1")
    policy.add("poddisruptionbudgets", "PodDisruptionBudget", "pdb", sub="status", generation=True)
    rbac = _Group("rbac.authorization.k8s.io", "v1", "rbac.v1")
    rbac.add("clusterrolebindings", "ClusterRoleBinding", cluster=True)
    rbac.add("clusterroles", "ClusterRole", cluster=True)
    rbac.add("rolebindings", "RoleBinding")
    rbac.add("roles", "Role")
    authorization = _Group("authorization.k8s.io", "v1", "authorization.v1")
    authorization.add("localsubjectaccessreviews", "LocalSubjectAccessReview", virtual=True)
    authorization.add("selfsubjectaccessreviews", "SelfSubjectAccessReview", cluster=True, virtual=True)
    authorization.add("selfsubjectrulesreviews", "SelfSubjectRulesReview", cluster=True, virtual=True)
    authorization.add("subjectaccessreviews", "SubjectAccessReview", cluster=True, virtual=True)
    authentication = _Group("authentication.k8s.io", "v1", "authentication.v1")
    authentication.add("selfsubjectreviews", "SelfSubjectReview", cluster=True, virtual=True)
    authentication.add("tokenreviews", "TokenReview", cluster=True, virtual=True)
    admission = _Group("admissionregistration.k8s.io", "v1", "admissionregistration.v1")
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        admission.add(f"{kind.lower()}s", kind, cluster=True, generation=True)
    for kind in ("MutatingAdmissionPolicy", "ValidatingAdmissionPolicy"):
        parts = "status" if kind.startswith("Validating") else ""
        admission.add(f"{kind[:-1].lower()}ies", kind, cluster=True, generation=True, sub=parts)
        admission.add(f"{kind.lower()}bindings", f"{kind}Binding", cluster=True, generation=True)
    return Catalog(
        _core()
        + (apps.resources + batch.resources + scaling.resources + policy.resources)
        + (rbac.resources + authorization.resources + authentication.resources + admission.resources)
        + _cluster_wide()
    )


def with_capacity_buffers(catalog: Catalog) -> Catalog:
    """The same where the CustomResourceDefinition of autoscalers is installed."""
    buffers = _Group("autoscaling.x-k8s.io", "v1beta1", "capacitybuffers.v1beta1")
    buffers.add("capacitybuffers", "CapacityBuffer", "cb", sub="status", generation=True)
    return Catalog((*catalog.resources, *buffers.resources))
