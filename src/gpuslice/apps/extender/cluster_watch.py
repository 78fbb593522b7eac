"""Keeps the ledger in step with the API server: pods, nodes and the ConfigMaps of unhealthy cards."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Sequence

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.followed_pod import FollowedPod, PodNews, followed_pod, pod_news
from gpuslice.adapters.kube.resources import CONFIG_MAPS
from gpuslice.adapters.kube.slim import SLIM_NODES, SLIM_PODS, SlimNode, strip
from gpuslice.adapters.kube.views import node_view, unhealthy_view
from gpuslice.adapters.kube.watch import AT_ONCE, Change, ChangeKind, Reflector
from gpuslice.apps.extender.subscriber import Subscriber
from gpuslice.core.contract import SYSTEM_NAMESPACE
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Node
from gpuslice.core.views import version_number, with_unhealthy

_log = logging.getLogger(__name__)

CALM_GC = (20_000, 50, 100)  # collect only young garbage, and rarely: requests produce little


class ClusterWatch:
    """Three reflectors, which update the ledger and then tell all `subscribers`."""

    def __init__(
        self,
        client: KubeClient,
        ledger: Ledger,
        subscribers: Sequence[Subscriber],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = ledger
        self._client = client
        self._subscribers = subscribers
        self._unhealthy: dict[str, frozenset[int]] = {}
        self.pods = Reflector(client, SLIM_PODS, self._pod_changed, each=followed_pod, clock=clock)
        self.nodes = Reflector(client, SLIM_NODES, self._node_changed, clock=clock)
        self.config_maps = Reflector(
            client, CONFIG_MAPS, self._config_map_changed, namespace=SYSTEM_NAMESPACE, clock=clock
        )
        self.synced = False  # each of them has been read once

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.config_maps.run(), name="watch configmaps")
            tasks.create_task(self.nodes.run(), name="watch nodes")
            await self.nodes.synced.wait()  # pods without cards count only on nodes with cards
            tasks.create_task(self.pods.run(), name="watch pods")
            await self.until_synced()
            self.ledger.flush()
            gc.collect()
            gc.freeze()  # the cluster's objects stay, so later collections need not walk over them
            gc.set_threshold(*CALM_GC)

    def silent_s(self) -> dict[str, float]:
        """For how many seconds each watch has been silent."""
        return {
            "configmaps": self.config_maps.silent_s(),
            "nodes": self.nodes.silent_s(),
            "pods": self.pods.silent_s(),
        }

    async def until_synced(self) -> None:
        for reflector in (self.config_maps, self.nodes, self.pods):
            await reflector.synced.wait()
        self.synced = True

    async def reread_pods(self) -> None:
        """Read the pods from the API server now instead of waiting for the watch: after a takeover."""
        listing = await self._client.list_as(SLIM_PODS, pod_news)
        for number, news in enumerate(listing.items or (), start=1):
            if news.view.uid not in self.ledger.gone:  # else the watch has said so since the list was made
                self._apply_pod(news)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)  # nothing is decided yet, but the lease has to be renewed

    # -- changes -------------------------------------------------------------------------------------------

    def _pod_changed(self, change: Change[FollowedPod]) -> None:
        if change.object is None:
            self._drop_unlisted(version_number(change.version))
            for each in self._subscribers:
                each.pods_listed()
            return
        meta = change.object.metadata
        news, change.object.news = change.object.news, None  # the ledger has it from now on
        if change.kind is ChangeKind.DELETED or news is None:
            self._forget(meta.uid)
        else:
            self._apply_pod(news)

    def _apply_pod(self, news: PodNews) -> None:
        before = self.ledger.holds.of(news.view.uid)
        self.ledger.apply_pod(news.view)
        for each in self._subscribers:
            each.pod_changed(news, before)

    def _drop_unlisted(self, version: int) -> None:
        """After a list: forget pods that were read one by one before it and are gone."""
        listed = {pod.metadata.uid for pod in self.pods.objects.values()}
        for uid in [uid for uid, pod in self.ledger.pods.items() if 0 < pod.version <= version]:
            if uid not in listed:
                self._forget(uid)

    def _forget(self, uid: str) -> None:
        before = self.ledger.holds.of(uid)
        self.ledger.remove_pod(uid)
        for each in self._subscribers:
            each.pod_gone(uid, before)

    def _node_changed(self, change: Change[SlimNode]) -> None:
        if change.object is None:
            return
        name = change.object.metadata.name
        if change.kind is ChangeKind.DELETED:
            self.ledger.remove_node(name)
            for each in self._subscribers:
                each.node_gone(name)
            return
        self._apply_node(node_view(change.object, self._unhealthy.get(name, frozenset())))
        for each in self._subscribers:
            each.node_changed(change.object)
        strip(change.object)

    def _config_map_changed(self, change: Change[objects.ConfigMap]) -> None:
        found = unhealthy_view(change.object) if change.object is not None else None
        if found is None:
            return
        name, cards, problem = found
        if change.kind is ChangeKind.DELETED:
            cards = frozenset()
            self._unhealthy.pop(name, None)
        else:
            self._unhealthy[name] = cards
            if problem:
                _log.warning("unhealthy cards not read", extra={"node": name, "problem": problem})
        state = self.ledger.state(name)
        if state is not None:
            self._apply_node(with_unhealthy(state.node, cards))
        for each in self._subscribers:
            each.cards_out_of_use(name, cards)

    def _apply_node(self, node: Node) -> None:
        known = self.ledger.state(node.name)
        if node.problem and (known is None or known.node.problem != node.problem):
            _log.warning("node not read in full", extra={"node": node.name, "problem": node.problem})
        self.ledger.apply_node(node)
