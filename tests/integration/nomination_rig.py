"""An extender and a queue of pods in virtual time; the test is kube-scheduler: one pod after another."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.wire.extender import BindingArgs, Questions
from gpuslice.apps.extender.main import WEB_LIMITS, Extender
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.apps.extender.speedups.nominator import LIMITS, NominationLimits
from gpuslice.core.contract import ANN_INDEX
from tests.integration.extender_rig import Api
from tests.integration.virtual import START_NS, HeldTransport, Message, Network, Played, Process, VirtualLoop
from tests.speedups import with_speedups

Object = dict[str, Any]
PODS = "/api/v1/namespaces/default/pods"
NODES = 120
CARDS, UNITS = 2, 15


class Counting(Network):
    """Remembers what reached the API server."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.writes: list[tuple[str, str]] = []

    def deliver(self, message: Message) -> None:
        if message.request.method != "GET":
            self.writes.append((message.request.method, message.request.path))
        super().deliver(message)


class Queue(Played):
    """Pods that wait, and what becomes of them."""

    network: Counting

    def __init__(self, nodes: int = NODES, limits: NominationLimits = LIMITS, **settings: Any) -> None:
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.api = Api()
        self.nodes = [f"n{number:03}" for number in range(nodes)]
        for name in self.nodes:
            self.api.add_node(name, UNITS * CARDS, CARDS)
        self.network = Counting(self.api.cluster, self.loop)
        self.settings = ExtenderSettings(
            **{"policy": "binpack", "preemption": False, "nominate_from": 1, **settings}
        )
        self.limits = limits
        self.start()

    def start(self) -> None:
        self.process = Process("extender", self.loop)
        client = KubeClient(HeldTransport(self.network, self.process))
        self.extender = Extender(
            self.settings,
            client,
            nomination_limits=self.limits,
            with_speedups=with_speedups(),
            now_ns=lambda: START_NS + int(self.loop.time() * 1e9),
        )
        self.process.start(self.extender.work(), "work")
        self.loop.settle()
        self.calm()

    def calm(self, seconds: float = 0.0) -> None:
        """Let that much time pass, and everything arrive that is sent meanwhile."""
        self.network.calm()
        for _ in range(int(seconds)):
            self.loop.advance(1.0)
            self.network.calm()
        self.process.check()

    # -- the user ------------------------------------------------------------------------------------------

    def add(self, *names: str, units: int = 4, **fields: Any) -> None:
        for name in names:
            self.api.add_pod(name, str(units), **fields)
        self.calm()

    # -- kube-scheduler --------------------------------------------------------------------------------------

    def search(self, name: str, *nodes: str) -> list[str]:
        """Ask about all nodes, or about those that its own filters leave; the nodes that would do."""
        found = self._ask(name, list(nodes or self.nodes))
        self.calm()
        return found

    def score(self, name: str, nodes: list[str]) -> dict[str, int]:
        """How well each of `nodes` would suit."""
        body = msgspec.json.encode({"Pod": self.api.pod(name), "NodeNames": nodes})

        async def ask() -> bytes:
            return self.extender.cycle.prioritize(Questions(WEB_LIMITS).decode(body))

        return {each["Host"]: each["Score"] for each in msgspec.json.decode(self._done(ask()))}

    def take(self, name: str) -> str:
        """As kube-scheduler does it: the nominated node if there is one, else the best of all; bound."""
        node = self.nominated(name)
        if not node or not self._ask(name, [node]):
            node = self._ask(name, self.nodes)[0]  # with filter_best=1
        self.bind(name, node)
        return node

    def _ask(self, name: str, nodes: list[str]) -> list[str]:
        body = msgspec.json.encode({"Pod": self.api.pod(name), "NodeNames": nodes})

        async def ask() -> list[str]:
            answer = self.extender.cycle.filter(Questions(WEB_LIMITS).decode(body))
            passed: list[str] = msgspec.json.decode(answer.node_names)
            return passed

        found: list[str] = self._done(ask())
        return found

    def bind(self, name: str, node: str) -> None:
        meta = self.api.pod(name)["metadata"]
        args = BindingArgs(pod_name=name, pod_namespace="default", pod_uid=meta["uid"], node=node)
        task = self.process.start(self.extender.binder.bind(args), "bind call")
        self.loop.settle()
        self.calm()
        assert task.result() == ""

    def _done(self, work: Any) -> Any:
        task = self.process.start(work, "filter call")
        self.loop.settle()
        return task.result()

    # -- what is seen ----------------------------------------------------------------------------------------

    def nominated(self, name: str) -> str:
        node: str = self.api.pod(name)["status"].get("nominatedNodeName", "")
        return node

    def where(self, name: str) -> tuple[str, str | None]:
        return self.api.bound_to(name), self.api.card(name)

    def marked(self, name: str) -> bool:
        return ANN_INDEX in self.api.annotations(name)

    def writes(self, name: str) -> list[tuple[str, str]]:
        """What was written to a pod: method and subresource."""
        path = f"{PODS}/{name}"
        return [
            (method, sent.removeprefix(path).lstrip("/"))
            for method, sent in self.network.writes
            if sent == path or sent.startswith(f"{path}/")
        ]

    @property
    def results(self) -> dict[str, int]:
        return dict(self.extender.shortcuts.results)
