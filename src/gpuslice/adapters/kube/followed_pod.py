"""A pod as the extender keeps it: its names and version, and its news until they have been handled.

Made as soon as the pod has come: all decoded pods of a large cluster take several times the memory.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import msgspec

from gpuslice.adapters.kube.kueue import POD_SET_OF_POD, WORKLOAD_OF_POD
from gpuslice.adapters.kube.objects import Metadata
from gpuslice.adapters.kube.rejected_pod import refusal_in
from gpuslice.adapters.kube.slim import SlimMetadata, SlimOwner, SlimPod
from gpuslice.adapters.kube.terms import Terms, controller_of, has_only_terms, terms_of
from gpuslice.adapters.kube.views import pod_view
from gpuslice.core.model import Pod
from gpuslice.core.rejections import KubeletRefusal


class Identity(msgspec.Struct, gc=False, frozen=True):
    """Which object of which version this is: all that a reflector needs."""

    namespace: str
    name: str
    uid: str
    resource_version: str


class PodNews(NamedTuple):
    """What a pod says. `terms`: of one that waits; `refusal`: of one that may not start.

    `has_only_terms`: nothing else decides where it may run, and it may run by itself.
    """

    view: Pod
    terms: Terms | None
    controller: SlimOwner | None
    succeeded: bool
    refusal: KubeletRefusal | None = None
    has_only_terms: bool = False
    workload: tuple[str, str] = ("", "")  # Kueue's, and the pod's part of it

    @property
    def owner(self) -> str:
        """The uid of what made it."""
        return self.controller.uid if self.controller is not None else ""

    @property
    def waits(self) -> bool:
        return _waits(self.view)


class FollowedPod(msgspec.Struct, gc=False):
    """`news` is None once it has been handled."""

    metadata: Identity
    news: PodNews | None


def _waits(view: Pod) -> bool:
    return not view.node and view.request is not None


def identity_of(metadata: Metadata | SlimMetadata) -> Identity:
    namespace = sys.intern(metadata.namespace)
    return Identity(namespace, metadata.name, metadata.uid, metadata.resource_version)


def pod_news(pod: SlimPod) -> PodNews:
    view = pod_view(pod)
    waits = _waits(view)
    refusal = refusal_in(pod) if view.node and view.request is not None else None
    return PodNews(
        view,
        terms_of(pod) if waits else None,
        controller_of(pod),
        pod.status.phase == "Succeeded",
        refusal,
        waits and view.group is None and has_only_terms(pod),
        _workload_of(pod.metadata),
    )


def _workload_of(metadata: SlimMetadata) -> tuple[str, str]:
    name = (metadata.annotations or {}).get(WORKLOAD_OF_POD, "")
    return (name, (metadata.labels or {}).get(POD_SET_OF_POD, "")) if name else ("", "")


def followed_pod(pod: SlimPod) -> FollowedPod:
    return FollowedPod(identity_of(pod.metadata), pod_news(pod))
