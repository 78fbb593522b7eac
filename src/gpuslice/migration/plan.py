"""Migrating a cluster from another system to ours, and back: what to change, what to wait for, what is lost.

A plan is computed from the cluster as it is, so nothing is done twice, and an interrupted run is continued by
the next. Each change carries its own way back: a patched object has it as an annotation, written by the same
PATCH; a deleted object is stored in a ConfigMap first. Therefore it is safe to stop at any point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gpuslice.adapters.kube.resources import NODES, Resource
from gpuslice.adapters.wire.review import pod_form
from gpuslice.core.admission import in_names
from gpuslice.core.contract import ANN_MIGRATION, SYSTEM_NAMESPACE, ResourceNames
from gpuslice.core.errors import ContractError, InvalidRequestError
from gpuslice.core.form import Operation, PodForm, difference, escaped, without
from gpuslice.core.node_affinity import terms_of
from gpuslice.core.words import counted
from gpuslice.migration.reader import WORKLOADS, Planned, controller_of, ours
from gpuslice.migration.systems import JOBS, Object, Sizes, System, lost_on
from gpuslice.migration.writes import (
    Change,
    Step,
    WayBack,
    key_of,
    place_of,
    unchanged,
    way_back_of,
)

SHOWN_PODS = 3
HELM = "meta.helm.sh/release-name"


@dataclass(frozen=True, slots=True)
class Note:
    """Something that this command does not do, and why, or what to do about it."""

    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`waits` become changes once something is done; `by_hand` never do; `lost` has no counterpart.

    `must_go`: pods that keep a node from giving out its cards in the new way.
    """

    changes: tuple[Change, ...] = ()
    waits: tuple[Note, ...] = ()
    by_hand: tuple[Note, ...] = ()
    lost: tuple[Note, ...] = ()
    must_go: tuple[Note, ...] = ()


# -- to ours -------------------------------------------------------------------------------------------------


def plan(system: System, cluster: Planned, sizes: Sizes, node_label: str) -> Plan:
    """What has to be done now to migrate from `system`."""
    if system.name != "ack":  # whose nodes have the label already
        system = replace(system, labels={**system.labels, node_label: "true"})
    parts = (
        _their_objects(system, cluster),
        _their_nodes(system, cluster),
        _their_workloads(system, cluster, sizes),
    )
    found = Plan(
        tuple(each for part in parts for each in part.changes),
        tuple(each for part in parts for each in part.waits),
        tuple(each for part in parts for each in part.by_hand),
        tuple(each for part in parts for each in part.lost),
    )
    if not (found.changes or found.by_hand or found.lost or any(map(system.is_node, cluster.nodes))):
        return Plan()
    by_hand = tuple(Note(where, what) for where, what in system.by_hand)
    lost = tuple(Note("programs", line) for line in system.lost)
    return replace(found, by_hand=by_hand + found.by_hand, lost=lost + found.lost)


def _their_objects(system: System, cluster: Planned) -> Plan:
    """Deletes what the system installed, except what belongs to Helm, which would notice it missing."""
    changes, by_hand = [], []
    for resource, name in system.owned:
        found = cluster.owned.get((resource, name))
        if found is None or ours(found):
            continue
        where = f"{resource.kind} {key_of(found)}"
        if release := (found["metadata"].get("annotations") or {}).get(HELM):
            by_hand.append(Note(where, f"belongs to a Helm release: helm uninstall {release}"))
        else:
            what = ("is deleted; running pods go on",)
            changes.append(Change(where, what, resource, *place_of(found), kept=found))
    return Plan(changes=tuple(changes), by_hand=tuple(by_hand))


def _their_nodes(system: System, cluster: Planned) -> Plan:
    """Labels, node by node: only while no pod holds a card there, and only if our agent is installed."""
    changes, waits, by_hand, lost = [], [], [], []
    if not (installed := cluster.installed):
        first = ", once the objects above are gone" if system.replaces_ours else ""
        waits.append(Note("nodes", f"gpuslice is not installed: helm install it{first}, then run this again"))
    for node in cluster.nodes:
        if system.is_node(node) and (line := system.stays(node)):
            by_hand.append(Note(f"node {node['metadata']['name']}", line))
            continue
        if line := lost_on(system, node):
            lost.append(Note(f"node {node['metadata']['name']}", line))
        try:
            change = _node_change(system, node)
        except ContractError as error:
            by_hand.append(Note(f"node {node['metadata']['name']}", str(error)))
            continue
        if installed and change is not None:
            wait = drain(system, node, cluster.pods, system.holds)
            changes += [change] if wait is None else []
        elif not installed and change is None and system.is_node(node):
            # it already has our labels: our agent serves it as soon as it is installed
            wait = drain(system, node, cluster.pods, system.holds)
        else:
            continue
        waits += [wait] if wait is not None else []
    return Plan(tuple(changes), tuple(waits), tuple(by_hand), tuple(lost))


def _their_workloads(system: System, cluster: Planned, sizes: Sizes) -> Plan:
    """Whatever creates pods, and pods that nothing created: translated to our names."""
    changes, by_hand, lost = [], [], []
    for resource, thing in cluster.workloads:
        if _of_the_system(system, resource, thing):
            continue
        where = f"{resource.kind} {key_of(thing)}"
        try:
            found = _workload(system, resource, thing, sizes, cluster.names)
        except ContractError as error:
            found = [Note(where, str(error))]
        for each in found:
            if isinstance(each, Change):
                changes.append(each)
            elif isinstance(each, Note):
                by_hand.append(each)
            else:
                lost.append(Note(where, each))
    if changes:
        kept = "change them where they are kept, too (files, charts, Git), or they bring back what was there"
        by_hand.insert(0, Note("manifests", kept))
    by_hand += dict.fromkeys(_their_pods(system, cluster, sizes))
    return Plan(changes=tuple(changes), by_hand=tuple(by_hand), lost=tuple(lost))


def _of_the_system(system: System, resource: Resource[Object], thing: Object) -> bool:
    """Whether a workload is part of the other system, which goes as a whole."""
    about = thing["metadata"]
    owned = (resource, about["name"]) in system.owned and about["namespace"] == SYSTEM_NAMESPACE
    named = (about.get("labels") or {}).get("app.kubernetes.io/name")
    return owned or bool(named and named == system.chart)


def _their_pods(system: System, cluster: Planned, sizes: Sizes) -> Iterator[Note]:
    """Pods that no workload created: whoever did has to change what they ask for."""
    for pod, owner in cluster.other_pods():
        where, what = f"pod {key_of(pod)}", "recreate it with our names: a pod's requests cannot be changed"
        if owner is not None:
            where = f"{owner['kind']} {pod['metadata']['namespace']}/{owner['name']}"
            what = "creates pods itself: change there what they ask for"
        form = _form(pod)
        try:
            if system.translate(form, sizes) == form:
                continue
        except InvalidRequestError as error:
            what = str(error)
        yield Note(where, what)


def _node_change(system: System, node: Object) -> Change | None:
    """The labels that make a node ours; None if it is not one of the system's nodes, or already ours."""
    labels = node["metadata"].get("labels") or {}
    if not system.is_node(node):
        return None
    wrong = {name: value for name, value in system.labels.items() if labels.get(name) != value}
    if not wrong:
        return None
    before = {name: labels.get(name) for name in wrong}
    return _patch(
        NODES.as_dict(),
        node,
        system.name,
        [step for step, _ in _label_steps(before, wrong)],
        [step for step, _ in _label_steps(wrong, before)],
        what=tuple(line for _, line in _label_steps(before, wrong)),
        what_back=tuple(line for _, line in _label_steps(wrong, before)),
    )


def _label_steps(
    labels: Mapping[str, str | None], wanted: Mapping[str, str | None]
) -> Iterator[tuple[Object, str]]:
    """The steps of a JSON Patch, and the same in words; None is no label."""
    for name, value in wanted.items():
        path = f"/metadata/labels/{escaped(name)}"
        if value is not None:
            yield {"op": "add", "path": path, "value": value}, f"label {name}={value} is set"
        elif labels[name] is not None:
            yield {"op": "remove", "path": path}, f"label {name}={labels[name]} is removed"


def drain(
    system: System, node: Object, pods: Iterable[Object], holds: Callable[[Object], bool]
) -> Note | None:
    """The pods whose cards keep a node from changing over; None if there are none."""
    name, capacity = node["metadata"]["name"], (node.get("status") or {}).get("capacity") or {}
    holders = sorted(key_of(pod) for pod in pods if pod["spec"].get("nodeName") == name and holds(pod))
    # gpushare's device ids and records are like ours, and with a single card it is clear which one is meant
    if not holders or (system.name == "gpushare" and str(capacity.get("aliyun.com/gpu-count")) == "1"):
        return None
    named = ", ".join(holders[:SHOWN_PODS]) + (", …" if len(holders) > SHOWN_PODS else "")
    return Note(
        f"node {name}",
        f"{counted(len(holders), 'pod')} there hold cards ({named}): kubectl drain {name} "
        f"--ignore-daemonsets --delete-emptydir-data, run this again, then kubectl uncordon {name}",
    )


def _workload(
    system: System, resource: Resource[Object], thing: Object, sizes: Sizes, names: ResourceNames
) -> list[Change | Note | str]:
    """What happens to one object that creates pods: a change or a note; and what is lost, as sentences."""
    path = WORKLOADS[resource]
    template: Object = thing
    for part in path.strip("/").split("/"):
        template = template.get(part) or {}
    before, where = _form(template), f"{resource.kind} {key_of(thing)}"
    owner = controller_of(thing)
    try:
        after = system.translate(before, sizes)
    except InvalidRequestError as error:
        return [Note(where, str(error))]
    if (gone := _lost_labels(system, before)) and system.holds(template):  # its resources select nodes
        after = replace(after, node_selector=without(after.node_selector, gone))
    selecting = (
        Note(where, f"selects nodes by label {name}, which they lose: use another one")
        for name in _lost_labels(system, after)
    )
    said: list[Change | Note | str] = [*system.remarks(before, sizes), *selecting]
    if after == before:
        return said
    after = replace(  # in the resource names that the nodes offer
        after,
        containers=tuple(
            replace(each, limits=in_names(each.limits, names), requests=in_names(each.requests, names))
            for each in after.containers
        ),
    )
    if owner is not None:
        return [Note(where, f"is made by {owner['kind']} {owner['name']}: change it there"), *said]
    if resource == JOBS:
        return [Note(where, "recreate it: the pods of a Job cannot be changed"), *said]
    parents = [  # that a JSON Patch needs and that may be missing in the object
        {"op": "add", "path": f"{path}/spec/{each.shelf}/{each.index}/resources", "value": {}}
        for each in after.containers
        if each.limits and template["spec"][each.shelf][each.index].get("resources") is None
    ]
    steps = [*parents, *_below(path, difference(before, after))]
    back = _below(path, difference(after, before))
    words, words_back = tuple(_words(before, after)), tuple(_words(after, before))
    return [_patch(resource, thing, system.name, steps, back, what=words, what_back=words_back), *said]


def _lost_labels(system: System, pod: PodForm) -> list[str]:
    """The labels by which a pod selects, or avoids, nodes of the system, and which these lose."""
    named = [(each["key"], value) for each in _expressions(pod) for value in each.get("values") or ("",)]
    return sorted(
        {
            name
            for name, value in (*pod.node_selector.items(), *named)
            if name in system.labels
            and system.labels[name] is None
            and (not value or system.is_node({"metadata": {"labels": {name: value}}}))
        }
    )


def _expressions(pod: PodForm) -> list[Mapping[str, Any]]:
    return [each for term in terms_of(pod.affinity) or () for each in term.get("matchExpressions") or ()]


def _form(pod: Object) -> PodForm:
    return pod_form(
        msgspec.Raw(msgspec.json.encode({"metadata": pod.get("metadata"), "spec": pod.get("spec")}))
    )


def _below(path: str, operations: Iterable[Operation]) -> list[Object]:
    documents = [each.document() for each in operations]
    return [{**each, "path": path + each["path"]} for each in documents]


def _words(before: PodForm, after: PodForm) -> Iterator[str]:
    def only(these: Mapping[str, object], those: Mapping[str, object]) -> str:
        return ", ".join(f"{name} {value}" for name, value in these.items() if those.get(name) != value)

    for old, new in zip(before.containers, after.containers, strict=True):
        if old.limits != new.limits:  # KAI's pods request by annotations instead
            gone = only(old.limits, new.limits) or only(before.annotations, after.annotations)
            come = only(new.limits, old.limits) or only(after.annotations, before.annotations)
            yield f'container "{old.name}": {gone} becomes {come}'
    for name in {**before.labels, **after.labels}:
        if name not in after.labels:
            yield f"label {name}={before.labels[name]} is removed"
        elif before.labels.get(name) != after.labels[name]:
            yield f"label {name}={after.labels[name]} is set"
    if before.scheduler != after.scheduler:
        yield f"schedulerName {before.scheduler} becomes {after.scheduler}"
    for name, value in {**before.node_selector, **after.node_selector}.items():
        if (name in before.node_selector) != (name in after.node_selector):
            yield f"nodeSelector {name}={value} is {'set' if name in after.node_selector else 'removed'}"
    if before.affinity != after.affinity:
        narrowed = len(_expressions(after)) > len(_expressions(before))
        yield f"node affinity to the wanted models is {'added' if narrowed else 'removed'}"


def _patch(
    resource: Resource[Object],
    thing: Object,
    system: str,
    steps: Sequence[Object],
    back: Sequence[Object],
    *,
    what: tuple[str, ...],
    what_back: tuple[str, ...],
) -> Change:
    """A change that carries its own way back, including that of earlier changes.

    Raises `ContractError` if the latter cannot be read.
    """
    annotations = thing["metadata"].get("annotations")
    steps_back = tuple(Step(**each) for each in back)
    way_back = WayBack(system, steps_back, what_back, earlier=way_back_of(thing))
    record = msgspec.json.encode(way_back).decode()
    note = {"op": "add", "path": f"/metadata/annotations/{escaped(ANN_MIGRATION)}", "value": record}
    parent = [] if annotations is not None else [{"op": "add", "path": "/metadata/annotations", "value": {}}]
    version, tests = unchanged(resource, thing)
    return Change(
        f"{'node' if resource.kind == 'Node' else resource.kind} {key_of(thing)}",
        what,
        resource,
        *place_of(thing),
        version=version,
        operations=(*tests, *steps, *parent, note),
    )
