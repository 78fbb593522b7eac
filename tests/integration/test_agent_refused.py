"""What the agent says on a pod to which memory was refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpuslice.adapters.kube.resources import EVENTS
from gpuslice.apps.agent.refused_memory import RefusedMemory
from gpuslice.apps.agent.writer import Writer
from tests.integration.agent_bench import Bench, eventually
from tests.integration.test_agent_way import write_one_refusal


async def events(node: Bench) -> list[tuple[str, int]]:
    found = (await node.client.list(EVENTS)).items or ()
    return [(each.message, each.count) for each in found if each.reason == "GPUMemoryRefused"]


async def refused_once(node: Bench, root: Path) -> tuple[dict[str, Any], Path]:
    """A running pod to which memory was refused, and its region, after the agent has looked at it."""
    pod = await node.place("p", 4, 0)
    await node.kubelet.admit(pod)
    await node.kubelet.start_container(pod)
    uid, state = pod["metadata"]["uid"], node.agent.state
    await eventually(lambda: state.listed_ids(uid, "main") is not None, "kubelet lists it")
    (folder,) = (root / "host" / "containers").iterdir()
    region = folder / "var" / "region"
    write_one_refusal(region)
    await node.agent.refused_memory.check()
    return pod, region


async def test_a_refusal_is_told_on_the_pod_and_the_next_one_raises_the_count(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        pod, region = await refused_once(node, tmp_path)
        await eventually(lambda: events(node), "an event")
        ((message, count),) = await events(node)
        assert message == (
            "container main was refused memory of card 0: it would have passed its limit of 4301 MiB; "
            "ask for 5 of 15 units or more, which is 5376 MiB"
        )
        assert count == 1

        await node.kubelet.start_container(pod)  # it crashed: its counters go on in the next life
        write_one_refusal(region)
        await node.agent.refused_memory.check()

        async def twice() -> bool:
            return await events(node) == [(message, 2)]

        await eventually(twice, "the count of the same event is raised")


async def test_what_was_refused_before_the_agent_began_is_not_told_again(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        await refused_once(node, tmp_path)
        await eventually(lambda: events(node), "an event of the first agent")
        before = await events(node)
        second = RefusedMemory(node.agent.state, node.agent.folders, Writer(node.client, "n1"))
        await second.check()
        await second.check()
        assert await events(node) == before


async def test_a_region_full_of_nonsense_stops_nobody(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        pod = await node.place("p", 4, 0)
        await node.kubelet.admit(pod)
        await node.kubelet.start_container(pod)
        (folder,) = (tmp_path / "host" / "containers").iterdir()
        (folder / "var" / "region").write_bytes(b"\xff" * 5000)
        await node.agent.refused_memory.check()
        assert await events(node) == []
