"""Reads a cluster for the commands that show it, using only the API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection, connect
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.objects import ContainerStatus, Node, Pod
from gpuslice.adapters.kube.resources import LIVING, NODES, PODS, RESOURCE_CLAIMS
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.kube.views import held_by_claims, pod_view
from gpuslice.apps.cli.flags import Flags
from gpuslice.apps.cli.output import complain
from gpuslice.core.claim_views import amounts_of, cards_of_claims, with_claimed
from gpuslice.core.claims import ClaimedSlice
from gpuslice.core.contract import EXCLUSIVE_GPU
from gpuslice.core.model import Card
from gpuslice.core.quantity import whole_number
from gpuslice.core.report import NodeFacts, PodFacts, Report, report
from gpuslice.diagnosis.names import check_namespace, read_node

if TYPE_CHECKING:
    from gpuslice.diagnosis.cluster import Cluster

T = TypeVar("T")
CONNECTIONS = 40  # at once: exporters are read through the API server, a few dozen at a time


def connection_of(flags: Flags) -> Connection:
    """The connection to the cluster, and the selected namespace."""
    return connect(
        flags.environ,
        kubeconfig=flags.kubeconfig,
        context=flags.context,
        namespace=flags.namespace,
        interactive=True,
    )


def ask(flags: Flags, question: Callable[[KubeClient], Awaitable[T]], timeout_s: float = 30) -> T:
    """What `question` learns from the cluster selected by flags and environment."""
    connection = connection_of(flags)

    async def asked() -> T:
        async with HttpTransport(connection, timeout_s=timeout_s, connections=CONNECTIONS) as transport:
            return await question(KubeClient(transport))

    return asyncio.run(asked())


def read_measured(flags: Flags, *, by_exporters: bool = True) -> Cluster:
    """The cluster with what is used, or without; a selected namespace must exist. Says what is not known."""
    from gpuslice.diagnosis.cluster import read_cluster  # not for who only inspects
    from gpuslice.diagnosis.exporters import ClusterSource
    from gpuslice.diagnosis.usage import problem_lines

    async def read(client: KubeClient) -> Cluster:
        if flags.namespace:
            await check_namespace(client, flags.namespace)
        return await read_cluster(client, ClusterSource(client) if by_exporters else None)

    found = ask(flags, read)
    for problem in problem_lines(found.problems):
        complain(f"Warning: {problem}")
    return found


async def read_report(client: KubeClient, node: str = "") -> Report:
    """Allocations of all nodes, or of one. NoSuchNodeError if there is no node of that name."""
    fields = f"{LIVING},spec.nodeName={node}" if node else f"{LIVING},spec.nodeName!="
    nodes, pods = await asyncio.gather(_nodes(client, node), client.all(PODS, fields=fields))
    cards = {each.metadata.name: _cards_of_claims(each) for each in nodes}
    held: Mapping[str, Sequence[ClaimedSlice]] = {}  # by pod uid; a shared claim counts for its first pod
    try:
        held = held_by_claims(await client.all(RESOURCE_CLAIMS) if any(cards.values()) else (), cards)
    except KubeError as error:
        complain(f"claims cannot be read, so what they hold is not shown: {error}")
    return report(map(node_facts, nodes), (pod_facts(pod, held) for pod in pods))


async def _nodes(client: KubeClient, name: str) -> Sequence[Node]:
    return [await read_node(client, name)] if name else await client.all(NODES)


def _cards_of_claims(node: Node) -> tuple[Card, ...]:
    return cards_of_claims(node.metadata.labels or {}, node.metadata.annotations or {})


def node_facts(node: Node) -> NodeFacts:
    conditions = {each.type: each.status for each in node.status.conditions or ()}
    addresses = (each.address for each in node.status.addresses or () if each.type == "InternalIP")
    # for a node of claims, the resource it would otherwise offer: people and tools count in that
    amounts = amounts_of(cards) if (cards := _cards_of_claims(node)) else {}
    return NodeFacts(
        name=node.metadata.name,
        address=next(addresses, ""),
        ready=conditions.get("Ready") == "True",
        schedulable=not node.spec.unschedulable,
        labels=node.metadata.labels or {},
        annotations=node.metadata.annotations or {},
        capacity={**(node.status.capacity or {}), **amounts},
        allocatable={**(node.status.allocatable or {}), **amounts},
    )


def pod_facts(pod: Pod, held: Mapping[str, Sequence[ClaimedSlice]] = {}) -> PodFacts:
    """`held`: what pods were given by claims, by pod uid."""
    limits = (each.resources.limits or {} for each in pod.spec.containers if each.resources is not None)
    whole = sum(whole_number(each.get(EXCLUSIVE_GPU)) or 0 for each in limits)
    view = with_claimed(pod_view(pod), held.get(pod.metadata.uid, ()))
    return PodFacts(view, pod.status.phase, _status_of(pod), whole)


def _status_of(pod: Pod) -> str:
    """As kubectl prints it: the reason why the first container that is not running is not, or the phase."""
    if pod.metadata.deletion_timestamp is not None:
        return "Unknown" if pod.status.reason == "NodeLost" else "Terminating"
    first = pod.status.init_container_statuses or ()
    for number, each in enumerate(first):
        ended = (each.state or {}).get("terminated")
        is_done = ended is not None and not ended.get("exitCode")
        if not is_done and pod.status.phase != "Running":  # otherwise it runs beside the other containers
            why = _why_not_running(each)
            return f"Init:{why if why not in {'', 'PodInitializing'} else f'{number}/{len(first)}'}"
    containers = pod.status.container_statuses or ()
    why = next(filter(None, map(_why_not_running, containers)), "")
    if why == "Completed" and any(each.ready and "running" in (each.state or {}) for each in containers):
        return "Running"
    return why or pod.status.reason or pod.status.phase


def _why_not_running(container: ContainerStatus) -> str:
    if (ended := (container.state or {}).get("terminated")) is None:
        return container.waiting_reason
    how = f"Signal:{ended['signal']}" if ended.get("signal") else f"ExitCode:{ended.get('exitCode', 0)}"
    return ended.get("reason") or how
