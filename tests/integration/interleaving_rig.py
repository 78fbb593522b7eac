"""A cluster of real processes' parts in a virtual world: extender, agents, and kubelet's device manager.

kube-scheduler and kubelet are played by the test; what they know of the API server they know at once, so that
only our own processes are slow, late, interrupted or dead.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.views import node_view, pod_view
from gpuslice.adapters.wire.extender import BindingArgs, Questions
from gpuslice.apps.extender.main import WEB_LIMITS, Extender
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.apps.extender.speedups.nominator import NominationLimits
from gpuslice.core.contract import GPU_COUNT
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.request import Request
from tests.builders import api_node, api_pod
from tests.integration.interleaving_node import SMALL_FLEET, Fleet, NodeInMemory, Object
from tests.integration.virtual import START_NS, HeldTransport, Network, Process, VirtualLoop
from tests.speedups import with_speedups


class World:
    """Everything there is. `dice` makes kubelet's random choices."""

    node_class = NodeInMemory

    def __init__(self, folder: Path, seed: int = 0, fleet: Fleet = SMALL_FLEET) -> None:
        self.fleet = fleet
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.dice = random.Random(seed)
        self.cluster = Cluster(clock=self._clock, dice=random.Random(seed), tracks_managers=False)
        self.network = Network(self.cluster, self.loop)
        self.rejections: list[str] = []
        self.clocks_ahead_s: dict[str, float] = {}  # by machine
        self.nodes = {name: self.node_class(name, self, folder / name) for name in fleet.cards}
        for name, cards in fleet.cards.items():
            self.call("POST", "/api/v1/nodes", api_node(name, sum(cards), len(cards)))
        self.extender: Extender | None = None
        self.process: Process | None = None
        self.start_extender()
        for node in self.nodes.values():
            node.start_agent()
        self.rest()

    def _clock(self) -> float:
        return 1_700_000_000.0 + self.loop.time()

    def now_ns(self, machine: str) -> int:
        """The date as that machine has it."""
        return int((self._clock() + self.clocks_ahead_s.get(machine, 0.0)) * 1e9)

    def close(self) -> None:
        for process in self.processes():
            process.kill()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        asyncio.set_event_loop(None)

    # -- the extender --------------------------------------------------------------------------------------

    def start_extender(self) -> None:
        self.process = Process("extender", self.loop)
        client = KubeClient(HeldTransport(self.network, self.process))
        limits = NominationLimits(room=0, spare=0, at_once=2)
        self.extender = Extender(
            ExtenderSettings(policy="binpack", nominate_from=1),
            client,
            nomination_limits=limits,
            clock=self.loop.time,
            now_ns=lambda: START_NS + int(self.loop.time() * 1e9),
            with_speedups=with_speedups(),
        )
        self.process.start(self.extender.work(), "work")
        self.loop.settle()

    def kill_extender(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.network.forget(self.process)
        self.extender = None

    def search(self, pod: Object, *names: str) -> None:
        """kube-scheduler asks where the pod fits, on all nodes or on the one that it is nominated to."""
        if self.extender is None or self.process is None or self.extender.not_ready():
            return
        cycle = self.extender.cycle
        args = {"Pod": pod, "NodeNames": list(names or self.nodes)}

        async def ask() -> None:
            cycle.filter(Questions(WEB_LIMITS).decode(msgspec.json.encode(args)))

        self.process.start(ask(), "filter call")
        self.loop.settle()

    def bind(self, pod: Object, node: str) -> asyncio.Task[Any] | None:
        """kube-scheduler's bind call; it does not wait for the answer here."""
        if self.extender is None or self.process is None or self.extender.not_ready():
            return None
        meta = pod["metadata"]
        args = BindingArgs(pod_name=meta["name"], pod_namespace="default", pod_uid=meta["uid"], node=node)
        task = self.process.start(self.extender.binder.bind(args), "bind call")
        self.loop.settle()
        return task

    # -- the API server, without delay -----------------------------------------------------------------------

    def call(
        self, method: str, path: str, body: Object | None = None, kind: str = "application/json"
    ) -> Object:
        raw = msgspec.json.encode(body) if body is not None else b""
        answer = self.cluster.handle(Request(method, path, {}, {"content-type": kind}, raw))
        found: Object = msgspec.json.decode(answer.body)
        return found

    def create(self, name: str, units: int, cards: int = 1, **fields: Any) -> Object:
        labels = {GPU_COUNT: str(cards)} if cards > 1 else {}
        pod = api_pod(name, str(units), labels=labels, **fields)
        del pod["metadata"]["uid"]
        return self.call("POST", "/api/v1/namespaces/default/pods", pod)

    def delete(self, name: str) -> None:
        self.call("DELETE", f"/api/v1/namespaces/default/pods/{name}")

    def remove(self, pod: Object) -> None:
        """As kubelet does once a pod's containers are gone: only the very pod, without grace."""
        meta = pod["metadata"]
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
        self.call("DELETE", f"/api/v1/namespaces/default/pods/{meta['name']}", options)

    def set_status(self, pod: Object, status: Object) -> None:
        meta = pod["metadata"]
        body = {"metadata": {"uid": meta["uid"]}, "status": status}
        path = f"/api/v1/namespaces/default/pods/{meta['name']}/status"
        self.call("PATCH", path, body, "application/merge-patch+json")

    def pods(self) -> list[Object]:
        found: list[Object] = self.call("GET", "/api/v1/namespaces/default/pods")["items"]
        return found

    def views(self) -> list[Pod]:
        return [pod_view(msgspec.convert(pod, objects.Pod)) for pod in self.pods()]

    def waiting(self, node: str) -> list[Object]:
        """Bound pods that the node's kubelet has not admitted yet."""
        known = self.nodes[node].admitted
        return [
            pod
            for pod in self.pods()
            if pod["spec"].get("nodeName") == node
            and pod["metadata"]["uid"] not in known
            and pod["status"].get("phase") not in ("Failed", "Succeeded")
            and "deletionTimestamp" not in pod["metadata"]
        ]

    def rebuilt(self) -> Ledger:
        """A ledger made from the API server alone."""
        ledger = Ledger()
        for node in self.call("GET", "/api/v1/nodes")["items"]:
            ledger.apply_node(node_view(msgspec.convert(node, objects.Node)))
        for pod in self.views():
            ledger.apply_pod(pod)
        return ledger

    # -- running -------------------------------------------------------------------------------------------

    def play(self, node: NodeInMemory, work: Any) -> None:
        """Something that kubelet does; it does one thing at a time."""
        node.busy = True

        async def once() -> None:
            try:
                await work
            finally:
                node.busy = False

        self.loop.create_task(once())
        self.loop.settle()

    def processes(self) -> Iterator[Process]:
        for process in [self.process, *(node.process for node in self.nodes.values())]:
            if process is not None:
                yield process

    def rest(self, seconds: float = 1.0) -> None:
        """Deliver everything, let time pass, until nothing moves any more."""
        for _ in range(200):
            self.loop.settle()
            if not self.network.calm() and not any(node.busy for node in self.nodes.values()):
                self.loop.advance(seconds)
                if not self.network.calm():
                    return
            else:
                self.loop.advance(0.1)
        raise AssertionError("the world never comes to rest")
