"""Reads what explains a pod: the pod itself, the cluster's allocations, its last events, what it uses now."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.errors import ForbiddenError, KubeError, NotFoundError
from gpuslice.adapters.kube.resources import CONFIG_MAPS, DICT, EVENTS, NODES, PODS, Resource
from gpuslice.adapters.kube.sync import SyncClient, SyncTransport
from gpuslice.adapters.kube.views import node_view, pod_view, unhealthy_view
from gpuslice.apps.cli.cluster import connection_of
from gpuslice.apps.cli.flags import Flags
from gpuslice.apps.cli.usage import ContainerUsage, read_containers
from gpuslice.apps.command_line import nearest
from gpuslice.core.contract import EXCLUSIVE_GPU, GPU_MEM, SYSTEM_NAMESPACE
from gpuslice.core.errors import GpusliceError, printable
from gpuslice.core.explanation import (
    Explanation,
    Place,
    Taint,
    Toleration,
    Wish,
    explain,
    room_by_eviction,
    room_in_the_making,
    why_there,
)
from gpuslice.core.ledger import Ledger
from gpuslice.core.lookalikes import resource_hints
from gpuslice.core.model import Node, Pod, Request
from gpuslice.core.sizing import suggested_size
from gpuslice.core.units import MIB
from gpuslice.core.words import counted

SHOWN_EVENTS = 5
BOTH = f"It asks for whole cards ({EXCLUSIVE_GPU}) beside {GPU_MEM}, and no node offers both: ask for one."
_NAME = re.compile(r"[a-z0-9A-Z]([-a-z0-9A-Z.]*[a-z0-9A-Z])?")
_LIVING = "status.phase!=Succeeded,status.phase!=Failed"
_APPS = "apps/v1"
OWNERS = {
    "deployment": Resource(_APPS, "deployments", "Deployment", DICT),
    "statefulset": Resource(_APPS, "statefulsets", "StatefulSet", DICT),
    "daemonset": Resource(_APPS, "daemonsets", "DaemonSet", DICT),
    "replicaset": Resource(_APPS, "replicasets", "ReplicaSet", DICT),
    "job": Resource("batch/v1", "jobs", "Job", DICT),
}
"""Whose pods can be asked about by its name."""
SHORT = {"deploy": "deployment", "sts": "statefulset", "ds": "daemonset", "rs": "replicaset"}
SHORT |= {"po": "pod", "ns": "namespace"}


class NoSuchPodError(GpusliceError):
    """There is no pod, or nothing that has pods, of that name; the message names the nearest."""


@dataclass(frozen=True, slots=True)
class PodExplanation:
    """All that is known about one pod. `neighbours`: units by pod key on the cards that it holds.

    `ends`: how its containers last ended, one sentence each; `usage`: what they use now, where that is known.
    """

    pod: Pod
    phase: str
    scheduler: str
    events: tuple[objects.Event, ...] = ()
    reason: str = ""
    node: Node | None = None
    neighbours: tuple[tuple[str, int], ...] = ()
    explanation: Explanation | None = None
    ends: tuple[str, ...] = ()
    usage: tuple[ContainerUsage, ...] = ()
    hints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanations:
    """Of one pod, or of all pods that `name` has; `problems` are of the owner itself: why it has no pods."""

    name: str
    pods: tuple[PodExplanation, ...]
    single: bool
    problems: tuple[str, ...] = ()


def read(flags: Flags, name: str | None) -> Explanations:
    """Ask the cluster about POD, NAMESPACE/POD or KIND/NAME; None is the namespace. Raises NoSuchPodError."""
    kind, _, bare = ("namespace", "", "") if name is None else name.rpartition("/")
    kind = SHORT.get(kind, kind).removesuffix("s")
    if name is not None and not (_NAME.fullmatch(bare) and (not kind or _NAME.fullmatch(kind))):
        raise NoSuchPodError(f'POD is "{name}", must be the name of a pod, NAMESPACE/NAME, or KIND/NAME')
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
        names = [pod.metadata.name for pod in client.list(PODS, namespace)]
        hint = nearest(bare, names) or "-n names another namespace"
        raise NoSuchPodError(f'there is no pod "{bare}" in namespace {namespace}; {hint}') from error
    return Explanations(bare, tuple(_explained(client, [found])), single=True)


def _of_namespace(client: SyncClient, namespace: str) -> Explanations:
    """Its pods that ask for a part of a card, or that seem to mean one."""
    pods = [
        pod
        for pod in client.list(PODS, namespace)
        if pod_view(pod).request is not None or pod_view(pod).problem or resource_hints(resources_of(pod))
    ]
    problems = () if pods else (f"no pod of namespace {namespace} asks for a part of a card",)
    return Explanations(
        f"namespace {namespace}", tuple(_explained(client, pods)), single=False, problems=problems
    )


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
    selector = owner.get("spec", {}).get("selector") or {}
    terms = [f"{label}={value}" for label, value in (selector.get("matchLabels") or {}).items()]
    for each in selector.get("matchExpressions") or ():
        values = f" ({','.join(each.get('values') or ())})" if each.get("values") else ""
        operator = {"In": " in", "NotIn": " notin", "Exists": "", "DoesNotExist": ""}[each["operator"]]
        terms.append(f"{'!' if each['operator'] == 'DoesNotExist' else ''}{each['key']}{operator}{values}")
    pods = client.list(PODS, namespace, labels=",".join(terms)) if terms else []

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
        problems = problems or [f"{kind} {name} has no pods: kubectl -n {namespace} describe {kind} {name}"]
    return Explanations(
        f"{kind} {namespace}/{name}", tuple(_explained(client, pods)), single=False, problems=tuple(problems)
    )


def _explained(client: SyncClient, pods: Sequence[objects.Pod]) -> Iterator[PodExplanation]:
    """Each of `pods`, by one reading of the cluster."""
    if not pods:
        return
    ledger, nodes = Ledger(), client.list(NODES)
    try:
        views = map(unhealthy_view, client.list(CONFIG_MAPS, SYSTEM_NAMESPACE))
        unhealthy = {view[0]: view[1] for view in views if view is not None}
    except ForbiddenError:
        unhealthy = {}
    for node in nodes:
        ledger.apply_node(node_view(node, unhealthy.get(node.metadata.name, frozenset())))
    for pod in client.list(PODS, fields=f"{_LIVING},spec.nodeName!="):
        ledger.apply_pod(pod_view(pod))
    holding = {pod.spec.node_name for pod in pods if pod.spec.node_name and pod_view(pod).request is not None}
    try:
        usage = [each for node in sorted(holding) for each in read_containers(client, node)]
    except KubeError:  # where the exporter cannot be asked, nothing is known
        usage = []
    for pod in pods:
        view = pod_view(pod)
        fields = f"involvedObject.kind=Pod,involvedObject.name={view.name}"
        events = [
            each
            for each in _events(client, view.namespace, fields)
            if each.involved_object.uid in ("", view.uid)
        ]
        begun = PodExplanation(
            view, pod.status.phase, pod.spec.scheduler_name, tuple(events[-SHOWN_EVENTS:]), pod.status.reason
        )
        begun = replace(
            begun,
            ends=tuple(_ends(pod)),
            usage=tuple(each for each in usage if (each.namespace, each.pod) == (view.namespace, view.name)),
        )
        if view.finished:
            yield replace(begun, hints=tuple(_after_the_end(view)))
        elif view.node or view.request is None:
            yield _on_its_node(begun, pod, ledger, nodes)
        else:
            yield _waiting(begun, pod, ledger, nodes)


def _waiting(
    begun: PodExplanation, pod: objects.Pod, ledger: Ledger, nodes: Sequence[objects.Node]
) -> PodExplanation:
    """Why no node takes it, and what would help."""
    view, places = begun.pod, [place_of(node) for node in nodes]
    assert view.request is not None
    wish = wish_of(pod, view.request)
    explanation = explain(ledger, places, wish)
    if _wants_whole_cards(pod):
        return replace(begun, explanation=explanation, hints=(BOTH,))
    hints = [*resource_hints(resources_of(pod))]
    if pod.spec.scheduling_gates:
        hints.append("It has scheduling gates: no scheduler looks at it until they are taken away.")
    conditions = pod.status.conditions or ()
    seen = any(each.type == "PodScheduled" and each.reason for each in conditions)
    if pod.spec.scheduler_name not in ("", "default-scheduler") and not seen:
        hints.append(f"It waits for scheduler {pod.spec.scheduler_name}: see that one runs by that name.")
    hints += [*explanation.hints, *room_in_the_making(ledger, view)]
    if not explanation.fits and not view.nominated and pod.spec.preemption_policy != "Never":
        hints += room_by_eviction(ledger, places, wish, view)
    return replace(begun, explanation=explanation, hints=tuple(hints))


def _on_its_node(
    begun: PodExplanation, pod: objects.Pod, ledger: Ledger, nodes: Sequence[objects.Node]
) -> PodExplanation:
    """Which card it holds and who shares it; what is wrong with that, or with what it asks for."""
    view = begun.pod
    state = ledger.state(view.node) if view.node else None
    allocations = ledger.allocations(view.node) if view.node else None
    neighbours = []
    if allocations is not None and view.placement is not None:
        cards = {part.card for part in view.placement.slices}
        for each in allocations.by_uid.values():
            if each.placement is not None and each.pod.uid != view.uid:
                units = sum(part.units for part in each.placement.slices if part.card in cards)
                neighbours += [(each.pod.key, units)] if units else []

    at = next((node for node in nodes if node.metadata.name == view.node), None)
    hints = []
    if view.terminating and view.placement is not None and view.node:
        hints.append("It is being deleted, and holds its card until its containers have ended.")
    if view.node and view.request is not None and at is None:
        hints.append(
            f"Its node {view.node} is not there any more. Kubernetes deletes such pods after a while; delete "
            "it by hand where it stays."
        )
    elif view.node and view.request is not None and at is not None and not place_of(at).ready:
        hints.append(
            f"Its node {view.node} is not ready: nobody can tell whether the pod runs there. It holds its "
            "card until the node is back, or the pod is deleted."
        )
    else:
        hints += [*_what_it_asks_for(view, pod), *(why_there(state, view) if state else ())]
    node = state.node if state else None
    hints += _about_size(view, node, begun.usage)
    return replace(begun, node=node, neighbours=tuple(sorted(neighbours)), hints=tuple(hints))


def _what_it_asks_for(view: Pod, pod: objects.Pod) -> Sequence[str]:
    if view.problem:
        return [] if view.node else ["Nothing places a pod like this: correct the field and create it anew."]
    if view.request is None:
        whole = _wants_whole_cards(pod)
        kind = f"It asks for whole cards ({EXCLUSIVE_GPU})" if whole else "It asks for no part of a card"
        nothing = [f"{kind}, so gpuslice has no say in where it goes."]
        return resource_hints(resources_of(pod)) or nothing
    if view.placement is None:
        return [
            "No annotation says which card it holds, so it counts against every card of its node. "
            "The node's agent writes the annotation when kubelet has given the device out."
        ]
    if not view.assigned and pod.status.phase == "Running":
        return ["The node's agent has not confirmed the card yet: see that it runs on that node."]
    return []


def _about_size(view: Pod, node: Node | None, usage: Sequence[ContainerUsage]) -> Iterator[str]:
    """What was refused, and a better size, where the exporter told the peak; of one container on one card."""
    for each in usage:
        if each.refused:
            times = "once" if each.refused == 1 else f"{each.refused:.0f} times"
            yield f"Container {each.container} asked for more memory than its limit, and was refused {times}."
    placed = view.placement.slices if view.placement is not None else ()
    if node is None or len(usage) != 1 or len(placed) != 1 or usage[0].peak_bytes is None:
        return
    card = next((card for card in node.cards if card.index == placed[0].card), None)
    if card is None or not card.memory_mib:
        return
    better = suggested_size(
        units=placed[0].units,
        card_units=card.units,
        card_mib=card.memory_mib,
        peak_mib=usage[0].peak_bytes / MIB,
        refused=bool(usage[0].refused),
    )
    if better is not None and better.more:
        yield (
            f"Ask for at least {counted(better.units, 'unit')} ({better.limit_mib} MiB): how much it would "
            "have taken is not known, since it was refused."
        )
    elif better is not None:
        peak = usage[0].peak_bytes / MIB
        yield (
            f"{counted(better.units, 'unit')} ({better.limit_mib} MiB) would have been enough so far: the "
            f"most that it used since its start is {peak:.0f} MiB."
        )


def _ends(pod: objects.Pod) -> Iterator[str]:
    """How containers ended that were started again, or that wait to be."""
    for each in pod.status.container_statuses or ():
        ended = (each.last_state or {}).get("terminated") or (each.state or {}).get("terminated") or {}
        waiting = (each.state or {}).get("waiting") or {}
        if not each.restart_count and not waiting.get("reason") and not ended.get("exitCode"):
            continue
        parts = []
        if each.restart_count:
            parts.append(f"was started again {counted(each.restart_count, 'time')}")
        if ended:
            why = f" ({printable(ended['reason'])})" if ended.get("reason") else ""
            at = f" at {ended['finishedAt']}" if ended.get("finishedAt") else ""
            parts.append(f"last ended with exit code {ended.get('exitCode', '?')}{why}{at}")
        if waiting.get("reason") and waiting["reason"] not in ("ContainerCreating", "PodInitializing"):
            message = f": {printable(waiting['message'])}" if waiting.get("message") else ""
            parts.append(f"waits now: {printable(waiting['reason'])}{message}")
        if parts:
            yield f"Container {each.name} {', '.join(parts)}."
    meta = pod.metadata
    if any(each.restart_count for each in pod.status.container_statuses or ()):
        yield f"What it said before: kubectl -n {meta.namespace} logs {meta.name} --previous"


def _after_the_end(view: Pod) -> Iterator[str]:
    """What a pod that has ended still shows by its annotations is no longer so."""
    if view.placement is not None:
        cards = ", ".join(str(part.card) for part in view.placement.slices)
        which = f"card {cards}" if len(view.placement.slices) == 1 else f"cards {cards}"
        units = counted(view.placement.units, "unit")
        yield f"It has ended and holds nothing any more: others may have the {units} of {which} that it held."
    elif view.request is not None:
        yield "It has ended and holds nothing any more."


def place_of(node: objects.Node) -> Place:
    """What of a node decides, beside its cards."""
    conditions = {each.type: each.status for each in node.status.conditions or ()}
    return Place(
        name=node.metadata.name,
        ready=conditions.get("Ready", "True") == "True",
        schedulable=not node.spec.unschedulable,
        labels=node.metadata.labels or {},
        taints=tuple(Taint(each.key, each.value, each.effect) for each in node.spec.taints or ()),
    )


def wish_of(pod: objects.Pod, request: Request) -> Wish:
    """What a pod wants of a node."""
    tolerations = (
        Toleration(each.key, each.operator or "Equal", each.value, each.effect)
        for each in pod.spec.tolerations or ()
    )
    return Wish(request, pod.spec.node_selector or {}, tuple(tolerations), pod.spec.affinity)


def resources_of(pod: objects.Pod) -> list[str]:
    """Names of what its containers have limits of, or request."""
    containers = [*pod.spec.containers, *(pod.spec.init_containers or ())]
    given = [each.resources for each in containers if each.resources is not None]
    return [name for each in given for name in {**(each.limits or {}), **(each.requests or {})}]


def _wants_whole_cards(pod: objects.Pod) -> bool:
    containers = [*pod.spec.containers, *(pod.spec.init_containers or ())]
    limits = [each.resources.limits or {} for each in containers if each.resources]
    return any(each.get(EXCLUSIVE_GPU, "0") != "0" for each in limits)


def _events(client: SyncClient, namespace: str, fields: str) -> list[objects.Event]:
    """The newest last; none where they may not be read."""
    try:
        return sorted(client.list(EVENTS, namespace, fields=fields), key=event_time)
    except ForbiddenError:
        return []


def event_time(event: objects.Event) -> str:
    return event.last_timestamp or event.first_timestamp or event.metadata.creation_timestamp or ""
