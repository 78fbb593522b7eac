"""Reads what explains a pod: the pod, the cluster's allocations, its last events, its current usage."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.label_selector import LabelSelector
from gpuslice.adapters.kube.resources import (
    CONFIG_MAPS,
    DICT,
    EVENTS,
    PODS,
    Resource,
)
from gpuslice.adapters.kube.views import pod_view
from gpuslice.core.contract import SYSTEM_NAMESPACE
from gpuslice.core.errors import GpusliceError, printable
from gpuslice.core.lookalikes import resource_hints
from gpuslice.core.units import worth_mib
from gpuslice.core.words import nearest
from gpuslice.diagnosis.claims import view_with_claims
from gpuslice.diagnosis.cluster import Cluster, Reader, ledger_of, read_cluster
from gpuslice.diagnosis.doctor.facts import EXPORTER, LIMITS, component_of, with_kinds
from gpuslice.diagnosis.doctor.quotas import hints_of
from gpuslice.diagnosis.explain.decisions import read_decision
from gpuslice.diagnosis.explain.others import means_a_part
from gpuslice.diagnosis.explain.rule import PodExplanation, alike, event_time, explained, kind_of
from gpuslice.diagnosis.exporters import Exporters, proxied
from gpuslice.diagnosis.names import check_namespace, read_node
from gpuslice.diagnosis.places import place_of, read_volumes, wish_of
from gpuslice.diagnosis.usage import ContainerUsage, UsageByPod
from gpuslice.diagnosis.waste import room_from

MOST_TOLD = 3
"""How many waiting pods it is looked up for who could make room for them, the first of a queue."""
MOST_ASKED = 20  # exporters, for that
_NAME = re.compile(r"[a-z0-9A-Z]([-a-z0-9A-Z.]*[a-z0-9A-Z])?")
_APPS = "apps/v1"
OWNERS = {
    "deployment": Resource(_APPS, "deployments", "Deployment", DICT),
    "statefulset": Resource(_APPS, "statefulsets", "StatefulSet", DICT),
    "daemonset": Resource(_APPS, "daemonsets", "DaemonSet", DICT),
    "replicaset": Resource(_APPS, "replicasets", "ReplicaSet", DICT),
    "job": Resource("batch/v1", "jobs", "Job", DICT),
}
"""Kinds whose pods can be explained by the name of the owner."""
SHORT = {"deploy": "deployment", "sts": "statefulset", "ds": "daemonset", "rs": "replicaset"}
SHORT |= {"po": "pod", "ns": "namespace", "no": "node"}


class NoSuchPodError(GpusliceError):
    """There is no pod, and no owner of pods, of that name; the message names the most similar one."""


@dataclass(frozen=True, slots=True)
class Explanations:
    """Of one pod, or of all pods of `name`; `problems` concern the owner itself: why it has no pods."""

    name: str
    pods: tuple[PodExplanation, ...]
    single: bool
    problems: tuple[str, ...] = ()


def kind_and_name(name: str) -> tuple[str, str]:
    """Kind, or namespace, and name in NAME, NAMESPACE/NAME or KIND/NAME. Raises NoSuchPodError."""
    kind, _, bare = name.rpartition("/")
    if not (_NAME.fullmatch(bare) and (not kind or _NAME.fullmatch(kind))):
        raise NoSuchPodError(f'POD is "{name}", must be the name of a pod, NAMESPACE/NAME, or KIND/NAME')
    kind = kind.partition(".")[0]  # as printed by `kubectl get -o name`: deployment.apps/NAME
    return SHORT.get(kind, kind).removesuffix("s"), bare


async def read(
    client: KubeClient, name: str | None, namespace: str, *, everywhere: bool = False, waiting: bool = False
) -> Explanations:
    """Read what explains POD, NAMESPACE/POD or KIND/NAME; None: the namespace. Raises NoSuchPodError.

    `namespace`: of a name without one. `waiting`: of several pods only those that do not run yet.
    """
    kind, bare = ("namespace", "") if name is None else kind_and_name(name)
    if kind == "namespace":
        space = bare or ("" if everywhere else namespace)
        return await _of_namespace(client, space, waiting=waiting)
    if kind == "node":
        return await _of_node(client, bare)
    if kind in OWNERS:
        return await _of_owner(client, OWNERS[kind], bare, namespace)
    (one,) = await _explained(client, await named_pods(client, namespace, name or ""))
    if one.pod.request is not None:
        one = replace(one, decision=await read_decision(client, one.pod.uid))
    return Explanations(bare, (one,), single=True)


async def named_pods(client: KubeClient, namespace: str, name: str) -> Sequence[objects.Pod]:
    """The pods that are meant by POD, NAMESPACE/POD or KIND/NAME. Raises NoSuchPodError."""
    kind, bare = kind_and_name(name)
    if kind in OWNERS:
        return (await _owned(client, OWNERS[kind], bare, namespace))[1]
    space = namespace if kind in {"", "pod"} else name.rpartition("/")[0]
    try:
        return [await client.get(PODS, bare, space)]
    except NotFoundError as error:
        hint = await _what_was_meant(client, kind, bare, space)
        raise NoSuchPodError(f'there is no pod "{bare}" in namespace {space}; {hint}') from error


async def _what_was_meant(client: KubeClient, kind: str, name: str, namespace: str) -> str:
    """A similar name for a pod that does not exist: a pod, an owner of pods, or a kind of owner."""
    names = [pod.metadata.name for pod in await client.all(PODS, namespace)]
    if kind not in {"", "pod"} and not names:  # then the word before the slash may be a misspelt kind
        return nearest(kind, [*OWNERS, *SHORT]) or "nor any other pod"
    if near := nearest(name, names):
        return near
    for owner, resource in OWNERS.items():
        try:
            if any(each["metadata"]["name"] == name for each in await client.all(resource, namespace)):
                return f"did you mean {owner}/{name}?"
        except KubeError:  # the right to list pods may be the only one
            continue
    return "-n names another namespace"


async def _of_node(client: KubeClient, name: str) -> Explanations:
    """The pods on a node's cards, and what is the matter with the node."""
    node = await read_node(client, name)
    place, problems = place_of(node), []
    if not place.ready or not place.schedulable:
        state_of = "cordoned" if place.ready else "not ready"
        problems.append(f"Node {name} is {state_of}: no new pod is put there.")
    pods = list(filter(may_hold, await client.all(PODS, fields=f"spec.nodeName={name}")))
    config_maps = await Reader(client).list(CONFIG_MAPS, SYSTEM_NAMESPACE)
    state = ledger_of([node], pods, config_maps).state(name)
    for slot, card in enumerate(state.node.cards if state is not None else ()):
        held = max(0, card.units - state.left[slot]) if state else 0
        amounts = [worth_mib(card.memory_mib, units, card.units) for units in (held, card.units)]
        out = ", out of use" if state is not None and card.index in state.node.unhealthy else ""
        problems.append(f"Card {card.index}: {amounts[0]} of {amounts[1]} MiB held{out}.")
    if state is None or not state.node.cards:
        problems.append(f"Node {name} shares no cards.")
    explanations = tuple(await _explained(client, pods))
    return Explanations(f"node {name}", explanations, single=False, problems=tuple(problems))


async def _of_namespace(client: KubeClient, namespace: str, *, waiting: bool) -> Explanations:
    """The namespace's pods that request a part of a card, or seem to; "" for all namespaces."""
    listed = await client.all(PODS, namespace)
    if waiting:
        listed = [pod for pod in listed if pod.status.phase in {"", "Pending"}]
    by_claims = {pod.metadata.name for pod in listed if pod.claims}
    pods = [pod for pod in listed if may_hold(pod) or means_a_part(pod)]
    explanations = [  # claims may be for something other than cards
        each
        for each in await _explained(client, pods)
        if each.claims or each.pod.request or each.pod.problem or each.pod.name not in by_claims
    ]
    of = f"namespace {namespace}" if namespace else "all namespaces"
    what = "waits for" if waiting else "asks for"
    problems = () if explanations else (f"no pod of {of} {what} a part of a card",)
    if not listed and namespace:
        await check_namespace(client, namespace)
    return Explanations(of, tuple(explanations), single=False, problems=problems)


def may_hold(pod: objects.Pod) -> bool:
    """Whether it requests a part of a card, or anything by a claim."""
    view = pod_view(pod)
    return view.request is not None or bool(view.problem) or bool(pod.claims)


async def _owned(
    client: KubeClient, resource: Resource[dict[str, Any]], name: str, namespace: str
) -> tuple[dict[str, Any], Sequence[objects.Pod]]:
    """An owner of pods, and the pods that its selector selects. Raises NoSuchPodError."""
    kind = resource.kind.lower()
    try:
        owner = await client.get(resource, name, namespace)
    except NotFoundError as error:
        names = [each["metadata"]["name"] for each in await client.all(resource, namespace)]
        hint = nearest(name, names) or "-n names another namespace"
        raise NoSuchPodError(f'there is no {kind} "{name}" in namespace {namespace}; {hint}') from error
    selector = str(msgspec.convert(owner.get("spec", {}).get("selector") or {}, LabelSelector))
    return owner, await client.all(PODS, namespace, labels=selector) if selector else []


async def _of_owner(
    client: KubeClient, resource: Resource[dict[str, Any]], name: str, namespace: str
) -> Explanations:
    kind, (owner, pods) = resource.kind.lower(), await _owned(client, resource, name, namespace)
    problems = [
        f"{each.get('reason', each['type'])}: {printable(each.get('message', ''))}"
        for each in owner.get("status", {}).get("conditions") or ()
        if each.get("type") in {"ReplicaFailure", "Failed"} and each.get("status") == "True"
    ]
    if not pods:
        template = owner.get("spec", {}).get("template") or {}
        containers = (template.get("spec") or {}).get("containers") or ()
        asked = [key for each in containers for key in ((each.get("resources") or {}).get("limits") or {})]
        fields = f"involvedObject.kind={resource.kind},involvedObject.name={name}"
        events = await Reader(client).list(EVENTS, namespace, fields=fields)
        problems += [f"{each.reason}: {printable(each.message)}" for each in sorted(events, key=event_time)]
        problems += [*resource_hints(asked)]
        if owner.get("spec", {}).get("suspend"):
            problems.append(
                f"{kind} {name} is suspended: it gets its pods once it is resumed, as Kueue does when its "
                "queue has room"
            )
        problems = problems or [f"{kind} {name} has no pods: kubectl -n {namespace} describe {kind} {name}"]
    of, explanations = f"{kind} {namespace}/{name}", tuple(await _explained(client, pods))
    return Explanations(of, explanations, single=False, problems=tuple(problems))


async def _explained(client: KubeClient, pods: Sequence[objects.Pod]) -> list[PodExplanation]:
    """An explanation for each of `pods` from one reading of the cluster."""
    if not pods:
        return []
    spaces, reader = {pod.metadata.namespace for pod in pods}, Reader(client)
    space = min(spaces) if len(spaces) == 1 else ""
    fields = "involvedObject.kind=Pod"
    if len(pods) == 1:
        fields += f",involvedObject.name={pods[0].metadata.name}"
    cluster, happened = await asyncio.gather(
        read_cluster(client, claiming=pods), reader.list(EVENTS, space, fields=fields)
    )
    cluster = replace(cluster, usage=await _usage_around(client, pods, cluster))
    in_vain = {
        each: [
            f"Its {where} {hint}."
            for where, hint in hints_of(cluster.nodes, await with_kinds(reader, LIMITS, each))
        ]
        for each in spaces
    }
    events: dict[tuple[str, str], list[objects.Event]] = defaultdict(list)
    for event in happened:
        events[event.metadata.namespace, event.involved_object.name].append(event)
    known: dict[bytes, PodExplanation] = {}  # a queue consists mostly of equal pods
    found = []
    for pod in pods:
        namespace, own = pod.metadata.namespace, events.get((pod.metadata.namespace, pod.metadata.name), ())
        view, claimed = view_with_claims(pod, cluster.claims)
        kind = kind_of(pod, view, claimed)
        if kind in known:
            found.append(alike(known[kind], view, claimed, own))
            continue
        volumes = await read_volumes(client, pod) if not pod.spec.node_name else ()
        one = explained(pod, cluster, events=own, volumes=volumes)
        if one.pod.request is not None:
            one = replace(one, hints=(*one.hints, *in_vain[namespace]))
        known[kind] = one
        found.append(one)
    return found


async def _usage_around(
    client: KubeClient, pods: Sequence[objects.Pod], cluster: Cluster
) -> Mapping[str, Sequence[ContainerUsage]]:
    """What is used on the nodes that `pods` are on, and where one pod could make room for them.

    Of the latter only those where most is held. Nothing of an exporter that cannot be queried.
    """
    wanted = {pod.spec.node_name for pod in pods if pod.spec.node_name and may_hold(pod)}
    held: dict[str, float] = {}
    for pod in [each for each in pods if not each.spec.node_name][:MOST_TOLD]:
        if (request := pod_view(pod).request) is not None:
            for each in room_from(cluster.ledger, cluster.places, wish_of(pod, request), lambda _: ()):
                held[each.node] = max(held.get(each.node, 0), each.held_mib)
    wanted |= {*sorted(held, key=lambda node: -held[node])[:MOST_ASKED]}
    exporters = [
        each for each in cluster.pods if each.spec.node_name in wanted and component_of(each) == EXPORTER
    ]
    return UsageByPod((await Exporters(proxied(client)).read(exporters)).containers)
