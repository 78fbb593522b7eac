"""Follows a cluster by watches: the ledger, the objects that explain pods, and the rows that pages show."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.resources import CONFIG_MAPS, NODES, PODS, QUOTAS, SERVICES, Resource
from gpuslice.adapters.kube.views import node_view, unhealthy_view
from gpuslice.adapters.kube.watch import Change, ChangeKind, Reflector
from gpuslice.apps.console.followed_claims import FollowedClaims
from gpuslice.apps.console.kept_pod import Interner, KeptPod, is_exporter, is_plugin, kept_pod
from gpuslice.apps.console.observed_client import ObservedClient
from gpuslice.apps.console.rows import Rows
from gpuslice.core.contract import CLAIM_CLASS, NAME_SETS, SYSTEM_NAMESPACE
from gpuslice.core.ledger import Ledger
from gpuslice.core.mode import rules_of
from gpuslice.core.model import Pod
from gpuslice.core.rejections import KubeletRefusal
from gpuslice.diagnosis.claims import Claims
from gpuslice.diagnosis.cluster import Cluster
from gpuslice.diagnosis.doctor.facts import EXTENDER, HOOKS, SLICES, is_own_hook
from gpuslice.diagnosis.explain.rule import waits_for
from gpuslice.diagnosis.places import place_of
from gpuslice.diagnosis.rejections import rejections_of
from gpuslice.diagnosis.usage import ContainerUsage

T = TypeVar("T")
COUNTED = {
    "units": tuple(f"requests.{names.memory}" for names in NAME_SETS.values()),
    "claims": ("count/resourceclaims.resource.k8s.io",),
    "devices": (f"{CLAIM_CLASS}.deviceclass.resource.k8s.io/devices",),
}
"""Resources of shared cards that a ResourceQuota may limit, by the names used for them."""
NEEDED = ("nodes", "pods")
"""Without these there is nothing to show; the others add to it if they may be read."""
RUNNING = "Running"
"""The phase of a row without one: nearly all pods are running, and the word would be sent for each of them.
"""
AT_ONCE = 200


class Followed:
    """A small collection of which only the current state matters, selected in several ways."""

    def __init__(
        self, client: KubeClient, resource: Resource[dict[str, Any]], *selectors: dict[str, str]
    ) -> None:
        self.plural = resource.plural
        self.reflectors: list[Reflector[dict[str, Any]]] = [
            Reflector(client, resource, lambda _: None, **each)  # type: ignore[arg-type]
            for each in selectors
        ]

    @property
    def synced(self) -> bool:
        return all(each.synced.is_set() for each in self.reflectors)

    def objects(self) -> list[dict[str, Any]]:
        return list({key: found for each in self.reflectors for key, found in each.objects.items()}.values())


class ClusterState:
    """Everything that is known about a cluster. `pods`: those that share cards or seem to, by namespace/name.

    What claims have given out has a separate ledger, in `claims`: see `ledger_of`.
    """

    def __init__(self, client: ObservedClient, rows: Rows, namespace: str = "") -> None:
        self.rows = rows
        self.ledger = Ledger()
        self.claims = Claims()
        self.nodes: dict[str, objects.Node] = {}
        self.pods: dict[str, objects.Pod] = {}
        self.waiting: dict[str, Pod] = {}  # of these, those that are on no node or do not start there
        self.exporters: dict[str, objects.Pod] = {}  # by node
        self.plugins: dict[str, objects.Pod] = {}
        self.work = asyncio.Event()  # set when a change may affect an explanation
        self._unhealthy: dict[str, frozenset[int]] = {}
        self._stale: set[str] = set()
        self._refused: dict[str, tuple[Pod, KubeletRefusal]] = {}  # by uid, pods that kubelet rejected
        self._claiming: dict[str, objects.Pod] = {}  # pods that have claims of any kind
        self._followed = FollowedClaims(client, namespace)
        self._client = client
        self._interner = Interner()
        self._nodes = Reflector(client, NODES, self._node_changed)
        kept = partial(kept_pod, interner=self._interner)
        self._pods = Reflector(client, PODS, self._pod_changed, each=kept, namespace=namespace)
        self._config_maps = Reflector(
            client, CONFIG_MAPS, self._config_map_changed, namespace=SYSTEM_NAMESPACE
        )
        self._quotas = Reflector(client, QUOTAS, self._quota_changed, namespace=namespace)
        self.services = Followed(  # the vendor's by name; by label also ours under another name
            client, SERVICES, {"fields": f"metadata.name={EXTENDER}"}, {"labels": f"component={EXTENDER}"}
        )
        self.slices = Followed(  # a slice has its service's labels; the vendor's may have none
            client, SLICES, {"labels": "app=gpushare"}, {"labels": f"kubernetes.io/service-name={EXTENDER}"}
        )
        self.hooks = [Followed(client, kind, {}) for kind in HOOKS]

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        reflectors: dict[str, Reflector[Any]] = {
            "nodes": self._nodes, "pods": self._pods, "configmaps": self._config_maps, "quotas": self._quotas,
        }  # fmt: skip
        for kind in (self.slices, self.services, *self.hooks):
            reflectors |= {f"{kind.plural} {number}": each for number, each in enumerate(kind.reflectors)}
        async with asyncio.TaskGroup() as tasks:
            for name, reflector in reflectors.items():
                tasks.create_task(reflector.run(), name=f"watch {name}")
            tasks.create_task(self._followed.run(self._renew_claims), name="claims")

    @property
    def synced(self) -> bool:
        """Whether everything that may be read has been read."""
        return self._pods.synced.is_set() and (self._nodes.synced.is_set() or not self.may_list_nodes)

    @property
    def may_list_nodes(self) -> bool:
        return NODES.plural not in self._client.forbidden

    def cluster(self, usage: Mapping[str, Sequence[ContainerUsage]]) -> Cluster:
        """All that is known now, for what is derived from it at once: the ledger goes on with the watches."""
        now = datetime.now(UTC)
        return Cluster(
            list(self.nodes.values()),
            list(self.pods.values()),
            [each for each in self._config_maps.objects.values() if each.data is not None],
            self.claims,
            rejections=rejections_of(self._refused.values(), self.ledger.pods.values(), now.timestamp()),
            usage=usage,
            now=now,
            followed=self.ledger,
            partial=True,
        )

    def own_hooks(self) -> list[dict[str, Any]]:
        return [
            each | {"kind": kind.kind}
            for kind, hook in zip(HOOKS, self.hooks, strict=True)
            for each in hook.objects()
            if is_own_hook(each)
        ]

    @property
    def follows_claims(self) -> bool:
        return self._followed.synced

    def view(self, pod: objects.Pod) -> Pod | None:
        """One of `pods` with what it requests and holds, by either way."""
        claimed = self.claims.of(pod)
        return claimed.pod if claimed is not None else self.ledger.pods.get(pod.metadata.uid)

    def ledger_of(self, node: str) -> Ledger:
        """The ledger that counts what is given out on this node."""
        return self.claims.ledger if self.claims.ledger.state(node) is not None else self.ledger

    # -- changes -------------------------------------------------------------------------------------------

    def _pod_changed(self, change: Change[KeptPod]) -> None:
        if change.object is None:
            return
        meta, pod = change.object.metadata, change.object.pod
        view, change.object.view = change.object.view, None  # the ledger has it from now on
        key = sys.intern(f"{meta.namespace}/{meta.name}")
        before = self.ledger.pods.get(meta.uid)
        if before is not None:
            self._touch(before.node)
        if change.kind is ChangeKind.DELETED or view is None:
            self._refused.pop(meta.uid, None)
            self.ledger.remove_pod(meta.uid)
            if self._claiming.pop(key, None) is not None:
                self._followed.follow()
            self.exporters.pop(meta.name, None)
            self.plugins.pop(key, None)
            self._forget(key)
            return
        if change.object.refusal is not None:
            self._refused[meta.uid] = view, change.object.refusal
        self.ledger.apply_pod(view)
        self._claiming.pop(key, None)
        if pod is None:
            self._forget(key)
        elif is_exporter(pod):
            self.exporters[meta.name] = pod
        elif is_plugin(pod):
            self.plugins[key] = pod
        elif pod.claims and not (view.request or view.problem):
            self._claiming[key] = pod
            self._followed.follow()
        else:
            self._show(key, pod, view)

    def _show(self, key: str, pod: objects.Pod, view: Pod) -> None:
        self.pods[key] = pod
        self._touch(view.node)
        self.rows.put("pods", key, _pod_row(view, pod), view.namespace)
        if not view.node or _is_stuck(pod):
            self.waiting[key] = view
        elif self.waiting.pop(key, None) is not None:
            self.rows.drop("waiting", key)
        self.work.set()

    async def _renew_claims(self) -> None:
        """Claims, slices, nodes or pods changed: recompute who holds the cards of nodes with claims."""
        before = self.claims.nodes()
        self.claims = await self._followed.known(self.nodes.values(), self._claiming.values())
        for name in {*before, *self.claims.nodes()}:
            self._touch(name)
        for number, (key, pod) in enumerate(list(self._claiming.items())):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            if self._claiming.get(key) is not pod:
                continue  # it changed in the meantime, so this runs again
            claimed = self.claims.of(pod)
            if claimed is None:  # its claims are for something else
                self._forget(key)
            else:
                self._show(key, pod, claimed.pod)
        self.work.set()

    def _forget(self, key: str) -> None:
        if self.pods.pop(key, None) is not None:
            for table in ("pods", "podUsage", "waiting"):
                self.rows.drop(table, key)
            self.waiting.pop(key, None)
            self.work.set()

    def _node_changed(self, change: Change[objects.Node]) -> None:
        if change.object is None:
            return
        name = change.object.metadata.name
        if change.kind is ChangeKind.DELETED:
            self.nodes.pop(name, None)
            self.ledger.remove_node(name)
            self.rows.drop("nodes", name)
            self.rows.drop("cardUsage", name)
        else:
            status, interner = change.object.status, self._interner
            status.capacity = interner.one(status.capacity)
            status.allocatable = interner.one(status.allocatable)
            self.nodes[name] = change.object
            self.ledger.apply_node(node_view(change.object, self._unhealthy.get(name, frozenset())))
            self._touch(name)
        by_claims = rules_of(change.object.metadata.labels or {}).claims
        if by_claims or self.ledger_of(name) is not self.ledger:
            self._followed.follow()
        self.work.set()

    def _config_map_changed(self, change: Change[objects.ConfigMap]) -> None:
        found = unhealthy_view(change.object) if change.object is not None else None
        if found is None:
            if change.object is not None:
                change.object.data = None  # not needed, and may be large
            return
        name, cards, _ = found
        self._unhealthy[name] = frozenset() if change.kind is ChangeKind.DELETED else cards
        node = self.nodes.get(name)
        if node is not None:
            self.ledger.apply_node(node_view(node, self._unhealthy[name]))
            self._touch(name)
            self.work.set()

    def _quota_changed(self, change: Change[dict[str, Any]]) -> None:
        if change.object is None:
            return
        meta, status = change.object["metadata"], change.object.get("status") or {}
        limits = {} if change.kind is ChangeKind.DELETED else status.get("hard") or {}
        for counted, names in COUNTED.items():
            key = f"{meta['namespace']}/{meta['name']}/{counted}"
            name = next((each for each in names if each in limits), "")
            if not name:
                self.rows.drop("quotas", key)
                continue
            row = {"namespace": meta["namespace"], "name": meta["name"], "of": counted, "hard": limits[name]}
            row["used"] = (status.get("used") or {}).get(name, "0")
            self.rows.put("quotas", key, row, meta["namespace"])

    # -- rows of nodes -------------------------------------------------------------------------------------

    def _touch(self, name: str) -> None:
        """Write a node's row once for all changes to it in one step."""
        if name and not self._stale:
            asyncio.get_running_loop().call_soon(self._write_nodes)
        if name:
            self._stale.add(name)

    def _write_nodes(self) -> None:
        stale, self._stale = self._stale, set()
        for name in stale:
            node = self.nodes.get(name)
            if node is not None:
                self.rows.put("nodes", name, self._node_row(name, node))

    def _node_row(self, name: str, node: objects.Node) -> dict[str, Any]:
        ledger, place = self.ledger_of(name), place_of(node)
        state = ledger.state(name)
        row: dict[str, Any] = {"name": name}
        if not place.ready or not place.schedulable:
            row["state"] = "cordoned" if place.ready else "notReady"
        if state is None or not state.node.cards:
            return row
        holds = ledger.holds.on(name)
        used = holds.used() if holds is not None else {}
        compute = holds.compute_used() if holds is not None and state.node.compute_percent else {}
        models = {card.model for card in state.node.cards}
        row["model"] = ", ".join(sorted(filter(None, models)))
        row["shared"] = state.node.shared
        row["cards"] = [
            [card.index, card.units, card.memory_mib, used.get(card.index, 0), compute.get(card.index, 0)]
            for card in state.node.cards
        ]
        sick = sorted(state.node.unhealthy) if state.node.shared else []
        if sick:
            reasons = (
                (each.data or {}).get("reasons", "")
                for each in self._config_maps.objects.values()
                if (found := unhealthy_view(each)) is not None and found[0] == name
            )
            row["sick"], row["reason"] = sick, next(reasons, "")
        if state.node.problem:
            row["problem"] = state.node.problem
        return row


def _is_stuck(pod: objects.Pod) -> bool:
    """It is on its node, and one of its containers is waiting there for something that may never come."""
    return any(map(waits_for, pod.status.container_statuses or ()))


def _pod_row(view: Pod, pod: objects.Pod) -> dict[str, Any]:
    row: dict[str, Any] = {
        "namespace": view.namespace,
        "name": view.name,
        "units": view.request.units if view.request is not None else 0,
    }
    if view.request is not None and view.request.card_count > 1:
        row["cards"] = view.request.card_count
    if view.request is not None and view.request.compute_percent:
        row["compute"] = view.request.compute_percent
    phase = "Terminating" if view.terminating else pod.status.phase or "Pending"
    if phase != RUNNING:
        row["phase"] = phase
    if not view.node or _is_stuck(pod):
        row["created"] = pod.metadata.creation_timestamp
    if view.node:
        row["node"] = view.node
    if view.placement is not None:
        row["slices"] = [[part.card, part.units] for part in view.placement.slices]
    if view.problem:
        row["problem"] = view.problem
    statuses = pod.status.container_statuses or ()
    if restarts := sum(each.restart_count for each in statuses):
        row["restarts"] = restarts
    if reason := next(filter(None, map(waits_for, statuses)), pod.status.reason):
        row["reason"] = reason
    return row
