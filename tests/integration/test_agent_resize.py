"""What a node's agent does when a pod that runs is granted more, and when its author wants less again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.kube.resources import EVENTS, PODS
from gpuslice.adapters.region.limits import read_limits
from gpuslice.core.units import MIB
from simcluster.cluster.faults import Fault
from simcluster.kubelet.devices import AdmissionError
from tests.integration.agent_bench import Bench, Pod, container, eventually, uuid

REQUEST, GRANTED = "gpuslice.io/memory-request", "gpuslice.io/memory-granted"
OF = {4: 4301, 6: 6452, 8: 8602, 10: 10753, 12: 12904, 15: 16130}
"""MiB that so many units of a card with 16130 MiB are."""


async def annotate(node: Bench, name: str, **annotations: str | None) -> None:
    """`request` by the author, `granted` as the extender does."""
    names = {"request": REQUEST, "granted": GRANTED}
    patch = {"metadata": {"annotations": {names[key]: text for key, text in annotations.items()}}}
    await node.client.merge_patch(PODS, name, patch, "default")


def limit_mib(node: Bench, pod: Pod, of: str = "main", card: int = 0) -> int:
    folders = node.agent.folders
    name = folders.of_containers()[pod["metadata"]["uid"], of]
    found = {each.uuid: each.memory_bytes for each in read_limits(name / "etc" / "limits") or ()}
    return (found[uuid(card)] or 0) // MIB


async def running(node: Bench, name: str, memory: int = 4, *cards: int, **fields: Any) -> Pod:
    pod = await node.place(name, memory, *(cards or (0,)), **fields)
    await node.kubelet.admit(pod)
    await node.kubelet.start_container(pod)
    await node.annotated(name, ASSIGNED="true")
    return pod


async def in_force(node: Bench, pod: Pod, units: int, card: int = 0) -> None:
    await eventually(lambda: limit_mib(node, pod, card=card) == OF[units], f"{units} units in force")


async def warnings(node: Bench) -> list[str]:
    found = (await node.client.list(EVENTS)).items or ()
    return [each.message for each in found if each.reason == "GPUResizeWaits"]


async def test_a_grant_is_in_the_limits_file_and_out_of_what_kubelet_may_give(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        pod = await running(node, "a")
        assert (limit_mib(node, pod), node.kubelet.healthy()) == (OF[4], 15)
        await annotate(node, "a", request="10", granted='{"main":10}')
        await in_force(node, pod, 10)
        await eventually(lambda: node.kubelet.healthy() == 9, "six units are offered to nobody")
        said = await node.annotated("a", POD="10")
        assert json.loads(said["scheduler.framework.gpushare.allocation"]) == {"0": {"0": 10}}
        other = await running(node, "b", 5)
        assert node.kubelet.cards(other) == {uuid(0)}
        last = await node.place("c", 1, 0)
        with pytest.raises(AdmissionError):
            await node.kubelet.admit(last)


async def test_what_is_wanted_no_more_is_given_back_to_kubelet(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        pod = await running(node, "a")
        await annotate(node, "a", request="10", granted='{"main":10}')
        await in_force(node, pod, 10)
        await annotate(node, "a", request="6")
        await in_force(node, pod, 6)
        await eventually(lambda: node.kubelet.healthy() == 13, "four of the six units are offered again")
        assert json.loads((await node.annotated("a", POD="6"))[GRANTED]) == {"main": 6}
        await annotate(node, "a", request=None)
        await in_force(node, pod, 4)
        await eventually(lambda: node.kubelet.healthy() == 15, "all units are offered again")
        assert GRANTED not in await node.annotated("a", POD="4")


@pytest.mark.parametrize("what", ["agent", "kubelet", "agent without folders", "container"])
async def test_after_a_restart_of_anything_the_grant_holds(tmp_path: Path, what: str) -> None:
    async with Bench(tmp_path).running() as node:
        pod = await running(node, "a")
        await annotate(node, "a", request="10", granted='{"main":10}')
        await in_force(node, pod, 10)
        await eventually(lambda: node.kubelet.healthy() == 9)
        if what == "kubelet":
            await node.kubelet.restart()
        elif what == "container":
            await node.kubelet.start_container(pod)
        else:
            await node.restart_agent()
        await eventually(lambda: node.registered() and node.kubelet.healthy() == 9, "the same is offered")
        await in_force(node, pod, 10)
        await node.kubelet.start_container(pod)
        assert limit_mib(node, pod) == OF[10]


async def test_two_cards_and_two_containers_grow_evenly(tmp_path: Path) -> None:
    async with Bench(tmp_path, {0: 16130, 1: 16130}).running() as node:
        both = await running(node, "both", 8, 0, 1, labels={"aliyun.com/gpu-count": "2"})
        await annotate(node, "both", request="16", granted='{"main":16}')
        for card in (0, 1):
            await in_force(node, both, 8, card)
        await eventually(lambda: node.kubelet.healthy() == 22, "four of each card are offered to nobody")
        pair = await node.place("pair", 0, 1, containers=[container(2, "main"), container(2, "side")])
        await node.kubelet.admit(pair)
        for name in ("main", "side"):
            await node.kubelet.start_container(pair, name)
        await node.annotated("pair", ASSIGNED="true")
        await annotate(node, "pair", request="main=4,side=2", granted='{"main":4}')
        await in_force(node, pair, 4, 1)
        assert limit_mib(node, pair, "side", 1) == 2150


async def test_a_program_that_uses_more_than_is_wanted_keeps_it_until_it_does_not(tmp_path: Path) -> None:
    from tests.integration.test_agent_watchdog import Tenant, holds

    async with Bench(tmp_path).running() as node:
        tenant = Tenant(node, "a")
        await tenant.start()
        await node.annotated("a", ASSIGNED="true")
        await annotate(node, "a", request="10", granted='{"main":10}')
        await in_force(node, tenant.pod, 10)
        with tenant.process() as program:
            holds(node, (program, 9000))
            place = tenant.pod["metadata"]["uid"], "main", uuid(0)
            await eventually(lambda: node.agent.lender.live.reported.get(place) == 9000 * MIB)
            await annotate(node, "a", request="8")
            (message,) = await eventually(lambda: warnings(node), "an event says what it waits for")
            assert "uses 9000 MiB" in message
            assert "8602 MiB" in message
            assert limit_mib(node, tenant.pod) == OF[10]
            assert json.loads((await node.annotations("a"))[GRANTED]) == {"main": 10}
            holds(node, (program, 8000))
            await in_force(node, tenant.pod, 8)
            await eventually(lambda: node.kubelet.healthy() == 11)


async def test_what_cannot_be_recorded_is_recorded_later(tmp_path: Path) -> None:
    """Until then nobody else gets it: the record is never below what may be used."""
    async with Bench(tmp_path).running() as node:
        pod = await running(node, "a")
        await annotate(node, "a", request="10", granted='{"main":10}')
        await in_force(node, pod, 10)
        await eventually(lambda: node.kubelet.healthy() == 9)
        await node.annotated("a", POD="10")
        node.cluster.faults.add(Fault("PATCH", ".*/pods/a", 503))
        await annotate_directly(node, "a", "6")
        await in_force(node, pod, 6)
        assert node.kubelet.healthy() == 9
        node.cluster.faults.clear()
        await eventually(lambda: node.kubelet.healthy() == 13)


async def annotate_directly(node: Bench, name: str, text: str) -> None:
    """Past the faults that the API server was told to have."""
    pod = await node.client.get(PODS.as_dict(), name, "default")
    pod["metadata"]["annotations"][REQUEST] = text
    await node.client.replace(PODS.as_dict(), pod)
