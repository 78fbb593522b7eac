"""A pod as the console keeps it: whole if it shares cards or seems to, otherwise its names and version.

Made as soon as the pod has come: all decoded pods of a large cluster take several times the memory.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.followed_pod import Identity, identity_of
from gpuslice.adapters.kube.rejected_pod import refusal_in
from gpuslice.adapters.kube.views import pod_view
from gpuslice.core.annotations import PLACEMENT_ANNOTATIONS
from gpuslice.core.contract import LABEL_CLAIMED
from gpuslice.core.lookalikes import POD_LABELS, pod_label_hint, resource_hint
from gpuslice.core.model import Pod
from gpuslice.core.rejections import KubeletRefusal
from gpuslice.diagnosis.doctor.facts import EXPORTER, component_of
from gpuslice.diagnosis.explain.others import resources_of

T = TypeVar("T")
PLUGIN = "gpushare-device-plugin-ds"
MOST_INTERNED = 2000

_hint, _label_hint = lru_cache(maxsize=4096)(resource_hint), lru_cache(maxsize=4096)(pod_label_hint)


class KeptPod(msgspec.Struct):
    """`view` is None once it has been handled; `pod` if it requests nothing of ours, nor anything similar."""

    metadata: Identity
    view: Pod | None
    pod: objects.Pod | None
    refusal: KubeletRefusal | None = None


class Interner:
    """Stores equal parts of objects once: pods from one template are alike, down to each string."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def one(self, part: T) -> T:
        """The first part that was equal to `part`. It must not be modified afterwards."""
        if len(self._known) > MOST_INTERNED:
            self._known.clear()  # parts in use stay with their users
        return cast(T, self._known.setdefault(msgspec.json.encode(part), part))

    def containers(self, pod: objects.Pod) -> None:
        """Replace what its containers have in common with equal ones by the shared objects."""
        for container in (*pod.spec.containers, *(pod.spec.init_containers or ())):
            container.image = ""
        pod.spec.containers = self.one(pod.spec.containers)
        pod.spec.init_containers = self.one(pod.spec.init_containers)


def kept_pod(pod: objects.Pod, interner: Interner) -> KeptPod:
    view, identity = pod_view(pod), identity_of(pod.metadata)
    if is_exporter(pod) or is_plugin(pod):
        return KeptPod(identity, view, pod)
    asks = view.request or view.problem or pod.claims or any(map(_hint, resources_of(pod)))
    if view.finished or not asks:
        return KeptPod(identity, view, None, refusal_in(pod) if view.node and view.request else None)
    _prune(pod, interner)
    return KeptPod(identity, view, pod)


def is_exporter(pod: objects.Pod) -> bool:
    return component_of(pod) == EXPORTER and bool(pod.spec.node_name)


def is_plugin(pod: objects.Pod) -> bool:
    return (pod.metadata.labels or {}).get("name") == PLUGIN


def _prune(pod: objects.Pod, interner: Interner) -> None:
    """Keep only what explains a pod: thousands are held in memory."""
    meta, status = pod.metadata, pod.status
    pod.spec.node_name = sys.intern(pod.spec.node_name)
    pod.spec.scheduler_name, status.phase = sys.intern(pod.spec.scheduler_name), sys.intern(status.phase)
    labels, annotations = meta.labels or {}, meta.annotations or {}
    kept_labels = {*POD_LABELS, LABEL_CLAIMED}
    shown = {name: value for name, value in labels.items() if name in kept_labels or _label_hint(name)}
    meta.labels = shown or None
    kept = {sys.intern(name): annotations[name] for name in PLACEMENT_ANNOTATIONS if name in annotations}
    meta.annotations = kept or None
    meta.finalizers = meta.owner_references = None
    if pod.spec.node_name:  # where else it may run is of interest to advice alone, which may be careful
        pod.spec.tolerations = None
        pod.spec.node_selector = interner.one(pod.spec.node_selector) or None
        pod.spec.affinity = interner.one(pod.spec.affinity) or None
        pod.spec.volumes = pod.spec.topology_spread_constraints = None
    interner.containers(pod)
    conditions = [each for each in status.conditions or () if each.type == "PodScheduled"]
    for each in conditions:
        each.type, each.status = sys.intern(each.type), sys.intern(each.status)
    status.conditions = conditions or None
    status.init_container_statuses = None
    for one in status.container_statuses or ():
        one.container_id, one.name = "", sys.intern(one.name)
