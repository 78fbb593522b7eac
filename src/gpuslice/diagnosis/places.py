"""Nodes and a pod as kube-scheduler's filters see them, from the API's objects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.resources import DICT, Resource
from gpuslice.core.advice import MayRun
from gpuslice.core.host_resources import amounts, pod_amounts
from gpuslice.core.model import Pod, Request
from gpuslice.core.node_filters import HostPort, NodeFilters, Occupant, Place, Taint, Toleration, Volume, Wish

Object = Mapping[str, Any]
PERSISTENT_CLAIMS = Resource("v1", "persistentvolumeclaims", "PersistentVolumeClaim", DICT)
PERSISTENT_VOLUMES = Resource("v1", "persistentvolumes", "PersistentVolume", DICT, namespaced=False)
STORAGE_CLASSES = Resource("storage.k8s.io/v1", "storageclasses", "StorageClass", DICT, namespaced=False)
ZONES = (
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
)
"""Labels of a volume that its nodes must have as well (plugin VolumeZone); "a__b" is either."""


def place_of(node: objects.Node, pods: Iterable[objects.Pod] | None = None) -> Place:
    """What matters about a node besides its cards; `pods`: those there, if they are known."""
    conditions = {each.type: each.status for each in node.status.conditions or ()}
    return Place(
        name=node.metadata.name,
        ready=conditions.get("Ready", "True") == "True",
        schedulable=not node.spec.unschedulable,
        labels=node.metadata.labels or {},
        taints=tuple(Taint(each.key, each.value, each.effect) for each in node.spec.taints or ()),
        allocatable=amounts(node.status.allocatable) if node.status.allocatable else None,
        pods=None if pods is None else tuple(map(occupant_of, pods)),
    )


def places_of(nodes: Iterable[objects.Node], pods: Iterable[objects.Pod]) -> list[Place]:
    """All nodes with the pods that are there."""
    there: dict[str, list[objects.Pod]] = defaultdict(list)
    for pod in pods:
        if pod.spec.node_name:
            there[pod.spec.node_name].append(pod)
    return [place_of(node, there[node.metadata.name]) for node in nodes]


def occupant_of(pod: objects.Pod) -> Occupant:
    meta, spec = pod.metadata, pod.spec
    sidecars = [each for each in spec.init_containers or () if each.restart_policy == "Always"]
    ports = [port for each in (*spec.containers, *sidecars) for port in each.ports or ()]
    return Occupant(
        f"{meta.namespace}/{meta.name}",
        meta.labels or {},
        pod_amounts(spec),
        frozenset(HostPort(each.host_port, each.protocol, each.host_ip) for each in ports if each.host_port),
        spec.affinity,
    )


def wish_of(
    pod: objects.Pod, request: Request, *, claims: bool = False, volumes: Sequence[Volume] = ()
) -> Wish:
    """What a pod requires of a node."""
    tolerations = (
        Toleration(each.key, each.operator or "Equal", each.value, each.effect)
        for each in pod.spec.tolerations or ()
    )
    return Wish(
        request,
        claims,
        pod.spec.node_selector or {},
        tuple(tolerations),
        pod.spec.affinity,
        occupant_of(pod),
        tuple(volumes),
        tuple(pod.spec.topology_spread_constraints or ()),
    )


def may_run(pods: Iterable[objects.Pod], nodes: Iterable[objects.Node]) -> MayRun:
    """Whether a pod's selectors and tolerations let it run on a node, by its name."""
    by_uid = {pod.metadata.uid: pod for pod in pods}
    places = {node.metadata.name: place_of(node) for node in nodes}

    def answer(pod: Pod, node: str) -> bool:
        found, place = by_uid.get(pod.uid), places.get(node)
        if found is None or place is None or pod.request is None:
            return False
        return not NodeFilters([place], wish_of(found, pod.request)).obstacle(place)

    return answer


async def read_volumes(client: KubeClient, pod: objects.Pod) -> tuple[Volume, ...]:
    """Where the volumes can be used that the pod claims. What may not be read keeps nobody out."""
    found = []
    for each in pod.spec.volumes or ():
        claim = f"{pod.metadata.name}-{each.name}" if each.ephemeral is not None else ""
        claim = each.persistent_volume_claim.claim_name if each.persistent_volume_claim else claim
        if claim:
            try:
                found.append(await _volume(client, pod.metadata.namespace, claim))
            except KubeError:
                continue
    return tuple(found)


async def _volume(client: KubeClient, namespace: str, name: str) -> Volume:
    claim = await _if_there(client.get(PERSISTENT_CLAIMS, name, namespace))
    if claim is None:
        return Volume(name, "does not exist")
    if claim["metadata"].get("deletionTimestamp"):
        return Volume(name, "is being deleted")
    spec = claim.get("spec") or {}
    if not (bound := spec.get("volumeName")):
        return await _unbound(client, name, spec.get("storageClassName") or "")
    volume = await _if_there(client.get(PERSISTENT_VOLUMES, bound))
    if volume is None:
        return Volume(name, f"is bound to {bound}, which does not exist")
    return Volume(name, terms=tuple(_terms_of(volume)))


async def _unbound(client: KubeClient, name: str, class_name: str) -> Volume:
    """A claim that gets its volume once its pod has a node, if it can."""
    known = await _if_there(client.get(STORAGE_CLASSES, class_name)) if class_name else None
    if class_name and known is None:
        return Volume(name, f"names StorageClass {class_name}, which does not exist")
    if known is None or known.get("volumeBindingMode") != "WaitForFirstConsumer":
        return Volume(name, "is not bound to a volume, and does not wait for a pod to be")
    terms = [
        term
        for volume in await client.all(PERSISTENT_VOLUMES)
        if (volume["spec"].get("storageClassName") or "") == class_name
        and (volume.get("status") or {}).get("phase") == "Available"
        for term in _where(volume) or [_ANYWHERE]
    ]
    if known.get("provisioner") != "kubernetes.io/no-provisioner":
        terms += [
            {"matchExpressions": [{**each, "operator": "In"} for each in topology["matchLabelExpressions"]]}
            for topology in known.get("allowedTopologies") or ()
        ] or [_ANYWHERE]
    if not terms:
        return Volume(name, f"finds no free volume of StorageClass {class_name}, which makes none")
    return Volume(name, terms=(terms,))


_ANYWHERE: Object = {"matchFields": [{"key": "metadata.name", "operator": "Exists"}]}


def _terms_of(volume: Object) -> Iterable[Sequence[Object]]:
    """What a node must meet to use a volume: its own affinity, and its zone."""
    if own := _where(volume):
        yield own
    for name, value in (volume["metadata"].get("labels") or {}).items():
        if name in ZONES:
            yield [{"matchExpressions": [{"key": name, "operator": "In", "values": value.split("__")}]}]


def _where(volume: Object) -> Sequence[Object]:
    required = (volume["spec"].get("nodeAffinity") or {}).get("required") or {}
    return required.get("nodeSelectorTerms") or ()


async def _if_there(answer: Awaitable[dict[str, Any]]) -> dict[str, Any] | None:
    try:
        return await answer
    except NotFoundError:
        return None
