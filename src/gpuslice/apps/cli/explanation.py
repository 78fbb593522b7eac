"""Reads what explains one pod: the pod, the cluster's book, the last events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.errors import ForbiddenError, NotFoundError
from gpuslice.adapters.kube.resources import CONFIG_MAPS, EVENTS, NODES, PODS
from gpuslice.adapters.kube.sync import SyncClient, SyncTransport
from gpuslice.adapters.kube.views import node_view, pod_view, unhealthy_view
from gpuslice.apps.cli.cluster import connection_of
from gpuslice.apps.cli.flags import Flags
from gpuslice.apps.nearest import nearest
from gpuslice.core.contract import EXCLUSIVE_GPU, GPU_MEM, SYSTEM_NAMESPACE
from gpuslice.core.errors import GpusliceError
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
from gpuslice.core.model import Node, Pod
from gpuslice.core.words import counted

SHOWN_EVENTS = 5
BOTH = f"It asks for whole cards ({EXCLUSIVE_GPU}) beside {GPU_MEM}, and no node offers both: ask for one."
_NAME = re.compile(r"[a-z0-9A-Z]([-a-z0-9A-Z.]*[a-z0-9A-Z])?")
_LIVING = "status.phase!=Succeeded,status.phase!=Failed"


class NoSuchPodError(GpusliceError):
    """There is no pod of that name; the message names the nearest."""


@dataclass(frozen=True, slots=True)
class Told:
    """All that is known about one pod. `neighbours`: units by pod key on the cards that it holds."""

    pod: Pod
    phase: str
    scheduler: str
    events: tuple[objects.Event, ...]
    reason: str = ""
    node: Node | None = None
    neighbours: tuple[tuple[str, int], ...] = ()
    explanation: Explanation | None = None
    hints: tuple[str, ...] = ()


def read(flags: Flags, name: str) -> Told:
    """Ask the cluster. Raises `NoSuchPodError`."""
    namespace, _, bare = re.sub(r"^(pods?|po)/", "", name).rpartition("/")
    if not _NAME.fullmatch(bare) or (namespace and not _NAME.fullmatch(namespace)):
        raise NoSuchPodError(f'POD is "{name}", must be the name of a pod, or NAMESPACE/NAME')
    connection = connection_of(flags)
    client = SyncClient(SyncTransport(connection))
    namespace = namespace or connection.namespace
    found = _find(client, namespace, bare)
    view = pod_view(found)
    ledger, nodes = _ledger(client)
    told = Told(
        view, found.status.phase, found.spec.scheduler_name, _events(client, view), found.status.reason
    )
    if view.finished:
        return replace(told, hints=tuple(_end_hints(view)))
    if view.node or view.request is None:
        at = next((node for node in nodes if node.metadata.name == view.node), None)
        return _sitting(told, found, ledger, at)
    places, wish = [_place(node) for node in nodes], _wish(found, view)
    explanation = explain(ledger, places, wish)
    if _wants_whole_cards(found):
        return replace(told, explanation=explanation, hints=(BOTH,))
    hints = [*_wait_hints(found), *explanation.hints, *room_in_the_making(ledger, view)]
    if not explanation.fits and not view.nominated and found.spec.preemption_policy != "Never":
        hints += room_by_eviction(ledger, places, wish, view)
    return replace(told, explanation=explanation, hints=tuple(hints))


def _sitting(told: Told, found: objects.Pod, ledger: Ledger, at: objects.Node | None) -> Told:
    state = ledger.state(told.pod.node) if told.pod.node else None
    lost = _lost_hints(told.pod, at)
    hints = lost or (*_sit_hints(told.pod, found), *(why_there(state, told.pod) if state else ()))
    return replace(
        told,
        node=state.node if state else None,
        neighbours=_neighbours(ledger, told.pod),
        hints=(*_leave_hints(told.pod), *hints),
    )


def _find(client: SyncClient, namespace: str, name: str) -> objects.Pod:
    try:
        return client.get(PODS, name, namespace)
    except NotFoundError as error:
        names = [pod.metadata.name for pod in client.list(PODS, namespace)]
        hint = nearest(name, names) or "-n names another namespace"
        raise NoSuchPodError(f'there is no pod "{name}" in namespace {namespace}; {hint}') from error


def _ledger(client: SyncClient) -> tuple[Ledger, list[objects.Node]]:
    """The cluster's book, as the extender keeps it."""
    ledger, nodes = Ledger(), client.list(NODES)
    unhealthy = _unhealthy(client)
    for node in nodes:
        ledger.apply_node(node_view(node, unhealthy.get(node.metadata.name, frozenset())))
    for pod in client.list(PODS, fields=f"{_LIVING},spec.nodeName!="):
        ledger.apply_pod(pod_view(pod))
    return ledger, nodes


def _unhealthy(client: SyncClient) -> dict[str, frozenset[int]]:
    try:
        views = [unhealthy_view(each) for each in client.list(CONFIG_MAPS, SYSTEM_NAMESPACE)]
    except ForbiddenError:
        return {}
    return {view[0]: view[1] for view in views if view is not None}


def _place(node: objects.Node) -> Place:
    conditions = {each.type: each.status for each in node.status.conditions or ()}
    return Place(
        name=node.metadata.name,
        ready=conditions.get("Ready", "True") == "True",
        schedulable=not node.spec.unschedulable,
        labels=node.metadata.labels or {},
        taints=tuple(Taint(each.key, each.value, each.effect) for each in node.spec.taints or ()),
    )


def _wish(pod: objects.Pod, view: Pod) -> Wish:
    assert view.request is not None
    tolerations = (
        Toleration(each.key, each.operator or "Equal", each.value, each.effect)
        for each in pod.spec.tolerations or ()
    )
    return Wish(view.request, pod.spec.node_selector or {}, tuple(tolerations), pod.spec.affinity)


def _neighbours(ledger: Ledger, view: Pod) -> tuple[tuple[str, int], ...]:
    book = ledger.allocations(view.node) if view.node else None
    if book is None or view.placement is None:
        return ()
    cards = {part.card for part in view.placement.slices}
    beside = [
        (allocation.pod.key, sum(part.units for part in allocation.placement.slices if part.card in cards))
        for allocation in book.by_uid.values()
        if allocation.placement is not None and allocation.pod.uid != view.uid
    ]
    return tuple(sorted((key, units) for key, units in beside if units))


def _said_by_schedulers(pod: objects.Pod) -> tuple[str, ...]:
    """Why the pod is not scheduled, in one word; nothing when no scheduler has looked at it."""
    conditions = pod.status.conditions or ()
    return tuple(each.reason for each in conditions if each.type == "PodScheduled" and each.reason)


def _events(client: SyncClient, view: Pod) -> tuple[objects.Event, ...]:
    fields = f"involvedObject.kind=Pod,involvedObject.name={view.name}"
    try:
        found = client.list(EVENTS, view.namespace, fields=fields)
    except ForbiddenError:
        return ()
    mine = [each for each in found if each.involved_object.uid in ("", view.uid)]
    return tuple(sorted(mine, key=event_time)[-SHOWN_EVENTS:])


def event_time(event: objects.Event) -> str:
    return event.last_timestamp or event.first_timestamp or event.metadata.creation_timestamp or ""


# -- hints about the pod alone -----------------------------------------------------------------------------


def _wait_hints(found: objects.Pod) -> Sequence[str]:
    hints = []
    said = _said_by_schedulers(found)
    if found.spec.scheduling_gates:
        hints.append("It has scheduling gates: no scheduler looks at it until they are taken away.")
    if found.spec.scheduler_name not in ("", "default-scheduler") and not said:
        hints.append(f"It waits for scheduler {found.spec.scheduler_name}: see that one runs by that name.")
    return hints


def _wants_whole_cards(found: objects.Pod) -> bool:
    containers = [*found.spec.containers, *(found.spec.init_containers or ())]
    limits = [each.resources.limits or {} for each in containers if each.resources]
    return any(each.get(EXCLUSIVE_GPU, "0") != "0" for each in limits)


def _end_hints(view: Pod) -> Iterable[str]:
    """What a pod that has ended still shows by its annotations is no longer so."""
    if view.placement is not None:
        cards = ", ".join(str(part.card) for part in view.placement.slices)
        which = f"card {cards}" if len(view.placement.slices) == 1 else f"cards {cards}"
        units = counted(view.placement.units, "unit")
        yield f"It has ended and holds nothing any more: others may have the {units} of {which} that it held."
    elif view.request is not None:
        yield "It has ended and holds nothing any more."


def _leave_hints(view: Pod) -> Iterable[str]:
    if view.terminating and view.placement is not None and view.node:
        yield "It is being deleted, and holds its card until its containers have ended."


def _lost_hints(view: Pod, at: objects.Node | None) -> Sequence[str]:
    """What a pod must know whose node is dead; nothing where it lives, or where it is none of ours."""
    if not view.node or view.request is None:
        return ()
    if at is None:
        return (
            f"Its node {view.node} is not there any more. Kubernetes deletes such pods after a while; delete "
            "it by hand where it stays.",
        )
    if not _place(at).ready:
        return (
            f"Its node {view.node} is not ready: nobody can tell whether the pod runs there. It holds its "
            "card until the node is back, or the pod is deleted.",
        )
    return ()


def _sit_hints(view: Pod, found: objects.Pod) -> Sequence[str]:
    if view.problem:
        return (
            ["Nothing places a pod like this: correct the field and create it anew."] if not view.node else []
        )
    if view.request is None:
        whole = _wants_whole_cards(found)
        kind = f"It asks for whole cards ({EXCLUSIVE_GPU})" if whole else "It asks for no part of a card"
        return [f"{kind}, so gpuslice has no say in where it goes."]
    if view.placement is None:
        return [
            "No annotation says which card it holds, so it counts against every card of its node. "
            "The node's agent writes the annotation when kubelet has given the device out."
        ]
    if not view.assigned and found.status.phase == "Running":
        return ["The node's agent has not confirmed the card yet: see that it runs on that node."]
    return []
