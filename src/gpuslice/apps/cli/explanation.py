"""Reads what explains a pod: the pod, the cluster's allocations, its last events, its current usage."""

from __future__ import annotations

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
from gpuslice.adapters.kube.resources import DICT, EVENTS, LIVING, NODES, PODS, Resource
from gpuslice.adapters.kube.sync import SyncClient, SyncTransport
from gpuslice.adapters.kube.views import pod_view
from gpuslice.apps.cli.cluster import check_namespace, connection_of
from gpuslice.apps.cli.flags import Flags
from gpuslice.apps.command_line import nearest
from gpuslice.apps.diagnosis.claims import read_claims, view_with_claims
from gpuslice.apps.diagnosis.cluster_ledger import ledger_of, read_config_maps
from gpuslice.apps.diagnosis.decisions import read_decision
from gpuslice.apps.diagnosis.other_pods import means_a_part
from gpuslice.apps.diagnosis.pod_explanation import (
    PodExplanation,
    alike,
    event_time,
    explained,
    kind_of,
    place_of,
)
from gpuslice.apps.diagnosis.rejections import read_rejections, why_kept_off
from gpuslice.apps.diagnosis.usage import read_containers
from gpuslice.core.contract import LABEL_GROUP_NAME
from gpuslice.core.errors import GpusliceError, printable
from gpuslice.core.lookalikes import resource_hints
from gpuslice.core.rejections import Rejections

SHOWN_EVENTS = 5
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
SHORT |= {"po": "pod", "ns": "namespace"}


class NoSuchPodError(GpusliceError):
    """There is no pod, and no owner of pods, of that name; the message names the most similar one."""


@dataclass(frozen=True, slots=True)
class Explanations:
    """Of one pod, or of all pods of `name`; `problems` concern the owner itself: why it has no pods."""

    name: str
    pods: tuple[PodExplanation, ...]
    single: bool
    problems: tuple[str, ...] = ()


def read(flags: Flags, name: str | None) -> Explanations:
    """Read what explains POD, NAMESPACE/POD or KIND/NAME; None: the namespace. Raises NoSuchPodError."""
    kind, _, bare = ("namespace", "", "") if name is None else name.rpartition("/")
    if name is not None and not (_NAME.fullmatch(bare) and (not kind or _NAME.fullmatch(kind))):
        raise NoSuchPodError(f'POD is "{name}", must be the name of a pod, NAMESPACE/NAME, or KIND/NAME')
    kind = kind.partition(".")[0]  # as printed by `kubectl get -o name`: deployment.apps/NAME
    kind = SHORT.get(kind, kind).removesuffix("s")
    connection = connection_of(flags)
    client = SyncClient(SyncTransport(connection))
    if kind == "namespace":
        return _of_namespace(client, bare or connection.namespace)
    if kind in OWNERS:
        return _of_owner(client, OWNERS[kind], bare, connection.namespace)
    namespace = connection.namespace if kind in {"", "pod"} else (name or "").rpartition("/")[0]
    try:
        found = client.get(PODS, bare, namespace)
    except NotFoundError as error:
        hint = _what_was_meant(client, kind, bare, namespace)
        raise NoSuchPodError(f'there is no pod "{bare}" in namespace {namespace}; {hint}') from error
    (one,) = _explained(client, [found])
    if one.pod.request is not None:
        one = replace(one, decision=read_decision(client, one.pod.uid))
    return Explanations(bare, (one,), single=True)


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


def _of_namespace(client: SyncClient, namespace: str) -> Explanations:
    """The namespace's pods that request a part of a card, or seem to."""
    listed = client.list(PODS, namespace)
    by_claims = {pod.metadata.name for pod in listed if pod.spec.resource_claims}
    pods = [pod for pod in listed if may_hold(pod) or means_a_part(pod)]
    explanations = [  # claims may be for something other than cards
        each
        for each in _explained(client, pods)
        if each.claims or each.pod.request or each.pod.problem or each.pod.name not in by_claims
    ]
    problems = () if explanations else (f"no pod of namespace {namespace} asks for a part of a card",)
    if not listed:
        check_namespace(client, namespace)
    return Explanations(f"namespace {namespace}", tuple(explanations), single=False, problems=problems)


def may_hold(pod: objects.Pod) -> bool:
    """Whether it requests a part of a card, or anything by a claim."""
    view = pod_view(pod)
    return view.request is not None or bool(view.problem) or bool(pod.spec.resource_claims)


def _of_owner(
    client: SyncClient, resource: Resource[dict[str, Any]], name: str, namespace: str
) -> Explanations:
    kind = resource.kind.lower()
    try:
        owner = client.get(resource, name, namespace)
    except NotFoundError as error:
        names = [each["metadata"]["name"] for each in client.list(resource, namespace)]
        hint = nearest(name, names) or "-n names another namespace"
        raise NoSuchPodError(f'there is no {kind} "{name}" in namespace {namespace}; {hint}') from error
    selector = str(msgspec.convert(owner.get("spec", {}).get("selector") or {}, LabelSelector))
    pods = client.list(PODS, namespace, labels=selector) if selector else []
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
    """An explanation for each of `pods`, all of one namespace, from one reading of the cluster."""
    if not pods:
        return
    nodes = client.list(NODES)
    living = client.list(PODS, fields=f"{LIVING},spec.nodeName!=")
    if any(LABEL_GROUP_NAME in (pod.metadata.labels or {}) for pod in pods):
        living += client.list(
            PODS, pods[0].metadata.namespace, labels=LABEL_GROUP_NAME, fields=f"{LIVING},spec.nodeName="
        )
    ledger = ledger_of(nodes, living, read_config_maps(client))
    claims = read_claims(client, nodes, [*living, *pods])
    holding = {pod.spec.node_name for pod in pods if pod.spec.node_name and may_hold(pod)}
    try:
        usage = [each for node in sorted(holding) for each in read_containers(client, node)]
    except KubeError:  # if the exporter cannot be queried, usage is unknown
        usage = []
    waits = any(not pod.spec.node_name for pod in pods)
    rejections = read_rejections(client, living) if waits else Rejections()
    by_name, places = {node.metadata.name: node for node in nodes}, [place_of(node) for node in nodes]
    namespace, fields = pods[0].metadata.namespace, "involvedObject.kind=Pod"
    if len(pods) == 1:
        fields += f",involvedObject.name={pods[0].metadata.name}"
    events: dict[str, list[objects.Event]] = defaultdict(list)
    for event in _events(client, namespace, fields):
        events[event.involved_object.name].append(event)
    known: dict[bytes, PodExplanation] = {}  # a queue consists mostly of equal pods
    for pod in pods:
        namespace, name = pod.metadata.namespace, pod.metadata.name
        view, claimed = view_with_claims(pod, claims)
        kind = kind_of(pod, view, claimed)
        if kind in known:
            yield alike(known[kind], view, claimed, events.get(name, ()))
            continue
        known[kind] = explained(
            pod,
            ledger,
            by_name,
            places=places,
            events=events.get(name, ()),
            usage=[each for each in usage if (each.namespace, each.pod) == (namespace, name)],
            claims=claims,
            kept_off=[*why_kept_off(rejections, view, time.time())],
        )
        yield known[kind]


def _events(client: SyncClient, namespace: str, fields: str) -> list[objects.Event]:
    """The events, newest last; none if they may not be read."""
    try:
        return sorted(client.list(EVENTS, namespace, fields=fields), key=event_time)
    except ForbiddenError:
        return []
