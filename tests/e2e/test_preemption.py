"""Preemption under the real kube-scheduler: its own choice frees half of two cards, ours a whole one.

Where the node's sum suffices it evicts nobody at all, and the extender does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from gpuslice.adapters.kube.budgets import BUDGETS
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.resources import EVENTS, NODES, PODS, Resource
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.apps.extender.main import Extender
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.core.contract import ANN_INDEX, GPU_MEM
from tests import HANG_S
from tests.builders import api_node
from tests.e2e.control_plane import ControlPlane, api_server, scheduler
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.integration.extender_rig import PREFIX, until
from tests.integration.test_webhook import submitted

pytestmark = ON_A_CONTROL_PLANE

PRIORITIES = Resource("scheduling.k8s.io/v1", "priorityclasses", "PriorityClass", dict[str, Any], False)
Object = dict[str, Any]


def section(url: str) -> dict[str, object]:
    return {
        "urlPrefix": url + PREFIX,
        "filterVerb": "filter",
        "prioritizeVerb": "prioritize",
        "preemptVerb": "preempt",
        "bindVerb": "bind",
        "weight": 10,
        "nodeCacheCapable": True,
        "managedResources": [{"name": GPU_MEM, "ignoredByScheduler": False}],
    }


@contextlib.asynccontextmanager
async def extender(client: KubeClient) -> AsyncIterator[str]:
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stopped = asyncio.Event()
    settings = ExtenderSettings(port=0, host="127.0.0.1", policy="binpack")
    made = Extender(settings, client)
    task = asyncio.create_task(made.run(_wait(stopped), port.set_result))
    try:
        url = f"http://127.0.0.1:{await port}"
        await until(lambda: not made.not_ready())
        yield url
    finally:
        stopped.set()
        await task


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


@contextlib.asynccontextmanager
async def cluster(plane: ControlPlane, units: int = 16, *, nodes: int = 1) -> AsyncIterator[KubeClient]:
    """Nodes with two cards each, our extender and the real scheduler."""
    async with HttpTransport(connect({}, kubeconfig=str(plane.kubeconfig))) as transport:
        client = KubeClient(transport)
        for number in range(1, nodes + 1):
            await join(client, f"n{number}", units)
        for name, value in (("low", 0), ("middle", 10), ("high", 1000)):
            await client.create(PRIORITIES, priority(name, value))
        with contextlib.ExitStack() as stack:
            async with extender(client) as url:
                await asyncio.to_thread(stack.enter_context, scheduler(plane, [section(url)]))
                yield client
                await asyncio.to_thread(stack.close)


async def join(client: KubeClient, name: str, units: int) -> None:
    node = api_node(name, units, 2)
    await client.create(NODES, node)
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    await client.patch_status(NODES, name, node["status"] | ready)
    await client.merge_patch(NODES, name, {"spec": {"taints": None}})


def priority(name: str, value: int) -> Object:
    head = {"apiVersion": PRIORITIES.api_version, "kind": "PriorityClass", "metadata": {"name": name}}
    return head | {"value": value}


async def create(client: KubeClient, name: str, memory: str, importance: str, **fields: Any) -> None:
    await client.create(PODS, submitted(name, memory, priorityClassName=importance, **fields))


async def bound(client: KubeClient, name: str) -> str:
    """The card that a pod got, once it is bound."""
    async with asyncio.timeout(HANG_S):
        while True:
            pod = await client.get(PODS, name, "default")
            if pod.spec.node_name:
                return (pod.metadata.annotations or {})[ANN_INDEX]
            await bury(client)
            await asyncio.sleep(0.1)


async def bury(client: KubeClient) -> None:
    """What a kubelet does when a pod is to go."""
    for pod in (await client.list(PODS)).items or ():
        if pod.metadata.deletion_timestamp is not None:
            await client.delete(PODS, pod.metadata.name, "default", grace_s=0)


async def test_victims_are_picked_by_card(tmp_path: Path) -> None:
    with api_server(tmp_path) as plane:
        async with cluster(plane) as client:
            cards = {}
            for name, importance in (("a", "low"), ("b", "middle"), ("c", "low"), ("d", "middle")):
                await create(client, name, "4", importance)
                cards[name] = await bound(client, name)
            assert cards["a"] == cards["b"] != cards["c"] == cards["d"]
            await create(client, "important", "8", "high")
            card = await bound(client, "important")
            left = {pod.metadata.name for pod in (await client.list(PODS)).items or ()}
    assert left in ({"a", "b", "important"}, {"c", "d", "important"})
    assert card not in {cards[name] for name in left - {"important"}}


async def test_a_pod_that_a_budget_protects_stays_where_evicting_others_makes_room(tmp_path: Path) -> None:
    """kube-scheduler spares it and evicts one pod of each card: enough by the node's sum, and for no card."""
    with api_server(tmp_path) as plane:
        async with cluster(plane, 32) as client:
            for name, importance in (("a", "low"), ("kept", "low"), ("c", "middle"), ("d", "middle")):
                await create(client, name, "8", importance, labels={"app": name})
                await bound(client, name)
            selector = {"selector": {"matchLabels": {"app": "kept"}}, "minAvailable": 1}
            head = {"apiVersion": BUDGETS.api_version, "kind": BUDGETS.kind, "metadata": {"name": "keep"}}
            await client.create(BUDGETS, head | {"spec": selector}, "default")
            await create(client, "important", "16", "high")
            await bound(client, "important")
            assert await left(client) == {"a", "kept", "important"}


async def test_several_at_once_get_a_card_each_and_nobody_leaves_in_vain(tmp_path: Path) -> None:
    """kube-scheduler asks for the next pod before anything is known of the one before."""
    with api_server(tmp_path) as plane:
        async with cluster(plane, 16, nodes=3) as client:
            for number in range(12):
                await create(client, f"low{number}", "4", "low")
                await client_bound(client, f"low{number}")
            important = [f"important{number}" for number in range(4)]
            for name in important:
                await create(client, name, "8", "high")
            for name in important:
                await bound(client, name)
            assert len(await left(client)) == 12 - 2 * 4 + 4


async def left(client: KubeClient) -> set[str]:
    return {pod.metadata.name for pod in (await client.list(PODS)).items or ()}


async def messages(client: KubeClient, reason: str) -> dict[str, str]:
    """Pod → message of the events with this reason."""
    events = (await client.list(EVENTS)).items or ()
    return {each.involved_object.name: each.message for each in events if each.reason == reason}


async def test_a_pod_that_the_sum_would_hold_gets_a_card(tmp_path: Path) -> None:
    with api_server(tmp_path) as plane:
        async with cluster(plane, 30) as client:
            cards = {}
            for name, importance in (("low", "low"), ("middle", "middle")):  # no card holds two of 8
                await create(client, name, "8", importance)
                cards[name] = await bound(client, name)
            await create(client, "patient", "10", "low")  # nobody is less important: it waits
            await create(client, "important", "10", "high")
            card = await bound(client, "important")
            told, why = await messages(client, "Preempting"), await messages(client, "Preempted")
            assert await left(client) == {"middle", "patient", "important"}
            patient = await client.get(PODS, "patient", "default")
            assert not patient.spec.node_name
    assert card == cards["low"]
    assert "default/low must leave card" in told["important"]
    assert why["low"].startswith("Preempted by pod")


async def test_the_freed_card_is_kept_while_the_victim_takes_its_time(tmp_path: Path) -> None:
    with api_server(tmp_path) as plane:
        async with cluster(plane, 30, nodes=2) as client:
            for name in "abcd":  # one on each card, as none holds two
                await create(client, name, "8", "low")
                await client_bound(client, name)
            await create(client, "important", "10", "high")
            await nominated(client, "important")
            (victim,) = await leaving(client, 1)
            seen = await client.get(PODS, victim, "default")
            conditions = seen.status.conditions or []
            assert [each.reason for each in conditions if each.type == "DisruptionTarget"] == [
                "PreemptionByScheduler"
            ]
            await create(client, "greedy", "10", "middle")  # it preempts, too, but takes another card
            second = await nominated(client, "greedy")
            assert second
            assert len(await leaving(client, 2)) == 2
            first, other = await bound(client, "important"), await bound(client, "greedy")
            nodes = {
                name: (await client.get(PODS, name, "default")).spec.node_name
                for name in ("important", "greedy")
            }
            assert (nodes["important"], first) != (nodes["greedy"], other)
            assert len(await left(client)) == 4  # two of the four went, for two


async def leaving(client: KubeClient, count: int) -> set[str]:
    """Those who are leaving, once they are that many."""
    async with asyncio.timeout(HANG_S):
        while True:
            pods = (await client.list(PODS)).items or ()
            names = {pod.metadata.name for pod in pods if pod.metadata.deletion_timestamp}
            if len(names) >= count:
                return names
            await asyncio.sleep(0.1)


async def client_bound(client: KubeClient, name: str) -> None:
    """Bound, while nobody is buried."""
    async with asyncio.timeout(HANG_S):
        while True:
            if (await client.get(PODS, name, "default")).spec.node_name:
                return
            await asyncio.sleep(0.1)


async def nominated(client: KubeClient, name: str) -> str:
    """The node that a waiting pod was nominated for."""
    async with asyncio.timeout(HANG_S):
        while True:
            pod = await client.get(PODS, name, "default")
            if pod.status.nominated_node_name:
                return pod.status.nominated_node_name
            await asyncio.sleep(0.1)
