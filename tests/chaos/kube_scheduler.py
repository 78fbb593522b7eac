"""kube-scheduler as it is played in a world where things go wrong: filter, bind, and preemption by sums."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import msgspec

from gpuslice.adapters.web.clients import App
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse
from gpuslice.apps.extender.main import Extender
from tests.chaos.checker import asked_units
from tests.integration.virtual import Process

if TYPE_CHECKING:
    from tests.chaos.world import ChaosWorld

Object = dict[str, Any]


class KubeScheduler:
    """One attempt after the other. What it knows of the API server it knows at once, and does so as well."""

    def __init__(self, world: ChaosWorld) -> None:
        self._world = world

    def attempt(self, pod: Object) -> None:
        asked = self._service()
        if asked is not None:
            _, process, _ = asked
            process.start(self._attempt(pod), "kube-scheduler's calls")
            process.tasks = [task for task in process.tasks if not task.done()]
            self._world.loop.settle()

    async def _attempt(self, pod: Object) -> None:
        """Where the pod is nominated to, then anywhere, then by evicting others."""
        nominated = pod["status"].get("nominatedNodeName")
        roomy = [node for node in sorted(self._world.nodes) if self._left(node) >= asked_units(pod)]
        for names in ([nominated], roomy) if nominated in roomy else (roomy,):
            passed = await self._ask("filter", {"Pod": pod, "NodeNames": names}) if names else None
            if passing := (passed or {}).get("NodeNames"):
                meta = pod["metadata"]
                who = {"PodName": meta["name"], "PodNamespace": "default", "PodUID": meta["uid"]}
                await self._ask("bind", {**who, "Node": self._world.dice.choice(passing)})
                return
        await self._preempt(pod, set(self._world.nodes) - set(roomy))

    async def _preempt(self, pod: Object, nodes: set[str]) -> None:
        """By the node's sum, then as the extender answers: victims are evicted, the pod is nominated."""
        if any(_leaves(each) for each in self._lower(pod, pod["status"].get("nominatedNodeName", ""))):
            return  # they leave for it
        proposed = {node: uids for node in sorted(nodes) if (uids := self._victims(pod, node))}
        meta_victims = {
            node: {"Pods": [{"UID": uid} for uid in uids], "NumPDBViolations": 0}
            for node, uids in proposed.items()
        }
        question = {"Pod": pod, "NodeNameToMetaVictims": meta_victims}
        answer = await self._ask("preempt", question) if proposed else None
        chosen = sorted((answer or {}).get("NodeNameToMetaVictims") or ())
        if not chosen or all(
            each["metadata"]["uid"] != pod["metadata"]["uid"] for each in self._world.pods()
        ):
            return
        node = self._world.dice.choice(chosen)
        going = {each["UID"] for each in (answer or {})["NodeNameToMetaVictims"][node]["Pods"]}
        for each in self._world.pods():
            if each["metadata"]["uid"] in going:
                self._world.delete(each["metadata"]["name"])
        self._world.set_status(pod, {"nominatedNodeName": node})

    def _victims(self, pod: Object, node: str) -> list[str]:
        """The fewest of lower priority without whom the sum suffices; none where nothing helps."""
        lower = sorted(self._lower(pod, node), key=lambda each: -priority_of(each))
        left = self._left(node) + sum(map(asked_units, lower)) - asked_units(pod)
        if left < 0:
            return []
        found = []
        for each in lower:
            if asked_units(each) <= left:
                left -= asked_units(each)
            else:
                found.append(each["metadata"]["uid"])
        return found

    def _lower(self, pod: Object, node: str) -> list[Object]:
        return [each for each in self._on(node) if priority_of(each) < priority_of(pod)]

    def _left(self, node: str) -> int:
        return sum(self._world.fleet.cards[node]) - sum(map(asked_units, self._on(node)))

    def _on(self, node: str) -> list[Object]:
        over = ("Failed", "Succeeded")
        pods = self._world.pods()
        return [
            each
            for each in pods
            if each["spec"].get("nodeName") == node and each["status"].get("phase") not in over
        ]

    def _service(self) -> tuple[Extender, Process, App] | None:
        """Whom the Service leads to: the leader if there is one, and now and then somebody else."""
        replicas = self._world.replicas
        leaders = [each for each in replicas.values() if not each[0].not_ready()]
        everybody = list(replicas.values())
        if leaders and self._world.dice.random() < 0.95:
            return self._world.dice.choice(leaders)
        return self._world.dice.choice(everybody) if everybody else None

    async def _ask(self, verb: str, question: Object) -> Object | None:
        asked = self._service()
        if asked is None:
            return None
        body = msgspec.json.encode(question)
        request = HttpRequest("POST", f"/gpushare-scheduler/{verb}", body=body, known=True)
        return await answered(asked[2], request)


async def answered(app: App, request: HttpRequest) -> Object:
    answer: HttpResponse | Awaitable[HttpResponse] = app(request)
    if not isinstance(answer, HttpResponse):
        answer = await answer
    found: Object = msgspec.json.decode(b"".join([answer.body, *answer.more]))
    return found


def priority_of(pod: Object) -> int:
    return pod["spec"].get("priority") or 0


def _leaves(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]
