"""Reads what explains a pod: the pod, the cluster's allocations, its last events, its current usage."""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.errors import ForbiddenError, KubeError, NotFoundError
from gpuslice.adapters.kube.label_selector import LabelSelector
from gpuslice.adapters.kube.resources import (
    DICT,
    EVENTS,
    LIMIT_RANGES,
    LIVING,
    NODES,
    PODS,
    QUOTAS,
    Resource,
)
from gpuslice.adapters.kube.sync import SyncClient, SyncTransport
from gpuslice.adapters.kube.views import pod_view
from gpuslice.apps.cli.cluster import check_namespace, connection_of, read_node
from gpuslice.apps.cli.flags import Flags
from gpuslice.apps.command_line import nearest
from gpuslice.apps.diagnosis.claims import read_claims, view_with_claims
from gpuslice.apps.diagnosis.cluster_ledger import ledger_of, read_config_maps
from gpuslice.apps.diagnosis.decisions import read_decision
from gpuslice.apps.diagnosis.doctor_quotas import hints_of
from gpuslice.apps.diagnosis.exporters import read_containers
from gpuslice.apps.diagnosis.other_pods import means_a_part
from gpuslice.apps.diagnosis.places import place_of, places_of, read_volumes, wish_of
from gpuslice.apps.diagnosis.pod_explanation import PodExplanation, alike, event_time, explained, kind_of
from gpuslice.apps.diagnosis.rejections import read_rejections, why_kept_off
from gpuslice.apps.diagnosis.usage import ContainerUsage
from gpuslice.apps.diagnosis.waste import room_from
from gpuslice.core.contract import LABEL_GROUP_NAME
from gpuslice.core.errors import GpusliceError, printable
from gpuslice.core.ledger import Ledger
from gpuslice.core.lookalikes import resource_hints
from gpuslice.core.node_filters import Place
from gpuslice.core.rejections import Rejections
from gpuslice.core.units import limit_mib

SHOWN_EVENTS = 5
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


def read(flags: Flags, name: str | None, *, waiting: bool = False) -> Explanations:
    """Read what explains POD, NAMESPACE/POD or KIND/NAME; None: the namespace. Raises NoSuchPodError.

    `waiting`: of several pods only those that do not run yet.
    """
    kind, bare = ("namespace", "") if name is None else kind_and_name(name)
    connection = connection_of(flags)
    client = SyncClient(SyncTransport(connection))
    if kind == "namespace":
        everywhere = flags.everywhere and not bare
        return _of_namespace(client, "" if everywhere else bare or connection.namespace, waiting=waiting)
    if kind == "node":
        return _of_node(client, bare)
    if kind in OWNERS:
        return _of_owner(client, OWNERS[kind], bare, connection.namespace)
    (one,) = _explained(client, named_pods(client, connection.namespace, name or ""))
    if one.pod.request is not None:
        one = replace(one, decision=read_decision(client, one.pod.uid))
    return Explanations(bare, (one,), single=True)


def kind_and_name(name: str) -> tuple[str, str]:
    """Kind, or namespace, and name in NAME, NAMESPACE/NAME or KIND/NAME. Raises NoSuchPodError."""
    kind, _, bare = name.rpartition("/")
    if not (_NAME.fullmatch(bare) and (not kind or _NAME.fullmatch(kind))):
        raise NoSuchPodError(f'POD is "{name}", must be the name of a pod, NAMESPACE/NAME, or KIND/NAME')
    kind = kind.partition(".")[0]  # as printed by `kubectl get -o name`: deployment.apps/NAME
    return SHORT.get(kind, kind).removesuffix("s"), bare


def named_pods(client: SyncClient, namespace: str, name: str) -> list[objects.Pod]:
    """The pods that are meant by POD, NAMESPACE/POD or KIND/NAME. Raises NoSuchPodError."""
    kind, bare = kind_and_name(name)
    if kind in OWNERS:
        return _owned(client, OWNERS[kind], bare, namespace)[1]
    space = namespace if kind in {"", "pod"} else name.rpartition("/")[0]
    try:
        return [client.get(PODS, bare, space)]
    except NotFoundError as error:
        hint = _what_was_meant(client, kind, bare, space)
        raise NoSuchPodError(f'there is no pod "{bare}" in namespace {space}; {hint}') from error


def _what_was_meant(client: SyncClient, kind: str, name: str, namespace: str) -> str:
    """A similar name for a pod that does not exist: a pod, an owner of pods, or a kind of owner."""
    names = [pod.metadata.name for pod in client.list(PODS, namespace)]
    if kind not in {"", "pod"} and not names:  # then the word before the slash may be a misspelt kind
        return nearest(kind, [*OWNERS, *SHORT]) or "nor any other pod"
    if near := nearest(name, names):
        return near
    for owner, resource in OWNERS.items():
        try:
            if any(each["metadata"]["name"] == name for each in client.list(resource, namespace)):
                return f"did you mean {owner}/{name}?"
        except KubeError:  # the right to list pods may be the only one
            continue
    return "-n names another namespace"


def _of_node(client: SyncClient, name: str) -> Explanations:
    """The pods on a node's cards, and what is the matter with the node."""
    node = read_node(client, name)
    place, problems = place_of(node), []
    if not place.ready or not place.schedulable:
        state_of = "cordoned" if place.ready else "not ready"
        problems.append(f"Node {name} is {state_of}: no new pod is put there.")
    pods = list(filter(may_hold, client.list(PODS, fields=f"spec.nodeName={name}")))
    state = ledger_of([node], pods, read_config_maps(client)).state(name)
    for slot, card in enumerate(state.node.cards if state is not None else ()):
        held = limit_mib(card.memory_mib, max(0, card.units - state.left[slot]), card.units) if state else 0
        out = ", out of use" if state is not None and card.index in state.node.unhealthy else ""
        problems.append(f"Card {card.index}: {held} of {card.memory_mib} MiB held{out}.")
    if state is None or not state.node.cards:
        problems.append(f"Node {name} shares no cards.")
    explanations = tuple(_explained(client, pods))
    return Explanations(f"node {name}", explanations, single=False, problems=tuple(problems))


def _of_namespace(client: SyncClient, namespace: str, *, waiting: bool = False) -> Explanations:
    """The namespace's pods that request a part of a card, or seem to; "" for all namespaces."""
    listed = client.list(PODS, namespace)
    if waiting:
        listed = [pod for pod in listed if pod.status.phase in {"", "Pending"}]
    by_claims = {pod.metadata.name for pod in listed if pod.claims}
    pods = [pod for pod in listed if may_hold(pod) or means_a_part(pod)]
    explanations = [  # claims may be for something other than cards
        each
        for each in _explained(client, pods)
        if each.claims or each.pod.request or each.pod.problem or each.pod.name not in by_claims
    ]
    of = f"namespace {namespace}" if namespace else "all namespaces"
    what = "waits for" if waiting else "asks for"
    problems = () if explanations else (f"no pod of {of} {what} a part of a card",)
    if not listed and namespace:
        check_namespace(client, namespace)
    return Explanations(of, tuple(explanations), single=False, problems=problems)


def may_hold(pod: objects.Pod) -> bool:
    """Whether it requests a part of a card, or anything by a claim."""
    view = pod_view(pod)
    return view.request is not None or bool(view.problem) or bool(pod.claims)


def _owned(
    client: SyncClient, resource: Resource[dict[str, Any]], name: str, namespace: str
) -> tuple[dict[str, Any], list[objects.Pod]]:
    """An owner of pods, and the pods that its selector selects. Raises NoSuchPodError."""
    kind = resource.kind.lower()
    try:
        owner = client.get(resource, name, namespace)
    except NotFoundError as error:
        names = [each["metadata"]["name"] for each in client.list(resource, namespace)]
        hint = nearest(name, names) or "-n names another namespace"
        raise NoSuchPodError(f'there is no {kind} "{name}" in namespace {namespace}; {hint}') from error
    selector = str(msgspec.convert(owner.get("spec", {}).get("selector") or {}, LabelSelector))
    return owner, client.list(PODS, namespace, labels=selector) if selector else []


def _of_owner(
    client: SyncClient, resource: Resource[dict[str, Any]], name: str, namespace: str
) -> Explanations:
    kind, (owner, pods) = resource.kind.lower(), _owned(client, resource, name, namespace)
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
        problems += [
            f"{each.reason}: {printable(each.message)}" for each in _events(client, namespace, fields)
        ]
        problems += [*resource_hints(asked)]
        if owner.get("spec", {}).get("suspend"):
            problems.append(
                f"{kind} {name} is suspended: it gets its pods once it is resumed, as Kueue does when its "
                "queue has room"
            )
        problems = problems or [f"{kind} {name} has no pods: kubectl -n {namespace} describe {kind} {name}"]
    return Explanations(
        f"{kind} {namespace}/{name}", tuple(_explained(client, pods)), single=False, problems=tuple(problems)
    )


def _explained(client: SyncClient, pods: Sequence[objects.Pod]) -> Iterator[PodExplanation]:
    """An explanation for each of `pods` from one reading of the cluster."""
    if not pods:
        return
    nodes = client.list(NODES)
    living = client.list(PODS, fields=f"{LIVING},spec.nodeName!=")
    spaces = {pod.metadata.namespace for pod in pods}
    space = min(spaces) if len(spaces) == 1 else ""
    if any(LABEL_GROUP_NAME in (pod.metadata.labels or {}) for pod in pods):
        living += client.list(PODS, space, labels=LABEL_GROUP_NAME, fields=f"{LIVING},spec.nodeName=")
    ledger = ledger_of(nodes, living, read_config_maps(client))
    claims = read_claims(client, nodes, [*living, *pods])
    by_name, places = {node.metadata.name: node for node in nodes}, places_of(nodes, living)
    usage = _usage_around(client, pods, ledger, places)
    waits = any(not pod.spec.node_name for pod in pods)
    rejections = read_rejections(client, living) if waits else Rejections()
    in_vain = {each: _quota_hints(client, each, nodes) for each in spaces}
    fields = "involvedObject.kind=Pod"
    if len(pods) == 1:
        fields += f",involvedObject.name={pods[0].metadata.name}"
    events: dict[tuple[str, str], list[objects.Event]] = defaultdict(list)
    for event in _events(client, space, fields):
        events[event.metadata.namespace, event.involved_object.name].append(event)
    known: dict[bytes, PodExplanation] = {}  # a queue consists mostly of equal pods
    for pod in pods:
        namespace, name = pod.metadata.namespace, pod.metadata.name
        view, claimed = view_with_claims(pod, claims)
        kind = kind_of(pod, view, claimed)
        if kind in known:
            yield alike(known[kind], view, claimed, events.get((namespace, name), ()))
            continue
        known[kind] = explained(
            pod,
            ledger,
            by_name,
            places=places,
            events=events.get((namespace, name), ()),
            usage_of=lambda key: usage.get(key, ()),
            claims=claims,
            volumes=read_volumes(client, pod) if not pod.spec.node_name else (),
            kept_off=[*why_kept_off(rejections, view, time.time())],
        )
        if known[kind].pod.request is not None:
            known[kind] = replace(known[kind], hints=(*known[kind].hints, *in_vain[namespace]))
        yield known[kind]


def _quota_hints(client: SyncClient, namespace: str, nodes: Sequence[objects.Node]) -> list[str]:
    """What the namespace limits in vain; nothing if that may not be read."""
    try:
        limits = [
            item | {"kind": each.kind}
            for each in (QUOTAS, LIMIT_RANGES)
            for item in client.list(each, namespace)
        ]
    except KubeError:
        return []
    return [f"Its {where} {hint}." for where, hint in hints_of(nodes, limits)]


def _usage_around(
    client: SyncClient, pods: Sequence[objects.Pod], ledger: Ledger, places: Sequence[Place]
) -> dict[str, list[ContainerUsage]]:
    """By pod, what is used on the nodes that `pods` are on, and where one pod could make room for them.

    Of the latter only those where most is held. Nothing if an exporter cannot be queried: usage is unknown.
    """
    holding = {pod.spec.node_name for pod in pods if pod.spec.node_name and may_hold(pod)}
    held: dict[str, float] = {}
    for pod in [each for each in pods if not each.spec.node_name][:MOST_TOLD]:
        if (request := pod_view(pod).request) is not None:
            for each in room_from(ledger, places, wish_of(pod, request), lambda _: ()):
                held[each.node] = max(held.get(each.node, 0), each.held_mib)
    most = sorted(held, key=lambda node: -held[node])[:MOST_ASKED]
    found: dict[str, list[ContainerUsage]] = defaultdict(list)
    with contextlib.suppress(KubeError):
        for node in sorted({*holding, *most}):
            for use in read_containers(client, node):
                found[f"{use.namespace}/{use.pod}"].append(use)
    return found


def _events(client: SyncClient, namespace: str, fields: str) -> list[objects.Event]:
    """The events, newest last; none if they may not be read."""
    try:
        return sorted(client.list(EVENTS, namespace, fields=fields), key=event_time)
    except ForbiddenError:
        return []
