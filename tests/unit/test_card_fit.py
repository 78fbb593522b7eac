"""Which workloads Kueue lets go: those for all of whose pods cards are held."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.followed_pod import pod_news
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.slim import SlimMetadata, SlimNode, SlimNodeSpec, SlimPod, SlimTaint
from gpuslice.apps.extender.kueue.card_fit import HELD_FOR_S, PATIENCE_S, CardFit
from gpuslice.apps.extender.placer import Placer
from gpuslice.core.contract import CARD_FIT, GPU_MEM
from gpuslice.core.ledger import Ledger
from gpuslice.core.policy import make_policy
from tests.builders import make_node, make_pod
from tests.unit.kube_wire import answer, line, page

MINE, OTHER = "fits-on-cards", "other"
BEGIN_S = 1_800_000_000.0
READY = "2027-01-15T08:00:00Z"  # then


@dataclass
class Kueue:
    """An API server with Kueue's objects alone, which keeps what is written into their status."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)  # by plural and name
    news: asyncio.Queue[tuple[str, bytes]] = field(default_factory=asyncio.Queue)
    version: int = 1

    def put(self, plural: str, name: str, document: dict[str, Any], kind: str = "MODIFIED") -> None:
        self.version += 1
        meta = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(self.version)}
        if plural == "workloads":
            meta["namespace"] = "default"
        self.objects[f"{plural}/{name}"] = {**document, "metadata": meta}
        self.news.put_nowait((plural, line(kind, self.objects[f"{plural}/{name}"])))

    def delete(self, name: str) -> None:
        self.news.put_nowait(("workloads", line("DELETED", self.objects.pop(f"workloads/{name}"))))

    def check(self, name: str = "w") -> dict[str, Any]:
        """What the workload's status says of the check."""
        states = self.objects[f"workloads/{name}"]["status"]["admissionChecks"]
        return next(each for each in states if each["name"] == MINE)

    async def request(self, request: ApiRequest) -> ApiResponse:
        path = request.path.rpartition("v1beta2/")[2].removeprefix("namespaces/default/").split("/")
        if request.method == "GET":
            found = [each for key, each in self.objects.items() if key.startswith(f"{path[0]}/")]
            return answer(json.loads(page(str(self.version), *found).body))
        wanted = json.loads(request.body)
        known = self.objects["/".join(path[:2])]
        given = wanted["metadata"].get("resourceVersion")
        assert given in (None, known["metadata"]["resourceVersion"]), "decided on what is no longer so"
        status = json.loads(json.dumps(known.get("status", {})))
        for name, items in wanted["status"].items():
            key = "type" if name == "conditions" else "name"
            new = {each[key] for each in items}
            status[name] = [each for each in status.get(name, []) if each[key] not in new] + items
        self.put(path[0], path[1], {**known, "status": status})
        return answer(self.objects["/".join(path[:2])])

    async def stream(self, request: ApiRequest) -> AsyncGenerator[bytes]:
        plural = request.path.partition("v1beta2/")[2].partition("?")[0]
        while True:
            of, text = await self.news.get()
            if of == plural:
                yield text
            else:
                self.news.put_nowait((of, text))
                await asyncio.sleep(0)


@dataclass
class Stage:
    kueue: Kueue
    ledger: Ledger
    card_fit: CardFit
    now_s: float = BEGIN_S

    def node(self, name: str, *cards: int, taint: str = "", **labels: str) -> None:
        self.ledger.apply_node(make_node(name, list(cards)))
        taints = [SlimTaint(taint, "", "NoSchedule")] if taint else []
        self.card_fit.node_changed(SlimNode(SlimMetadata(name=name, labels=labels), SlimNodeSpec(taints)))

    def workload(self, units: int, pods: int = 1, name: str = "w", **more: Any) -> None:
        """One that has its quota; `others`: what other checks say of it."""
        container = {"name": "main", "resources": {"limits": {GPU_MEM: units}}}
        template = {"spec": {"containers": [container], **more.get("spec", {})}}
        state = {"name": MINE, "state": "Pending", "lastTransitionTime": READY, "message": ""} | more.get(
            "state", {}
        )
        status = {
            "conditions": [{"type": "QuotaReserved", "status": more.get("reserved", "True")}],
            "admission": {
                "podSetAssignments": [{"name": "main", "flavors": {GPU_MEM: "cards"}, "count": pods}]
            },
            "admissionChecks": [state, *more.get("others", ())],
        }
        pod_sets = [{"name": "main", "count": pods, "template": template}]
        self.kueue.put("workloads", name, {"spec": {"podSets": pod_sets}, "status": status})

    def pod(self, units: int, name: str = "p", workload: str = "w") -> None:
        """A pod of the workload is shown, after the ledger has heard of it."""
        metadata = SlimMetadata(
            name=name,
            namespace="default",
            uid=f"uid-{name}",
            resource_version="5",
            annotations={"kueue.x-k8s.io/workload": workload},
            labels={"kueue.x-k8s.io/podset": "main"},
        )
        pod = SlimPod(metadata)
        made = make_pod(name, units)
        self.ledger.apply_pod(made)
        self.card_fit.pod_changed(pod_news(pod)._replace(view=made), None)

    async def looked(self, seconds: float = 1.0) -> None:
        """After so much time, with all that is due done."""
        self.now_s += seconds
        for _ in range(300):
            await asyncio.sleep(0)

    @property
    def free(self) -> int:
        return sum(sum(state.left) for state in self.ledger.snapshot().values())


@contextlib.asynccontextmanager
async def staged(leads: bool = True) -> AsyncIterator[Stage]:
    kueue, ledger = Kueue(), Ledger()
    client = KubeClient(kueue)
    placer = Placer(ledger, make_policy("bestfit", ledger.fleet), 0)

    async def sleep(_: float) -> None:
        await asyncio.sleep(0)

    card_fit = CardFit(client, client, placer, lambda: stage.now_s, sleep=sleep)
    stage = Stage(kueue, ledger, card_fit)
    kueue.put("admissionchecks", MINE, {"spec": {"controllerName": CARD_FIT}})
    kueue.put("admissionchecks", OTHER, {"spec": {"controllerName": "somebody"}})
    kueue.put("resourceflavors", "cards", {"spec": {}})
    if leads:
        card_fit.started_leading()
    task = asyncio.create_task(card_fit.run())
    try:
        await stage.looked()
        yield stage
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_check_is_active_while_an_extender_leads() -> None:
    async with staged() as stage:
        (condition,) = stage.kueue.objects[f"admissionchecks/{MINE}"]["status"]["conditions"]
        assert (condition["type"], condition["status"]) == ("Active", "True")
        assert "status" not in stage.kueue.objects[f"admissionchecks/{OTHER}"]
    async with staged(leads=False) as stage:
        assert "status" not in stage.kueue.objects[f"admissionchecks/{MINE}"]


async def test_cards_are_held_for_all_pods_of_what_is_let_go() -> None:
    async with staged() as stage:
        stage.node("n1", 16, 16)
        stage.workload(10, 2)
        await stage.looked()
        assert stage.kueue.check()["state"] == "Ready"
        assert stage.free == 12


async def test_what_fits_only_in_pieces_is_told_why_and_keeps_nothing() -> None:
    async with staged() as stage:
        stage.node("n1", 16, 16)
        stage.workload(10, 3)
        await stage.looked()
        assert stage.kueue.check()["state"] == "Pending"
        await stage.looked(PATIENCE_S)
        found = stage.kueue.check()
        assert (found["state"], found["requeueAfterSeconds"]) == ("Retry", 1)
        assert found["message"] == (
            "room for 2 of 3 pods: pod set main asks for 10 units on 1 card of one node; "
            "the freest card of 1 node that may run it has 16"
        )
        assert stage.free == 32


async def test_what_becomes_free_soon_is_used_at_once() -> None:
    async with staged() as stage:
        stage.node("n1", 16)
        stage.ledger.apply_pod(make_pod("running", 10, node="n1", card=0))
        stage.workload(10)
        await stage.looked()
        assert stage.kueue.check()["state"] == "Pending"
        stage.ledger.remove_pod("uid-running")
        await stage.looked()
        assert stage.kueue.check()["state"] == "Ready"


async def test_each_retry_waits_longer_up_to_eight_seconds() -> None:
    for retries, seconds in ((1, 2), (2, 4), (9, 8)):
        async with staged() as stage:
            stage.workload(4, state={"retryCount": retries})
            await stage.looked()
            await stage.looked(PATIENCE_S)
            assert stage.kueue.check()["requeueAfterSeconds"] == seconds


@pytest.mark.parametrize(
    "why",
    [
        {"others": ({"name": OTHER, "state": "Pending"},)},
        {"reserved": "False"},
        {"state": {"state": "Rejected"}},
    ],
)
async def test_nothing_is_held_before_ours_is_the_last_answer(why: dict[str, Any]) -> None:
    async with staged() as stage:
        stage.node("n1", 16)
        stage.workload(10, **why)
        await stage.looked()
        assert stage.free == 16
        assert stage.kueue.check()["state"] != "Ready"


async def test_only_nodes_count_that_kube_scheduler_would_take() -> None:
    async with staged() as stage:
        stage.kueue.put("resourceflavors", "cards", {"spec": {"nodeLabels": {"pool": "a"}}})
        await stage.looked()
        stage.node("other-pool", 16, pool="b")
        stage.node("tainted", 16, pool="a", taint="reserved")
        stage.workload(10)
        await stage.looked()
        await stage.looked(PATIENCE_S)
        assert "0 nodes that may run it" in stage.kueue.check()["message"]
        tolerations = [{"key": "reserved", "operator": "Exists"}]
        stage.kueue.put(
            "resourceflavors", "cards", {"spec": {"nodeLabels": {"pool": "a"}, "tolerations": tolerations}}
        )
        await stage.looked()
        stage.workload(10)
        await stage.looked()
        assert stage.kueue.check()["state"] == "Ready"
        assert stage.ledger.holds.on("tainted") is not None


async def test_a_pod_takes_over_what_is_held_for_it() -> None:
    async with staged() as stage:
        stage.node("n1", 16, 16)
        stage.workload(10, 2)
        await stage.looked()
        stage.pod(10)
        assert stage.ledger.holds.tentative("uid-p") is not None
        assert stage.free == 12
        stage.pod(10, "stranger", "another")
        assert stage.ledger.holds.tentative("uid-stranger") is None


async def test_what_nobody_takes_is_free_after_a_minute() -> None:
    async with staged() as stage:
        stage.node("n1", 16, 16)
        stage.workload(10, 2)
        await stage.looked()
        stage.pod(10)
        await stage.looked(HELD_FOR_S + 1)
        assert stage.free == 32


@pytest.mark.parametrize("how", ["deleted", "lost its quota", "not the leader"])
async def test_holds_end_with_their_reason(how: str) -> None:
    async with staged() as stage:
        stage.node("n1", 16)
        stage.workload(10)
        await stage.looked()
        assert stage.free == 6
        if how == "deleted":
            stage.kueue.delete("w")
        elif how == "lost its quota":
            stage.workload(10, reserved="False", state={"state": "Ready"})
        else:
            stage.card_fit.stopped_leading()
        await stage.looked()
        assert stage.free == 16


async def test_a_queue_may_have_several_checks_of_ours() -> None:
    async with staged() as stage:
        stage.kueue.put("admissionchecks", OTHER, {"spec": {"controllerName": CARD_FIT}})
        stage.node("n1", 16)
        await stage.looked()
        other = {"name": OTHER, "state": "Pending", "lastTransitionTime": READY, "message": ""}
        stage.workload(10, others=(other,))
        await stage.looked()
        states = stage.kueue.objects["workloads/w"]["status"]["admissionChecks"]
        assert [each["state"] for each in states] == ["Ready", "Ready"]
        assert stage.free == 6


async def test_a_new_leader_holds_for_what_was_let_go_and_has_no_pods_yet() -> None:
    async with staged(leads=False) as stage:
        stage.node("n1", 16, 16)
        stage.workload(10, 2, state={"state": "Ready"})
        stage.workload(3, name="old", state={"state": "Ready", "lastTransitionTime": "2027-01-15T07:00:00Z"})
        await stage.looked()
        stage.pod(10)
        stage.card_fit.started_leading()
        assert stage.free == 22  # the other pod is there, and waits like any
