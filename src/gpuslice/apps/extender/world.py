"""Keeps the ledger in step with the API server: pods, nodes and the ConfigMaps of unhealthy cards."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.resources import CONFIG_MAPS
from gpuslice.adapters.kube.slim import SLIM_NODES, SLIM_PODS, SlimNode, SlimPod, strip
from gpuslice.adapters.kube.terms import Terms, terms_of
from gpuslice.adapters.kube.views import node_view, pod_view, unhealthy_view
from gpuslice.adapters.kube.watch import Change, ChangeKind, Reflector
from gpuslice.apps.extender.own_writes import OwnWrites
from gpuslice.core.contract import NODE_OUT_OF_USE, SYSTEM_NAMESPACE
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Node, Pod
from gpuslice.core.views import with_unhealthy

_log = logging.getLogger(__name__)

CALM_GC = (20_000, 50, 100)  # young garbage only, and seldom: requests make little of it

Told = Callable[[Pod], None]


class Onlooker(Protocol):
    """Hears of pods that wait, with what they say about where they may run, and when they wait no more."""

    def waits(self, pod: Pod, terms: Terms | None) -> None: ...
    def left(self, uid: str) -> None: ...


class FenceWatch(Protocol):
    """Hears which cards are out of use, and what a node's annotation says about it."""

    def set(self, node: str, cards: frozenset[int]) -> None: ...
    def seen(self, node: str, text: str) -> None: ...


class World:
    """Three reflectors and what they feed. `problem` hears of a pod whose annotations cannot be read."""

    def __init__(self, client: KubeClient, ledger: Ledger, *, problem: Told = lambda _: None) -> None:
        self.ledger = ledger
        self.onlooker: Onlooker | None = None
        self.own_writes = OwnWrites()
        self.fences: FenceWatch | None = None
        self._client = client
        self._problem = problem
        self._unhealthy: dict[str, frozenset[int]] = {}
        self.pods = Reflector(client, SLIM_PODS, self._pod_changed)
        self.nodes = Reflector(client, SLIM_NODES, self._node_changed)
        self.config_maps = Reflector(
            client, CONFIG_MAPS, self._config_map_changed, namespace=SYSTEM_NAMESPACE
        )
        self._told: set[str] = set()
        self.synced = False  # each of them has been read once

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.config_maps.run(), name="watch configmaps")
            tasks.create_task(self.nodes.run(), name="watch nodes")
            tasks.create_task(self.pods.run(), name="watch pods")
            await self.until_synced()
            self.ledger.flush()
            gc.collect()
            gc.freeze()  # the cluster stays: no later collection need walk over it
            gc.set_threshold(*CALM_GC)

    async def until_synced(self) -> None:
        for reflector in (self.config_maps, self.nodes, self.pods):
            await reflector.synced.wait()
        self.synced = True

    async def reread_pods(self) -> None:
        """Bring in what the API server knows now, not when the watch will tell: after a take-over."""
        listing = await self._client.list(SLIM_PODS)
        for pod in listing.items or ():
            self.ledger.apply_pod(pod_view(pod))

    # -- changes -------------------------------------------------------------------------------------------

    def _pod_changed(self, change: Change[SlimPod]) -> None:
        if change.object is None:
            return
        uid = change.object.metadata.uid
        own = self.own_writes.shown(uid, change.object.metadata.resource_version)
        if change.kind is ChangeKind.DELETED:
            self.ledger.remove_pod(uid)
            self._tell_left(uid)
            self._told.discard(uid)
            return
        if own:
            strip(change.object)
            return
        pod = pod_view(change.object)
        waits = not pod.node and pod.request is not None and self.onlooker is not None
        terms = terms_of(change.object) if waits else None
        strip(change.object)  # the ledger has it now; the reflector needs no more than its version
        self.ledger.apply_pod(pod)
        if waits and self.onlooker is not None:
            self.onlooker.waits(pod, terms)
        else:
            self._tell_left(pod.uid)
        self._tell(pod)

    def _tell_left(self, uid: str) -> None:
        if self.onlooker is not None:
            self.onlooker.left(uid)

    def _tell(self, pod: Pod) -> None:
        if not pod.problem or pod.finished:
            self._told.discard(pod.uid)
        elif pod.uid not in self._told:
            self._told.add(pod.uid)
            _log.warning("pod's annotations are unreadable", extra={"pod": pod.key, "problem": pod.problem})
            self._problem(pod)

    def _node_changed(self, change: Change[SlimNode]) -> None:
        if change.object is None:
            return
        if change.kind is ChangeKind.DELETED:
            self.ledger.remove_node(change.object.metadata.name)
            self._see_fence(change.object.metadata.name, None)
        else:
            name = change.object.metadata.name
            self._see_fence(name, change.object.metadata.annotations)
            self._apply_node(node_view(change.object, self._unhealthy.get(name, frozenset())))
            strip(change.object)

    def _config_map_changed(self, change: Change[objects.ConfigMap]) -> None:
        found = unhealthy_view(change.object) if change.object is not None else None
        if found is None:
            return
        name, cards, problem = found
        if change.kind is ChangeKind.DELETED:
            self._unhealthy.pop(name, None)
        else:
            self._unhealthy[name] = cards
            if problem:
                _log.warning("unhealthy cards not read", extra={"node": name, "problem": problem})
        state = self.ledger.state(name)
        if state is not None:
            self._apply_node(with_unhealthy(state.node, self._unhealthy.get(name, frozenset())))
        if self.fences is not None:  # only now that the ledger knows
            self.fences.set(name, self._unhealthy.get(name, frozenset()))

    def _see_fence(self, name: str, annotations: Mapping[str, str] | None) -> None:
        if self.fences is not None:
            self.fences.seen(name, (annotations or {}).get(NODE_OUT_OF_USE, ""))

    def _apply_node(self, node: Node) -> None:
        known = self.ledger.state(node.name)
        if node.problem and (known is None or known.node.problem != node.problem):
            _log.warning("node not read in full", extra={"node": node.name, "problem": node.problem})
        self.ledger.apply_node(node)
