"""Kubernetes objects as core values: the one place where pods and nodes of the API turn into ours."""

from __future__ import annotations

from collections.abc import Iterator

from gpuslice.adapters.kube import objects
from gpuslice.core.annotations import decode_unhealthy
from gpuslice.core.contract import SYSTEM_NAMESPACE, UNHEALTHY_CONFIGMAP_PREFIX
from gpuslice.core.model import ContainerKind, Node, Pod
from gpuslice.core.request import ContainerSpec, asks_for_gpu
from gpuslice.core.views import node_of, pod_of


def pod_view(pod: objects.Pod) -> Pod:
    """A pod as core sees it; `request` is None when it asks for nothing of ours."""
    meta, spec = pod.metadata, pod.spec
    return pod_of(
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        node=spec.node_name,
        phase=pod.status.phase,
        terminating=meta.deletion_timestamp is not None,
        version=meta.resource_version,
        specs=list(container_specs(spec)) if asks(spec) else (),
        labels=meta.labels,
        annotations=meta.annotations,
    )


def node_view(node: objects.Node, unhealthy: frozenset[int] = frozenset()) -> Node:
    """A node as core sees it; `unhealthy` comes from its ConfigMap (`unhealthy_view`)."""
    meta = node.metadata
    return node_of(
        name=meta.name,
        labels=meta.labels,
        annotations=meta.annotations,
        capacity=node.status.capacity,
        unhealthy=unhealthy,
    )


def unhealthy_view(configmap: objects.ConfigMap) -> tuple[str, frozenset[int], str] | None:
    """Node name, cards out of use and what could not be read; None when it is another kind of ConfigMap."""
    name = configmap.metadata.name
    if configmap.metadata.namespace != SYSTEM_NAMESPACE or not name.startswith(UNHEALTHY_CONFIGMAP_PREFIX):
        return None
    cards, problem = decode_unhealthy(configmap.data)
    node_name = name.removeprefix(UNHEALTHY_CONFIGMAP_PREFIX)
    return node_name, cards, problem.replace("<node>", node_name)


def asks(spec: objects.PodSpec) -> bool:
    """Whether any container names one of our resources: most pods of a cluster do not."""
    everyone = (*(spec.init_containers or ()), *spec.containers)
    return any(each.resources is not None and asks_for_gpu(each.resources.limits) for each in everyone)


def container_specs(spec: objects.PodSpec) -> Iterator[ContainerSpec]:
    """All containers in the order they start: init containers and sidecars, then apps."""
    for index, each in enumerate(spec.init_containers or ()):
        kind = ContainerKind.SIDECAR if each.restart_policy == "Always" else ContainerKind.INIT
        yield ContainerSpec(each.name, index, _limits(each), kind)
    for index, each in enumerate(spec.containers):
        yield ContainerSpec(each.name, index, _limits(each))


def _limits(container: objects.Container) -> dict[str, str | int | float]:
    return (container.resources.limits if container.resources else None) or {}
