"""The cluster that a migration plans for: nodes, workloads, pods, and what is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpuslice.adapters.kube.errors import NotFoundError
from gpuslice.adapters.kube.resources import DICT, LIVING, NODES, PODS, Resource
from gpuslice.adapters.kube.sync import SyncClient
from gpuslice.apps.cli.cluster import NoSuchNodeError, check_namespace
from gpuslice.apps.cli.migration_systems import DAEMON_SETS, DEPLOYMENTS, JOBS, Object
from gpuslice.core.contract import SYSTEM_NAMESPACE, ResourceNames, of_our_chart
from gpuslice.core.views import names_offered

_POD_TEMPLATE = "/spec/template"
WORKLOADS: Mapping[Resource[Object], str] = {  # location of the pod template
    DEPLOYMENTS: _POD_TEMPLATE,
    Resource("apps/v1", "statefulsets", "StatefulSet", DICT): _POD_TEMPLATE,
    DAEMON_SETS: _POD_TEMPLATE,
    Resource("apps/v1", "replicasets", "ReplicaSet", DICT): _POD_TEMPLATE,
    Resource("batch/v1", "cronjobs", "CronJob", DICT): "/spec/jobTemplate/spec/template",
    JOBS: _POD_TEMPLATE,
}


class Reader:
    """The cluster as it is; each list is requested once.

    Raises `NoSuchNodeError` and `NoSuchNamespaceError` for a selected node or namespace that does not exist.
    """

    def __init__(self, client: SyncClient, namespace: str = "", only_nodes: Sequence[str] = ()) -> None:
        self.client = client
        self._namespace = namespace
        nodes = client.list(NODES.as_dict())
        names = [each["metadata"]["name"] for each in nodes]
        if unknown := [name for name in only_nodes if name not in names]:
            raise NoSuchNodeError(unknown[0], names)
        if namespace:
            check_namespace(client, namespace)
        self.nodes = [each for each in nodes if not only_nodes or each["metadata"]["name"] in only_nodes]
        self.all_nodes = nodes
        self.pods = client.list(PODS.as_dict(), fields=LIVING)

    def workloads(self) -> Iterator[tuple[Resource[Object], Object]]:
        """Everything that creates pods, except what other objects created."""
        for resource in WORKLOADS:
            for each in self.client.list(resource, self._namespace):
                if not _is_of_workload(controller_of(each)):
                    yield resource, each

    def other_pods(self) -> Iterator[tuple[Object, Object | None]]:
        """Pods that none of `workloads` made, each with its controller: of an operator, or none."""
        for pod in self.pods:
            owner = controller_of(pod)
            if self._namespace in ("", pod["metadata"]["namespace"]) and not _is_of_workload(owner):
                yield pod, owner

    def find(self, resource: Resource[Object], name: str) -> Object | None:
        try:
            return self.client.get(resource, name, SYSTEM_NAMESPACE if resource.namespaced else "")
        except NotFoundError:
            return None

    @property
    def installed(self) -> bool:
        """Whether our device plugin is installed: otherwise nothing would serve a labelled node."""
        return any(map(ours, self.client.list(DAEMON_SETS)))

    @property
    def names(self) -> ResourceNames:
        """The resource names that nodes already offer, otherwise the vendor's."""
        offered = (names_offered((node.get("status") or {}).get("capacity") or {}) for node in self.all_nodes)
        return next((names for names in offered if names != names_offered({})), names_offered({}))


def ours(thing: Object) -> bool:
    return of_our_chart(thing["metadata"].get("labels"))


def controller_of(thing: Object) -> Object | None:
    """The object that created it and keeps it as it is."""
    owners = thing["metadata"].get("ownerReferences") or ()
    return next((each for each in owners if each.get("controller")), None)


def _is_of_workload(owner: Object | None) -> bool:
    return owner is not None and any(owner["kind"] == each.kind for each in WORKLOADS)
