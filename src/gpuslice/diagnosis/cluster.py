"""A cluster as commands and console know it: filled by lists, which are here, or by the console's watches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Protocol, TypeVar

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import ForbiddenError, NotFoundError, UnauthorizedError
from gpuslice.adapters.kube.resources import (
    CONFIG_MAPS,
    LIVING,
    NODES,
    PODS,
    RESOURCE_CLAIM_TEMPLATES,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    Resource,
)
from gpuslice.adapters.kube.views import node_view, pod_view, unhealthy_view
from gpuslice.core.contract import CLAIM_DRIVER, SYSTEM_NAMESPACE
from gpuslice.core.ledger import Ledger
from gpuslice.core.mode import rules_of
from gpuslice.core.node_filters import Place
from gpuslice.core.rejections import Rejections
from gpuslice.diagnosis.claims import Claims, claims_of
from gpuslice.diagnosis.places import place_of, places_of
from gpuslice.diagnosis.rejections import FAILED, refused_among, rejections_of
from gpuslice.diagnosis.usage import ClusterUsage, ContainerUsage, UsageByPod

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Cluster:
    """The facts from which everything that is shown follows, without further requests.

    `usage`: by namespace/name of the pod, as the exporters measure it; `problems`: why some is unknown, a
    sentence each. `unreadable`: what may not be read, so that nothing is known about it.
    """

    nodes: Sequence[objects.Node] = ()
    pods: Sequence[objects.Pod] = ()  # living
    config_maps: Sequence[objects.ConfigMap] = ()  # of the system's namespace
    claims: Claims | None = None  # if any node or pod uses claims
    failed: Sequence[objects.Pod] = ()
    rejections: Rejections = field(default_factory=Rejections)  # of kubelets
    usage: Mapping[str, Sequence[ContainerUsage]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    unreadable: Sequence[str] = ()
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    followed: Ledger | None = None  # that watches keep, so nothing is derived again
    partial: bool = False  # whether only the pods are known that share cards or seem to

    @cached_property
    def ledger(self) -> Ledger:
        """What each pod holds, as the extender sees it; what claims have given out is in `claims`."""
        return (
            self.followed if self.followed is not None else ledger_of(self.nodes, self.pods, self.config_maps)
        )

    @cached_property
    def ledger_of_claims(self) -> Ledger:
        return self.claims.ledger if self.claims is not None else Ledger()

    @cached_property
    def places(self) -> Sequence[Place]:
        """All nodes, and the pods there, if all are known."""
        return [*map(place_of, self.nodes)] if self.partial else places_of(self.nodes, self.pods)

    @cached_property
    def by_name(self) -> Mapping[str, objects.Node]:
        return {node.metadata.name: node for node in self.nodes}

    def fields(self) -> dict[str, Any]:
        """For facts that say more of it."""
        return {each.name: getattr(self, each.name) for each in fields(Cluster)}

    def usage_of(self, pod: str) -> Sequence[ContainerUsage]:
        """Of a pod by namespace/name; nothing if it is not known."""
        return self.usage.get(pod, ())

    def knows(self, resource: Resource[Any], namespace: str = "") -> bool:
        """Whether absence from the lists means that there is none."""
        return _where(resource, namespace) not in self.unreadable


def ledger_of(
    nodes: Iterable[objects.Node], pods: Iterable[objects.Pod], config_maps: Iterable[objects.ConfigMap] = ()
) -> Ledger:
    """`config_maps`: includes those that say which cards are out of use."""
    views = map(unhealthy_view, config_maps)
    unhealthy = {view[0]: view[1] for view in views if view is not None}
    ledger = Ledger()
    for node in nodes:
        ledger.apply_node(node_view(node, unhealthy.get(node.metadata.name, frozenset())))
    for pod in pods:
        ledger.apply_pod(pod_view(pod))
    return ledger


class UsageSource(Protocol):
    """Where usage is read."""

    def read(self) -> Coroutine[Any, Any, ClusterUsage]:
        """The usage now; an exporter that does not answer is a problem in it."""
        ...


class Reader:
    """Reads what may be read: the rest is empty, and named in `unreadable`."""

    def __init__(self, client: KubeClient) -> None:
        self.client = client
        self.unreadable: list[str] = []

    async def list(
        self, resource: Resource[T], namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> Sequence[T]:
        found = self.client.all(resource, namespace, labels=labels, fields=fields)
        return await self.asked(_where(resource, namespace), found, ())

    async def one(self, resource: Resource[T], name: str, namespace: str) -> Sequence[T]:
        """The one of that name, if there is one."""
        what = f"{resource.kind} {namespace}/{name}"
        found = await self.asked(what, self.client.get(resource, name, namespace), None)
        return () if found is None else (found,)

    async def asked(self, what: str, answer: Awaitable[T], otherwise: U) -> T | U:
        try:
            return await answer
        except UnauthorizedError:
            raise  # nothing at all may be read
        except ForbiddenError:
            self.unreadable.append(what)
        except NotFoundError:  # the cluster has no such thing
            pass
        return otherwise


def _where(resource: Resource[Any], namespace: str) -> str:
    return f"{resource.plural} of {namespace}" if namespace else resource.plural


async def read_cluster(
    client: KubeClient,
    source: UsageSource | None = None,
    *,
    reader: Reader | None = None,
    claiming: Sequence[objects.Pod] = (),
) -> Cluster:
    """Raises `KubeError` if the API server does not answer, or does not show nodes and pods.

    `source`: of usage. `reader`: may not be shown the pods either. `claiming`: more pods with claims.
    """
    nodes = await client.all(NODES)  # who may read nothing is told so by this request
    pods_read = client.all(PODS, fields=LIVING) if reader is None else reader.list(PODS, fields=LIVING)
    reader = reader or Reader(client)
    pods, config_maps, failed, usage = await asyncio.gather(
        pods_read,
        reader.list(CONFIG_MAPS, SYSTEM_NAMESPACE),
        reader.list(PODS, fields=FAILED),
        _measured(reader, source),
    )
    now = datetime.now(UTC)
    return Cluster(
        nodes,
        pods,
        config_maps,
        await _claims(reader, nodes, [*pods, *claiming]),
        failed,
        rejections_of(refused_among(failed), map(pod_view, pods), now.timestamp()),
        UsageByPod(usage.containers),
        usage.problems,
        reader.unreadable,
        now,
    )


async def _measured(reader: Reader, source: UsageSource | None) -> ClusterUsage:
    nothing = ClusterUsage((), ())
    return nothing if source is None else await reader.asked("exporters", source.read(), nothing)


async def _claims(
    reader: Reader, nodes: Sequence[objects.Node], pods: Sequence[objects.Pod]
) -> Claims | None:
    """The API server's claims; None if neither nodes nor pods use any: it may know none at all."""
    if not any(rules_of(node.metadata.labels or {}).claims for node in nodes) and not any(
        pod.claims for pod in pods
    ):
        return None
    slices, claims, templates = await asyncio.gather(
        reader.list(RESOURCE_SLICES, fields=f"spec.driver={CLAIM_DRIVER}"),
        reader.list(RESOURCE_CLAIMS),
        reader.list(RESOURCE_CLAIM_TEMPLATES),
    )
    known = RESOURCE_CLAIM_TEMPLATES.plural not in reader.unreadable
    return claims_of(nodes, pods, claims, slices, templates if known else None)
