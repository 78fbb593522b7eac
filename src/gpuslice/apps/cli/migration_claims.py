"""Switching a node to claims, and back: its label, the restart of its agent, and which pods must end.

Nothing is drained. Pods that hold no part of a card are not affected; those that do keep it, and the agent
gives out the cards in the other way once the last of them has ended. Therefore the label may be set at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from gpuslice.adapters.kube.errors import NotFoundError
from gpuslice.adapters.kube.objects import Node, Pod
from gpuslice.adapters.kube.resources import NAMESPACES, NODES, PODS
from gpuslice.adapters.kube.sync import SyncClient
from gpuslice.adapters.kube.views import node_view, pod_view
from gpuslice.apps.cli.migration import Note, Plan
from gpuslice.apps.cli.migration_reader import Reader
from gpuslice.apps.cli.migration_systems import Object
from gpuslice.apps.cli.migration_writes import Change, unchanged
from gpuslice.apps.diagnosis.claims import Claims, read_claims, view_with_claims
from gpuslice.apps.diagnosis.constraints import place_of, wish_of
from gpuslice.apps.diagnosis.doctor_facts import DEVICE_CLASSES, PLUGIN_LABELS
from gpuslice.core import model
from gpuslice.core.contract import CLAIM_CLASS, GPU_MEM, LABEL_CLAIMS, LABEL_MODE
from gpuslice.core.explanation import explain
from gpuslice.core.form import escaped
from gpuslice.core.ledger import Ledger
from gpuslice.core.mode import rules_of, wants_agent
from gpuslice.core.model import NodeMode
from gpuslice.core.words import counted

NO_CLASS = (
    f"there is no DeviceClass {CLAIM_CLASS}: helm upgrade with --set dra.enabled=true (Kubernetes 1.34 or "
    "newer), then run this again"
)


def plan_claims(client: SyncClient, names: Sequence[str], node_label: str, *, back: bool) -> Plan:
    """What has to be done now for these nodes; `back`: to give out their cards as the extended resource.

    Raises `NoSuchNodeError`.
    """
    reader = Reader(client, only_nodes=names)
    nodes = [msgspec.convert(each, Node) for each in reader.all_nodes]
    known = {each.metadata.name: each for each in nodes}
    pods = [msgspec.convert(each, Pod) for each in reader.pods]
    cluster = _Cluster(reader, nodes, pods, read_claims(client, nodes, pods))
    changes: list[Change] = []
    waits: list[Note] = []
    by_hand: list[Note] = []
    must_go: list[Note] = []
    installed = True
    if not back:
        try:
            client.get(DEVICE_CLASSES, CLAIM_CLASS)
        except NotFoundError:
            installed = False
            waits.append(Note("cluster", NO_CLASS))
    for name in names:
        labels, where = known[name].metadata.labels or {}, f"node {name}"
        if not wants_agent(labels, node_label):
            what = f"is none whose cards gpuslice gives out: label it {node_label}=true first"
            by_hand.append(Note(where, what))
            continue
        if rules_of(labels).claims == back and installed:
            changes += _switch(client, known[name], back=back)
        must_go += cluster.must_go(name, names, to_claims=not back)
    return Plan(tuple(changes), tuple(waits), tuple(by_hand), must_go=tuple(must_go))


def _switch(client: SyncClient, node: Node, *, back: bool) -> Iterator[Change]:
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
    for agent in client.list(PODS, labels=PLUGIN_LABELS, fields=f"spec.nodeName={name}"):
        meta = agent.metadata
        where = f"pod {meta.namespace}/{meta.name}"
        again = "the agent is restarted so that it reads the label; containers keep running"
        yield Change(where, (again,), PODS.as_dict(), meta.namespace, meta.name, ended=True)


class _Cluster:
    """Determines which pods must leave a node, and whether there is another place for them."""

    def __init__(
        self, reader: Reader, nodes: Sequence[Node], pods: Sequence[Pod], claims: Claims | None
    ) -> None:
        self._nodes, self._pods, self._claims = nodes, pods, claims
        self._owners = {
            each["metadata"]["uid"]: owner["kind"]
            for each in reader.pods
            for owner in each["metadata"].get("ownerReferences") or ()
            if owner.get("controller")
        }
        spaces = reader.client.list(NAMESPACES)
        self._labels = {each["metadata"]["name"]: each["metadata"].get("labels") or {} for each in spaces}
        self._shared = Ledger()
        for node in nodes:
            self._shared.apply_node(node_view(node))
        for pod in pods:
            self._shared.apply_pod(pod_view(pod))

    def must_go(self, node: str, switched: Sequence[str], *, to_claims: bool) -> Iterator[Note]:
        """Pods that hold a part of a card there in the way that is being given up."""
        for pod in self._pods:
            view, claimed = view_with_claims(pod, self._claims)
            if view.node != node or view.finished or view.request is None or (claimed is None) != to_claims:
                continue
            held = counted(view.request.units, "unit")
            slices = view.placement.slices if view.placement is not None else ()
            card = f" of card {', '.join(str(part.card) for part in slices)}" if slices else ""
            how = "by the device plugin" if to_claims else "by a claim"
            again = self._again(pod, view, switched, to_claims=to_claims)
            yield Note(f"pod {view.key}", f"holds {held}{card} {how}: {again}")

    def _again(self, pod: Pod, view: model.Pod, switched: Sequence[str], *, to_claims: bool) -> str:
        """Where a pod would be placed again after it was deleted."""
        if pod.metadata.uid not in self._owners:
            return "nothing recreates it: do so yourself once it has ended or you have deleted it"
        space = self._labels.get(view.namespace, {})
        label = (pod.metadata.labels or {}).get(LABEL_CLAIMS, space.get(LABEL_CLAIMS))
        if (label == "true") == to_claims:
            return f"its {self._owners[view.uid]} recreates it, and it may come back here"
        assert view.request is not None
        places = [place_of(each) for each in self._nodes if each.metadata.name not in switched]
        ledger = self._shared if to_claims else (self._claims or Claims()).ledger
        answer = explain(ledger, places, wish_of(pod, view.request, claims=not to_claims))
        fits = [each.detail.partition(",")[0] for each in answer.classes if each.fits]
        if fits:
            return f"its {self._owners[view.uid]} recreates it, and {fits[0]} has room for it"
        way = f"label its namespace {LABEL_CLAIMS}=true to have it here" if to_claims else ""
        way = way or f"take label {LABEL_CLAIMS} from its namespace to have it here as {GPU_MEM}"
        return f"recreated, it waits, because no other node has room: {way}"
