"""The simulated scheduler on a real API wire, with an extender that can be told what to answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import EVENTS, NODES, PODS
from gpuslice.adapters.kube.transport import HttpTransport
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster
from simcluster.scheduler.configuration import Configuration, ExtenderConfig
from simcluster.scheduler.loop import Scheduler
from tests import HANG_S

MEM = "aliyun.com/gpu-mem"


@dataclass
class Extender:
    """Answers every verb as told and remembers what it was sent."""

    client: KubeClient
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refuse: dict[str, str] = field(default_factory=dict)
    bind_error: str = ""
    status: int = 200

    async def handle(self, request: web.Request) -> web.Response:
        verb, sent = request.match_info["verb"], await request.json()
        self.calls.append((verb, sent))
        if self.status != 200:
            return web.Response(status=self.status)
        return web.json_response(await getattr(self, verb)(sent))

    async def filter(self, sent: dict[str, Any]) -> dict[str, Any]:
        kept = [name for name in sent["NodeNames"] if name not in self.refuse]
        return {"NodeNames": kept, "FailedNodes": self.refuse, "Error": ""}

    async def prioritize(self, sent: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"Host": name, "Score": 10 if name == "n2" else 0} for name in sent["NodeNames"]]

    async def bind(self, sent: dict[str, Any]) -> dict[str, Any]:
        if self.bind_error:
            return {"Error": self.bind_error}
        await self.client.bind(sent["PodNamespace"], sent["PodName"], sent["Node"], uid=sent["PodUID"])
        return {"Error": ""}


@dataclass
class World:
    client: KubeClient
    extender: Extender

    async def node(self, name: str, units: int = 15) -> None:
        await self.client.create(NODES.as_dict(), {"metadata": {"name": name}})
        amounts = {"cpu": "4", "memory": "8Gi", "pods": "10", MEM: str(units)}
        await self.client.patch_status(NODES.as_dict(), name, {"capacity": amounts, "allocatable": amounts})

    async def pod(self, name: str, units: int) -> None:
        limits = {MEM: str(units)} if units else {}
        container = {"name": "main", "image": "busybox", "resources": {"limits": limits}}
        document = {"metadata": {"name": name}, "spec": {"containers": [container]}}
        await self.client.create(PODS.as_dict(), document, "default")

    async def until(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with asyncio.timeout(HANG_S):
            while True:
                pod = await self.client.get(PODS.as_dict(), name, "default")
                if wanted(pod):
                    return pod
                await asyncio.sleep(0.02)

    async def bound(self, name: str) -> str:
        pod = await self.until(name, lambda it: bool(it["spec"].get("nodeName")))
        return str(pod["spec"]["nodeName"])

    async def refused(self, name: str, reason: str = "Unschedulable") -> str:
        """The message of the pod's PodScheduled condition."""

        def is_refused(pod: dict[str, Any]) -> bool:
            return any(one.get("reason") == reason for one in pod["status"].get("conditions") or ())

        pod = await self.until(name, is_refused)
        return next(str(one["message"]) for one in pod["status"]["conditions"] if one.get("reason") == reason)

    async def settled(self, *, bound: int, refused: int) -> list[str]:
        """The names of the bound pods, once so many are bound and so many were refused."""
        async with asyncio.timeout(HANG_S):
            while True:
                pods = (await self.client.list(PODS.as_dict(), "default")).items or []
                placed = [pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName")]
                waiting = [pod for pod in pods if not pod["spec"].get("nodeName")]
                told = [pod for pod in waiting if pod.get("status", {}).get("conditions")]
                if (len(placed), len(waiting), len(told)) == (bound, refused, refused):
                    return placed
                await asyncio.sleep(0.02)

    async def events(self, name: str) -> list[tuple[str, str]]:
        async with asyncio.timeout(HANG_S):
            while True:
                items = (await self.client.list(EVENTS.as_dict(), "default")).items or []
                found = [(e["reason"], e["message"]) for e in items if e["involvedObject"]["name"] == name]
                if found:
                    return found
                await asyncio.sleep(0.02)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(ApiServer(Cluster()))
        transport = await stack.enter_async_context(HttpTransport(Connection(server.url)))
        client = KubeClient(transport)
        extender = Extender(client)
        url = await _serve(stack, extender)
        config = ExtenderConfig(
            url, "filter", "prioritize", "bind", weight=10, node_cache_capable=True, managed=frozenset({MEM})
        )
        settings = Configuration(extenders=(config,), initial_backoff_s=0.05, max_backoff_s=0.1)
        scheduler = Scheduler(client, settings)
        task = asyncio.create_task(scheduler.run())
        await scheduler.synced.wait()
        yield World(client, extender)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _serve(stack: contextlib.AsyncExitStack, extender: Extender) -> str:
    app = web.Application()
    app.router.add_post("/gpushare-scheduler/{verb}", extender.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}/gpushare-scheduler"


async def test_a_pod_of_a_managed_resource_goes_through_the_extender_to_its_node(world: World) -> None:
    for name in ("n1", "n2", "n3"):
        await world.node(name)
    await world.pod("one", 4)
    assert await world.bound("one") == "n2"
    verbs = [verb for verb, _ in world.extender.calls]
    assert verbs == ["filter", "prioritize", "bind"]
    sent = world.extender.calls[0][1]
    assert sent.keys() == {"Pod", "Nodes", "NodeNames"}
    assert sent["Nodes"] is None
    assert sorted(sent["NodeNames"]) == ["n1", "n2", "n3"]
    assert await world.events("one") == [("Scheduled", "Successfully assigned default/one to n2")]


async def test_other_pods_do_not_bother_the_extender(world: World) -> None:
    await world.node("n1")
    await world.pod("one", 0)
    assert await world.bound("one") == "n1"
    assert world.extender.calls == []


async def test_the_extenders_reason_is_in_the_event_and_a_new_node_helps(world: World) -> None:
    await world.node("n1")
    world.extender.refuse = {"n1": "Insufficient GPU Memory in one device"}
    await world.pod("one", 4)
    message = await world.refused("one")
    assert message.startswith("0/1 nodes are available: 1 Insufficient GPU Memory in one device. ")
    await world.node("n2")
    assert await world.bound("one") == "n2"


async def test_in_tree_filters_spare_the_extender_the_question(world: World) -> None:
    await world.node("n1", units=3)
    await world.pod("one", 4)
    message = await world.refused("one")
    assert message.startswith(f"0/1 nodes are available: 1 Insufficient {MEM}. no new claims to deallocate")
    assert world.extender.calls == []


async def test_a_failing_bind_releases_what_was_assumed_and_is_tried_again(world: World) -> None:
    await world.node("n1", units=4)
    world.extender.bind_error = "card 0 vanished"
    await world.pod("one", 4)
    assert await world.refused("one", "SchedulerError") == "binding rejected: card 0 vanished"
    world.extender.bind_error = ""
    assert await world.bound("one") == "n1"


async def test_an_extender_out_of_order_is_an_error_and_not_passed_over(world: World) -> None:
    await world.node("n1")
    world.extender.status = 503
    await world.pod("one", 4)
    message = await world.refused("one", "SchedulerError")
    assert message.startswith("failed filter with extender at URL http://127.0.0.1:")
    assert message.endswith("/gpushare-scheduler/filter, code 503")
    world.extender.status = 200
    assert await world.bound("one") == "n1"


async def test_what_is_bound_counts_before_its_pod_is_seen_again(world: World) -> None:
    await world.node("n1", units=9)
    for number in range(4):
        await world.pod(f"p{number}", 4)
    bound = await world.settled(bound=2, refused=2)
    await world.client.delete(PODS, bound[0], "default", grace_s=0)
    await world.settled(bound=2, refused=1)
