"""Switching a node to claims, and back: its label, the restart of its agent, and which pods must end.

Nothing is drained. Pods that hold no part of a card are not affected; those that do keep it, and the agent
gives out the cards in the other way once the last of them has ended. Therefore the label may be set at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import NotFoundError
from gpuslice.adapters.kube.objects import Node, Pod
from gpuslice.adapters.kube.resources import NAMESPACES, NODES, PODS
from gpuslice.core import model
from gpuslice.core.contract import CLAIM_CLASS, GPU_MEM, LABEL_CLAIMS, LABEL_MODE
from gpuslice.core.explanation import explain
from gpuslice.core.form import escaped
from gpuslice.core.mode import rules_of, wants_agent
from gpuslice.core.model import NodeMode
from gpuslice.core.words import counted
from gpuslice.diagnosis.claims import view_with_claims
from gpuslice.diagnosis.cluster import Cluster, read_cluster
from gpuslice.diagnosis.doctor.facts import DEVICE_CLASSES, PLUGIN_LABELS
from gpuslice.diagnosis.names import NoSuchNodeError
from gpuslice.diagnosis.places import place_of, wish_of
from gpuslice.migration.plan import Note, Plan
from gpuslice.migration.systems import Object
from gpuslice.migration.writes import Change, unchanged

NO_CLASS = (
    f"there is no DeviceClass {CLAIM_CLASS}: helm upgrade with --set dra.enabled=true (Kubernetes 1.34 or "
    "newer), then run this again"
)


async def plan_claims(client: KubeClient, names: Sequence[str], node_label: str, *, back: bool) -> Plan:
    """What has to be done now for these nodes; `back`: to give out their cards as the extended resource.

    Raises `NoSuchNodeError`.
    """
    cluster, spaces = await read_cluster(client), await client.all(NAMESPACES)
    if unknown := [name for name in names if name not in cluster.by_name]:
        raise NoSuchNodeError(unknown[0], [*cluster.by_name])
    agents = await client.all(PODS, labels=PLUGIN_LABELS)
    labels_of = {each["metadata"]["name"]: each["metadata"].get("labels") or {} for each in spaces}
    changes: list[Change] = []
    waits: list[Note] = []
    by_hand: list[Note] = []
    must_go: list[Note] = []
    installed = True
    if not back:
        try:
            await client.get(DEVICE_CLASSES, CLAIM_CLASS)
        except NotFoundError:
            installed = False
            waits.append(Note("cluster", NO_CLASS))
    for name in names:
        node = cluster.by_name[name]
        labels = node.metadata.labels or {}
        if not wants_agent(labels, node_label):
            what = f"is none whose cards gpuslice gives out: label it {node_label}=true first"
            by_hand.append(Note(f"node {name}", what))
            continue
        if rules_of(labels).claims == back and installed:
            changes += _switch(node, agents, back=back)
        must_go += _must_go(cluster, name, names, labels_of, to_claims=not back)
    return Plan(tuple(changes), tuple(waits), tuple(by_hand), must_go=tuple(must_go))


def _switch(node: Node, agents: Sequence[Pod], *, back: bool) -> Iterator[Change]:
    """The label, and then the agent, which reads the label when it starts."""
    name, labels = node.metadata.name, node.metadata.labels or {}
    path = f"/metadata/labels/{escaped(LABEL_MODE)}"
    step: Object = {"op": "add", "path": path, "value": str(NodeMode.CLAIMS)}
    what = f"label {LABEL_MODE}={NodeMode.CLAIMS} is set"
    if back:
        step = {"op": "remove", "path": path}
        what = f"label {LABEL_MODE}={labels[LABEL_MODE]} is removed"
    version, tests = unchanged(NODES.as_dict(), {"metadata": {"labels": labels}})
    yield Change(f"node {name}", (what,), NODES.as_dict(), "", name, version, (*tests, step))
    for meta in (agent.metadata for agent in agents if agent.spec.node_name == name):
        where = f"pod {meta.namespace}/{meta.name}"
        again = "the agent is restarted so that it reads the label; containers keep running"
        yield Change(where, (again,), PODS.as_dict(), meta.namespace, meta.name, ended=True)


def _must_go(
    cluster: Cluster,
    node: str,
    switched: Sequence[str],
    labels_of: Mapping[str, Mapping[str, str]],
    *,
    to_claims: bool,
) -> Iterator[Note]:
    """Pods that hold a part of a card there in the way that is being given up, and whether there is another
    place for them. `labels_of`: namespaces."""
    for pod in cluster.pods:
        view, claimed = view_with_claims(pod, cluster.claims)
        if view.node != node or view.finished or view.request is None or (claimed is None) != to_claims:
            continue
        held = counted(view.request.units, "unit")
        slices = view.placement.slices if view.placement is not None else ()
        card = f" of card {', '.join(str(part.card) for part in slices)}" if slices else ""
        how = "by the device plugin" if to_claims else "by a claim"
        owner = next((each.kind for each in pod.metadata.owner_references or () if each.controller), "")
        again = "nothing recreates it: do so yourself once it has ended or you have deleted it"
        if owner:
            own = labels_of.get(view.namespace, {})
            label = (pod.metadata.labels or {}).get(LABEL_CLAIMS, own.get(LABEL_CLAIMS))
            again = f"its {owner} recreates it, and it may come back here"
            if (label == "true") != to_claims:
                again = _elsewhere(cluster, pod, view, owner, switched, to_claims=to_claims)
        yield Note(f"pod {view.key}", f"holds {held}{card} {how}: {again}")


def _elsewhere(
    cluster: Cluster, pod: Pod, view: model.Pod, owner: str, switched: Sequence[str], *, to_claims: bool
) -> str:
    """Where a pod that cannot come back would be placed again after it was deleted."""
    assert view.request is not None
    places = [place_of(each) for name, each in cluster.by_name.items() if name not in switched]
    ledger = cluster.ledger if to_claims else cluster.ledger_of_claims
    answer = explain(ledger, places, wish_of(pod, view.request, claims=not to_claims))
    if fits := [each.detail.partition(",")[0] for each in answer.classes if each.fits]:
        return f"its {owner} recreates it, and {fits[0]} has room for it"
    way = f"take label {LABEL_CLAIMS} from its namespace to have it here as {GPU_MEM}"
    if to_claims:
        way = f"label its namespace {LABEL_CLAIMS}=true to have it here"
    return f"recreated, it waits, because no other node has room: {way}"
