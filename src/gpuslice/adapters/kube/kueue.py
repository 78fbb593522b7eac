"""Kueue's objects, as far as an admission check reads them (kueue.x-k8s.io/v1beta2, Kueue 0.19)."""

from __future__ import annotations

from typing import Any

import msgspec

from gpuslice.adapters.kube.objects import Metadata, Pod
from gpuslice.adapters.kube.resources import Resource

API = "kueue.x-k8s.io/v1beta2"
WORKLOAD_OF_POD, POD_SET_OF_POD = "kueue.x-k8s.io/workload", "kueue.x-k8s.io/podset"
"""An annotation and a label of the pods that Kueue lets go."""


class _Object(msgspec.Struct, gc=False, rename="camel", kw_only=True):
    pass


class PodSet(_Object):
    name: str = ""
    count: int = 0
    template: Pod = msgspec.field(default_factory=Pod)


class WorkloadSpec(_Object):
    pod_sets: list[PodSet] = []
    priority: int = 0


class Assignment(_Object):
    name: str = ""
    flavors: dict[str, str] | None = None  # by resource
    count: int | None = None


class Admission(_Object):
    pod_set_assignments: list[Assignment] = []


class Condition(_Object):
    type: str = ""
    status: str = ""


class CheckState(_Object):
    name: str = ""
    state: str = ""
    last_transition_time: str = ""
    retry_count: int = 0


class Reclaimable(_Object):
    name: str = ""
    count: int = 0


class WorkloadStatus(_Object):
    conditions: list[Condition] = []
    admission: Admission | None = None
    admission_checks: list[CheckState] = []
    reclaimable_pods: list[Reclaimable] = []


class Workload(_Object):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: WorkloadSpec = msgspec.field(default_factory=WorkloadSpec)
    status: WorkloadStatus = msgspec.field(default_factory=WorkloadStatus)

    @property
    def key(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"

    def is_true(self, condition: str) -> bool:
        return any(each.type == condition and each.status == "True" for each in self.status.conditions)


def slim(workload: Workload) -> Workload:
    """Without its pods, where no check of it is in progress or its pods have ended."""
    waits = workload.status.admission_checks and not workload.is_true("Finished")
    return workload if waits else Workload(metadata=workload.metadata)


class AdmissionCheckSpec(_Object):
    controller_name: str = ""


class AdmissionCheckStatus(_Object):
    conditions: list[Condition] = []


class AdmissionCheck(_Object):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: AdmissionCheckSpec = msgspec.field(default_factory=AdmissionCheckSpec)
    status: AdmissionCheckStatus = msgspec.field(default_factory=AdmissionCheckStatus)


class FlavorSpec(_Object):
    node_labels: dict[str, str] | None = None
    tolerations: list[dict[str, Any]] | None = None


class ResourceFlavor(_Object):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: FlavorSpec = msgspec.field(default_factory=FlavorSpec)


WORKLOADS = Resource(API, "workloads", "Workload", Workload)
ADMISSION_CHECKS = Resource(API, "admissionchecks", "AdmissionCheck", AdmissionCheck, namespaced=False)
RESOURCE_FLAVORS = Resource(API, "resourceflavors", "ResourceFlavor", ResourceFlavor, namespaced=False)
