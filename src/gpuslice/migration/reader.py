"""The cluster that a migration plans for: nodes, workloads, pods, and what is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import NotFoundError
from gpuslice.adapters.kube.resources import CONFIG_MAPS, DICT, LIVING, NODES, PODS, Resource
from gpuslice.core.contract import SYSTEM_NAMESPACE, ResourceNames, of_our_chart
from gpuslice.core.views import names_offered
from gpuslice.diagnosis.names import NoSuchNodeError, check_namespace
from gpuslice.migration.systems import DAEMON_SETS, DEPLOYMENTS, JOBS, Object

RECORD = "gpuslice-migration"  # ConfigMap with what was deleted
_POD_TEMPLATE = "/spec/template"
WORKLOADS: Mapping[Resource[Object], str] = {  # location of the pod template
    DEPLOYMENTS: _POD_TEMPLATE,
    Resource("apps/v1", "statefulsets", "StatefulSet", DICT): _POD_TEMPLATE,
    DAEMON_SETS: _POD_TEMPLATE,
    Resource("apps/v1", "replicasets", "ReplicaSet", DICT): _POD_TEMPLATE,
    Resource("batch/v1", "cronjobs", "CronJob", DICT): "/spec/jobTemplate/spec/template",
    JOBS: _POD_TEMPLATE,
}


@dataclass(frozen=True)
class Planned:
    """The cluster as it is."""

    nodes: Sequence[Object]  # those that were selected
    all_nodes: Sequence[Object]
    pods: Sequence[Object]  # living
    workloads: Sequence[tuple[Resource[Object], Object]]
    """Everything that creates pods, except what other objects created."""
    owned: Mapping[tuple[Resource[Object], str], Object]  # of what the other system may have installed
    installed: bool
    """Whether our device plugin is installed: otherwise nothing would serve a labelled node."""
    recorded: Mapping[str, str]  # what was deleted: key → the object as JSON
    namespace: str

    def other_pods(self) -> Iterator[tuple[Object, Object | None]]:
        """Pods that none of `workloads` made, each with its controller: of an operator, or none."""
        for pod in self.pods:
            owner = controller_of(pod)
            if self.namespace in ("", pod["metadata"]["namespace"]) and not _is_of_workload(owner):
                yield pod, owner

    @property
    def names(self) -> ResourceNames:
        """The resource names that nodes already offer, otherwise the vendor's."""
        offered = (names_offered((node.get("status") or {}).get("capacity") or {}) for node in self.all_nodes)
        return next((names for names in offered if names != names_offered({})), names_offered({}))


async def read(
    client: KubeClient,
    namespace: str = "",
    only_nodes: Sequence[str] = (),
    owned: Iterable[tuple[Resource[Object], str]] = (),
) -> Planned:
    """Raises `NoSuchNodeError` and `NoSuchNamespaceError` for a selected node or namespace that does not
    exist."""
    nodes = await client.all(NODES.as_dict())
    names = [each["metadata"]["name"] for each in nodes]
    if unknown := [name for name in only_nodes if name not in names]:
        raise NoSuchNodeError(unknown[0], names)
    if namespace:
        await check_namespace(client, namespace)
    workloads = [
        (resource, each)
        for resource in WORKLOADS
        for each in await client.all(resource, namespace)
        if not _is_of_workload(controller_of(each))
    ]
    found = {}
    for resource, name in owned:
        with contextlib.suppress(NotFoundError):
            place = SYSTEM_NAMESPACE if resource.namespaced else ""
            found[resource, name] = await client.get(resource, name, place)
    return Planned(
        [each for each in nodes if not only_nodes or each["metadata"]["name"] in only_nodes],
        nodes,
        await client.all(PODS.as_dict(), fields=LIVING),
        workloads,
        found,
        any(map(ours, await client.all(DAEMON_SETS))),
        await recorded(client),
        namespace,
    )


async def recorded(client: KubeClient) -> Mapping[str, str]:
    """What was deleted: key → the object as JSON."""
    try:
        return (await client.get(CONFIG_MAPS.as_dict(), RECORD, SYSTEM_NAMESPACE)).get("data") or {}
    except NotFoundError:
        return {}


def ours(thing: Object) -> bool:
    return of_our_chart(thing["metadata"].get("labels"))


def controller_of(thing: Object) -> Object | None:
    """The object that created it and keeps it as it is."""
    owners = thing["metadata"].get("ownerReferences") or ()
    return next((each for each in owners if each.get("controller")), None)


def _is_of_workload(owner: Object | None) -> bool:
    return owner is not None and any(owner["kind"] == each.kind for each in WORKLOADS)
