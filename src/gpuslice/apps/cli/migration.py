"""Bringing a cluster from another system to ours, and back: what to change, to wait for, and what gets lost.

A plan is worked out from the cluster as it is, so that nothing is done twice and a run that broke off is
continued by the next. Each change carries its own way back: what is patched bears it as an annotation,
written by the same PATCH; what is deleted is kept in a ConfigMap before. So one may stop at any line.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from gpuslice.adapters.kube.errors import NotFoundError
from gpuslice.adapters.kube.resources import DICT, NODES, PODS, Resource
from gpuslice.adapters.kube.sync import SyncClient
from gpuslice.adapters.wire.review import pod_form
from gpuslice.apps.cli.migration_systems import (
    DAEMON_SETS,
    DEPLOYMENTS,
    JOBS,
    Object,
    Sizes,
    System,
    limits_of,
    lost_on,
)
from gpuslice.apps.cli.migration_writes import Change, key_of, place_of, recorded
from gpuslice.core.admission import in_names
from gpuslice.core.contract import (
    AMOUNT_NAMES,
    ANN_MIGRATION,
    SYSTEM_NAMESPACE,
    ResourceNames,
    of_our_chart,
)
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.form import Operation, PodForm, difference, escaped
from gpuslice.core.views import names_offered
from gpuslice.core.words import counted

SHOWN_PODS = 3
HELM = "meta.helm.sh/release-name"
_POD_TEMPLATE = "/spec/template"
WORKLOADS: Mapping[Resource[Object], str] = {  # where the template of their pods is
    DEPLOYMENTS: _POD_TEMPLATE,
    Resource("apps/v1", "statefulsets", "StatefulSet", DICT): _POD_TEMPLATE,
    DAEMON_SETS: _POD_TEMPLATE,
    Resource("apps/v1", "replicasets", "ReplicaSet", DICT): _POD_TEMPLATE,
    Resource("batch/v1", "cronjobs", "CronJob", DICT): "/spec/jobTemplate/spec/template",
    JOBS: _POD_TEMPLATE,
}


@dataclass(frozen=True, slots=True)
class Note:
    """Something that is not done by this command, and why, or what to do."""

    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`waits` will be changes once something is done; `by_hand` never will; `lost` has no counterpart.

    `must_go`: pods that keep a node from giving its cards out in its new way.
    """

    changes: tuple[Change, ...] = ()
    waits: tuple[Note, ...] = ()
    by_hand: tuple[Note, ...] = ()
    lost: tuple[Note, ...] = ()
    must_go: tuple[Note, ...] = ()


class Reader:
    """The cluster as it is, each list asked for once."""

    def __init__(self, client: SyncClient, namespace: str = "", only_nodes: Sequence[str] = ()) -> None:
        self.client = client
        self._namespace = namespace
        nodes = client.list(NODES.as_dict())
        self.nodes = [each for each in nodes if not only_nodes or each["metadata"]["name"] in only_nodes]
        self.all_nodes = nodes
        self.pods = client.list(PODS.as_dict(), fields="status.phase!=Succeeded,status.phase!=Failed")

    def workloads(self) -> Iterator[tuple[Resource[Object], Object]]:
        """Everything that makes pods, apart from what other things made."""
        for resource in WORKLOADS:
            for each in self.client.list(resource, self._namespace):
                yield resource, each

    def bare_pods(self) -> list[Object]:
        return [
            each
            for each in self.pods
            if not each["metadata"].get("ownerReferences")
            and self._namespace in ("", each["metadata"]["namespace"])
        ]

    def find(self, resource: Resource[Object], name: str) -> Object | None:
        try:
            return self.client.get(resource, name, SYSTEM_NAMESPACE if resource.namespaced else "")
        except NotFoundError:
            return None

    @property
    def installed(self) -> bool:
        """Whether our device plugin is there: else nobody would serve a node that is labelled."""
        return any(map(ours, self.client.list(DAEMON_SETS)))

    @property
    def names(self) -> ResourceNames:
        """The names that nodes offer already, else the vendor's."""
        offered = (names_offered((node.get("status") or {}).get("capacity") or {}) for node in self.all_nodes)
        return next((names for names in offered if names != names_offered({})), names_offered({}))


def ours(thing: Object) -> bool:
    return of_our_chart(thing["metadata"].get("labels"))


# -- there -----------------------------------------------------------------------------------------------


def plan(system: System, cluster: Reader, sizes: Sizes, node_label: str) -> Plan:
    """What is to be done now to come from `system`."""
    parts = (
        _their_objects(system, cluster),
        _their_nodes(system, cluster, node_label),
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


def _their_objects(system: System, cluster: Reader) -> Plan:
    """What the system installed goes, apart from what belongs to Helm, which would miss it."""
    changes, by_hand = [], []
    for resource, name in system.owned:
        found = cluster.find(resource, name)
        if found is None or ours(found):
            continue
        where = f"{resource.kind} {key_of(found)}"
        if release := (found["metadata"].get("annotations") or {}).get(HELM):
            by_hand.append(Note(where, f"belongs to a Helm release: helm uninstall {release}"))
        else:
            what = ("is deleted; running pods go on",)
            changes.append(Change(where, what, resource, *place_of(found), kept=found))
    return Plan(changes=tuple(changes), by_hand=tuple(by_hand))


def _their_nodes(system: System, cluster: Reader, node_label: str) -> Plan:
    """Labels, node by node: only while no pod holds a card there, and only once somebody serves them then."""
    changes, waits, lost = [], [], []
    if not (installed := cluster.installed):
        first = ", once the objects above are gone" if system.replaces_ours else ""
        waits.append(Note("nodes", f"gpuslice is not installed: helm install it{first}, then come again"))
    for node in cluster.nodes:
        if line := lost_on(system, node):
            lost.append(Note(f"node {node['metadata']['name']}", line))
        change = _node_change(system, node, node_label)
        if change is None or not installed:
            continue
        holders = _holders(cluster.pods, node, system.holds)
        if holders and not _one_gpushare_card(system, node):
            waits.append(Note(change.where, _drain(node, holders)))
        else:
            changes.append(change)
    return Plan(tuple(changes), tuple(waits), lost=tuple(lost))


def _their_workloads(system: System, cluster: Reader, sizes: Sizes) -> Plan:
    """Whatever makes pods, and pods that nobody made: in our names."""
    changes, by_hand, lost = [], [], []
    for resource, thing in cluster.workloads():
        for each in _workload(system, resource, thing, sizes, cluster.names):
            if isinstance(each, Change):
                changes.append(each)
            elif isinstance(each, Note):
                by_hand.append(each)
            else:
                lost.append(Note(f"{resource.kind} {key_of(thing)}", each))
    for pod in cluster.bare_pods():
        form = _form(pod)
        with contextlib.suppress(InvalidRequestError):
            if system.translate(form, sizes) != form:
                again = "create it anew in our names: what a pod asks for cannot be changed"
                by_hand.append(Note(f"pod {key_of(pod)}", again))
    return Plan(changes=tuple(changes), by_hand=tuple(by_hand), lost=tuple(lost))


def _node_change(system: System, node: Object, node_label: str) -> Change | None:
    """The labels that make a node ours; None where it is no node of the system, or ours already."""
    labels = node["metadata"].get("labels") or {}
    if not system.is_node(node):
        return None
    wanted = {**system.labels, **({} if system.name == "ack" else {node_label: "true"})}
    wrong = {name: value for name, value in wanted.items() if labels.get(name) != value}
    if not wrong:
        return None
    return _patch(
        NODES.as_dict(),
        node,
        system.name,
        _label_steps(labels, wrong),
        _label_steps({**labels, **wrong}, {name: labels.get(name) for name in wrong}),
        what=tuple(
            f"label {name}={labels.get(name)} is removed" if value is None else f"label {name}={value} is set"
            for name, value in wrong.items()
        ),
    )


def _label_steps(labels: Mapping[str, str | None], wanted: Mapping[str, str | None]) -> list[Object]:
    steps: list[Object] = []
    for name, value in wanted.items():
        path = f"/metadata/labels/{escaped(name)}"
        if value is not None:
            steps.append({"op": "add", "path": path, "value": value})
        elif labels.get(name) is not None:
            steps.append({"op": "remove", "path": path})
    return steps


def _one_gpushare_card(system: System, node: Object) -> bool:
    """Its device ids and records are as ours, and with one card there is no doubt about which."""
    capacity = (node.get("status") or {}).get("capacity") or {}
    return system.name == "gpushare" and str(capacity.get("aliyun.com/gpu-count")) == "1"


def _holders(pods: Iterable[Object], node: Object, holds: Callable[[Object], bool]) -> list[str]:
    name = node["metadata"]["name"]
    return sorted(key_of(pod) for pod in pods if pod["spec"].get("nodeName") == name and holds(pod))


def _drain(node: Object, holders: Sequence[str]) -> str:
    named = ", ".join(holders[:SHOWN_PODS]) + (", …" if len(holders) > SHOWN_PODS else "")
    name = node["metadata"]["name"]
    return (
        f"{counted(len(holders), 'pod')} there hold cards ({named}): kubectl drain {name} "
        f"--ignore-daemonsets --delete-emptydir-data, come again, then kubectl uncordon {name}"
    )


def _workload(
    system: System, resource: Resource[Object], thing: Object, sizes: Sizes, names: ResourceNames
) -> list[Change | Note | str]:
    """What becomes of one thing that makes pods: a change or a note; and what gets lost, as sentences."""
    path = WORKLOADS[resource]
    template: Object = thing
    for part in path.strip("/").split("/"):
        template = template.get(part) or {}
    before, where = _form(template), f"{resource.kind} {key_of(thing)}"
    owner = next(
        (each for each in thing["metadata"].get("ownerReferences") or () if each.get("controller")), None
    )
    if owner is not None and owner["kind"] in {each.kind for each in WORKLOADS}:
        return []  # follows its owner
    try:
        after = _renamed(system.translate(before, sizes), before, names)
    except InvalidRequestError as error:
        return [Note(where, str(error))]
    if after == before:
        return [*system.remarks(before)]
    said = [*system.remarks(before)]
    if owner is not None:
        return [Note(where, f"is made by {owner['kind']} {owner['name']}: change it there"), *said]
    if resource == JOBS:
        return [Note(where, "create it anew: the pods of a Job cannot be changed"), *said]
    steps = [*_missing(template, after, path), *_below(path, difference(before, after))]
    back = _below(path, difference(after, before))
    return [_patch(resource, thing, system.name, steps, back, what=tuple(_words(before, after))), *said]


def _renamed(after: PodForm, before: PodForm, names: ResourceNames) -> PodForm:
    """In the names that the nodes offer, where anything was translated."""
    if after == before:
        return before
    containers = tuple(
        replace(each, limits=in_names(each.limits, names), requests=in_names(each.requests, names))
        for each in after.containers
    )
    return replace(after, containers=containers)


def _form(pod: Object) -> PodForm:
    return pod_form(
        msgspec.Raw(msgspec.json.encode({"metadata": pod.get("metadata"), "spec": pod.get("spec")}))
    )


def _missing(template: Object, after: PodForm, path: str) -> Iterator[Object]:
    """Parents that a JSON Patch needs and that an author may have left out."""
    for each in after.containers:
        given = template["spec"][each.shelf][each.index]
        if each.limits and given.get("resources") is None:
            yield {"op": "add", "path": f"{path}/spec/{each.shelf}/{each.index}/resources", "value": {}}


def _below(path: str, operations: Iterable[Operation]) -> list[Object]:
    documents = [each.document() for each in operations]
    return [{**each, "path": path + each["path"]} for each in documents]


def _words(before: PodForm, after: PodForm) -> Iterator[str]:
    for old, new in zip(before.containers, after.containers, strict=True):
        gone = [f"{name} {old.limits[name]}" for name in old.limits if name not in new.limits]
        come = [f"{name} {new.limits[name]}" for name in AMOUNT_NAMES if name in new.limits]
        if old.limits != new.limits:
            lost = [
                f"{name} {before.annotations[name]}"
                for name in before.annotations
                if name not in after.annotations
            ]
            yield f'container "{old.name}": {", ".join(gone or lost)} becomes {", ".join(come)}'
    for name, value in after.labels.items():
        if before.labels.get(name) != value:
            yield f"label {name}={value} is set"
    if before.scheduler != after.scheduler:
        yield f"schedulerName {before.scheduler} becomes {after.scheduler}"
    if before.affinity != after.affinity:
        yield "node affinity to the wanted models is added"


def _patch(
    resource: Resource[Object],
    thing: Object,
    system: str,
    steps: Sequence[Object],
    back: Sequence[Object],
    *,
    what: tuple[str, ...],
) -> Change:
    """A change that bears its own way back."""
    annotations = thing["metadata"].get("annotations")
    record = json.dumps({"from": system, "undo": [*back]}, separators=(",", ":"))
    note = {"op": "add", "path": f"/metadata/annotations/{escaped(ANN_MIGRATION)}", "value": record}
    parent = [] if annotations is not None else [{"op": "add", "path": "/metadata/annotations", "value": {}}]
    return Change(
        f"{'node' if resource.kind == 'Node' else resource.kind} {key_of(thing)}",
        what,
        resource,
        *place_of(thing),
        version=thing["metadata"].get("resourceVersion", ""),
        operations=(*steps, *parent, note),
    )


# -- and back ----------------------------------------------------------------------------------------------


def plan_back(system: System, cluster: Reader) -> Plan:
    """What is to be done now to go back to `system`: all that bears a way back, and what was deleted."""
    changes: list[Change] = []
    waits: list[Note] = []
    for node in cluster.nodes:
        change = _way_back(NODES.as_dict(), node, system.name)
        holders = _holders(cluster.pods, node, lambda pod: not limits_of(pod).isdisjoint(AMOUNT_NAMES))
        if change is not None and holders and not _one_gpushare_card(system, node):
            waits.append(Note(change.where, _drain(node, holders)))
        elif change is not None:
            changes.append(change)
    for resource, thing in cluster.workloads():
        change = _way_back(resource, thing, system.name)
        changes += [change] if change is not None else []
    for key, text in sorted(recorded(cluster.client).items()):
        kept = json.loads(text)
        if key.split(".")[0] != system.name:
            continue
        where = f"{kept['kind']} {key_of(kept)}"
        resource = next(each for each, _ in system.owned if each.kind == kept["kind"])
        found = cluster.find(resource, kept["metadata"]["name"])
        if found is not None and ours(found):
            waits.append(Note(where, "ours has its name: helm uninstall gpuslice's release, then come again"))
        elif found is None:
            changes.append(Change(where, ("is made again",), resource, *place_of(kept), made=kept))
    return Plan(tuple(changes), tuple(waits))


def _way_back(resource: Resource[Object], thing: Object, system: str) -> Change | None:
    text = (thing["metadata"].get("annotations") or {}).get(ANN_MIGRATION)
    record = json.loads(text) if text else {}
    if record.get("from") != system:
        return None
    taken = {"op": "remove", "path": f"/metadata/annotations/{escaped(ANN_MIGRATION)}"}
    what = [f"{each['op']} {each['path']}" for each in record["undo"]]
    version = thing["metadata"].get("resourceVersion", "")
    operations = (*record["undo"], taken)
    where = f"{'node' if resource.kind == 'Node' else resource.kind} {key_of(thing)}"
    return Change(where, tuple(what), resource, *place_of(thing), version=version, operations=operations)
