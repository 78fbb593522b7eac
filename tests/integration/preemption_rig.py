"""An extender in a world where the test is kube-scheduler, kubelet and user: the story of a preemption."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.wire.extender import BindingArgs, MetaVictims, Questions
from gpuslice.apps.extender.main import WEB_LIMITS, Extender
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.core.contract import ANN_INDEX, ANN_POD_UNITS
from tests.integration.extender_rig import Api
from tests.integration.virtual import START_NS, HeldTransport, Network, Played, Process, VirtualLoop
from tests.speedups import with_speedups

Object = dict[str, Any]
PODS = "/api/v1/namespaces/default/pods"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"
PREEMPTION = "PreemptionByScheduler"


class Story(Played):
    """A cluster with an extender; the story itself is kube-scheduler, kubelet and the user."""

    def __init__(self, cards: int = 2, nodes: int = 1, *, preemption: bool = True) -> None:
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.api = Api()
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        for name in self.nodes:
            self.api.add_node(name, 15 * cards, cards)
        for value in (0, 5, 10, 20, 30, 100, 200):
            head = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
            self.api.call("POST", CLASSES, head | {"metadata": {"name": f"p{value}"}, "value": value})
        self.uids: dict[str, str] = {}  # of all pods that there were, by name
        self.network = Network(self.api.cluster, self.loop)
        self.settings = ExtenderSettings(policy="binpack", preemption=preemption)
        self.start()
        self.calm()

    def start(self) -> None:
        self.process = Process("extender", self.loop)
        self.extender = Extender(
            self.settings,
            KubeClient(HeldTransport(self.network, self.process)),
            with_speedups=with_speedups(),
            now_ns=self.now_ns,
        )
        self.process.start(self.extender.work(), "work")
        self.loop.settle()

    def now_ns(self) -> int:
        return START_NS + int(self.loop.time() * 1e9)

    def calm(self, seconds: float = 0.0) -> None:
        """Let that much time pass, and everything arrive that is sent meanwhile."""
        self.network.calm()
        for _ in range(int(seconds * 4)):
            self.loop.advance(0.25)
            self.network.calm()

    # -- the user ------------------------------------------------------------------------------------------

    def add(self, name: str, units: int, priority: int = 0, **fields: Any) -> None:
        pod = self.api.add_pod(name, str(units), priorityClassName=f"p{priority}", **fields)
        self.uids[name] = pod["metadata"]["uid"]

    def place(self, name: str, units: int, priority: int = 0, **fields: Any) -> str:
        """Create, bind; the card."""
        self.add(name, units, priority, **fields)
        self.calm()
        self.schedule(name)
        assert self.api.bound_to(name), name
        return self.api.card(name) or ""

    def protect(self, app: str) -> None:
        """A budget that lets no pod with this label go."""
        spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": app}}}
        head = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": f"keep-{app}"}}
        self.api.call("POST", BUDGETS, head | {"spec": spec})

    def names(self) -> set[str]:
        return {pod["metadata"]["name"] for pod in self.api.pods()}

    def leaving(self) -> set[str]:
        return {
            pod["metadata"]["name"] for pod in self.api.pods() if pod["metadata"].get("deletionTimestamp")
        }

    def nominated(self, name: str) -> str:
        node: str = self.api.pod(name)["status"].get("nominatedNodeName", "")
        return node

    # -- kubelet -------------------------------------------------------------------------------------------

    def bury(self, *names: str) -> None:
        for name in names or sorted(self.leaving()):
            self.api.delete_pod(name)
        self.calm()

    # -- kube-scheduler ------------------------------------------------------------------------------------

    def schedule(self, name: str) -> str:
        """One attempt: the nominated node first, then all; what it does with a nomination when none fits."""
        pod = self.api.pod(name)
        nominated = self.nominated(name)
        passing = (nominated and self.ask(pod, [nominated])) or self.ask(pod, self.nodes)
        if not passing:
            if nominated and not self.leaving_for(pod, nominated):
                self.api.patch(f"{PODS}/{name}/status", {"status": {"nominatedNodeName": None}})
            return ""
        meta = pod["metadata"]
        args = BindingArgs(meta["name"], meta["namespace"], meta["uid"], passing[0])
        self.process.start(self.extender.binder.bind(args), f"bind {name}")
        self.loop.settle()
        self.calm()
        return passing[0]

    def ask(self, pod: Object, nodes: list[str]) -> list[str]:
        """The extender's filter, on the nodes whose sum suffices."""
        body = msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": nodes})

        async def answered() -> Any:
            return self.extender.cycle.filter(Questions(WEB_LIMITS).decode(body))

        result = self.loop.run_until_complete(answered())
        found: list[str] = msgspec.json.decode(result.node_names)
        return found

    def propose(self, name: str, *victims: str, node: str = "n1") -> set[str]:
        """kube-scheduler asks whom to evict from one node, these for one; the answer."""
        return self.propose_on(name, {node: victims}).get(node, set())

    def propose_on(self, name: str, victims: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
        """kube-scheduler asks on which of these nodes to evict whom; the answer."""
        answered = self.answer(name, victims)
        names = {uid: victim for victim, uid in self.uids.items()}
        names |= {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in self.api.pods()}
        return {node: {names[pod.uid] for pod in each.pods or ()} for node, each in answered.items()}

    def answer(
        self, name: str, victims: Mapping[str, Collection[str]], lost: str = "nothing"
    ) -> Mapping[str, MetaVictims]:
        """The answer as kube-scheduler reads it; requests are `lost` whose path ends so."""
        uids = self.uids | {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.api.pods()}
        proposed = {
            node: {"Pods": [{"UID": uids[victim]} for victim in its], "NumPDBViolations": 0}
            for node, its in victims.items()
        }
        body = msgspec.json.encode({"Pod": self.api.pod(name), "NodeNameToMetaVictims": proposed})

        async def answered() -> Mapping[str, MetaVictims]:
            args = Questions(WEB_LIMITS).decode_preemption(body)
            return await self.extender.cycle.preempt(args.pod, args.victims())

        asked = self.loop.create_task(answered())
        self.loop.settle()
        while not asked.done():
            for message in list(self.network.messages):  # what it asks; the watch may be late
                is_lost = message.request.path.endswith(lost)
                (self.network.lose_request if is_lost else self.network.deliver)(message)
            if not self.network.messages:
                self.loop.advance(0.01)
        return asked.result()

    def leaving_for(self, pod: Object, node: str) -> bool:
        """Whether a less important pod leaves this node for another, as ``podTerminatingByPreemption``."""
        return any(
            each["spec"].get("nodeName") == node
            and (each["spec"].get("priority") or 0) < pod["spec"]["priority"]
            and each["metadata"].get("deletionTimestamp")
            and any(c.get("reason") == PREEMPTION for c in each["status"].get("conditions") or ())
            for each in self.api.pods()
        )

    def held(self) -> dict[tuple[str, str], int]:
        """Units per card, summed over the annotations of bound pods."""
        sums: dict[tuple[str, str], int] = {}
        for pod in self.api.pods():
            if pod["spec"].get("nodeName"):
                annotations = pod["metadata"]["annotations"]
                card = (pod["spec"]["nodeName"], annotations[ANN_INDEX])
                sums[card] = sums.get(card, 0) + int(annotations[ANN_POD_UNITS])
        return sums

    def on_card(self, card: tuple[str, str]) -> dict[str, int]:
        """Who is bound to a card, with their priority."""
        return {
            pod["metadata"]["name"]: pod["spec"]["priority"]
            for pod in self.api.pods()
            if (pod["spec"].get("nodeName"), pod["metadata"].get("annotations", {}).get(ANN_INDEX)) == card
        }
