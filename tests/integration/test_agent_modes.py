"""A node between whole cards and shared ones: one mode at a time, and a pod that has a card keeps it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.kube.resources import EVENTS, NODES, PODS
from gpuslice.apps.agent.settings import SwitchSettings
from gpuslice.apps.agent.switch import StaticPod, Switch
from gpuslice.core.contract import EXCLUSIVE_GPU, GPU_CORE, GPU_COUNT, GPU_MEM, LABEL_OTHER_PLUGIN
from simcluster.kubelet.devices import AdmissionError
from simcluster.kubelet.plugin_calls import PluginError
from tests.builders import api_pod
from tests.integration.agent_bench import NODE, Bench, container, eventually
from tests.integration.claims_rig import claim_node, result

SHARED = {"cgpu": "true"}


async def said(node: Bench, reason: str) -> list[str]:
    found = await node.client.list(EVENTS, "default")
    return [each.message for each in found.items or () if each.reason == reason]


async def label(node: Bench, **labels: str | None) -> None:
    await node.client.merge_patch(NODES, NODE, {"metadata": {"labels": labels}})


def whole_pod(name: str) -> dict[str, Any]:
    pod = api_pod(name, "0", node=NODE)
    pod["spec"]["containers"][0]["resources"] = {"limits": {EXCLUSIVE_GPU: "1"}}
    del pod["metadata"]["uid"]
    return pod


# -- to shared -------------------------------------------------------------------------------------------
async def test_cards_are_shared_only_when_nobody_holds_one_whole(tmp_path: Path) -> None:
    async with Bench(tmp_path, labels=SHARED).running() as node:
        await node.stop_agent()
        await node.client.create(PODS.as_dict(), whole_pod("trainer"))
        node.ready = False
        await node.start_agent()
        (told,) = await eventually(lambda: said(node, "GPUModeWaits"), "an event on the node")
        assert "1 pods hold whole cards of this node (default/trainer)" in told
        assert node.agent.not_ready() == told
        assert node.kubelet.healthy() == 0
        await node.client.patch_status(PODS.as_dict(), "trainer", {"phase": "Succeeded"}, "default")
        await eventually(node.registered, "registered with kubelet")


async def test_cards_that_another_plugin_gives_out_are_not_shared(tmp_path: Path) -> None:
    async with Bench(tmp_path, labels=SHARED).running() as node:
        await node.stop_agent()
        amounts = {"capacity": {EXCLUSIVE_GPU: "1"}, "allocatable": {EXCLUSIVE_GPU: "1"}}
        await node.client.patch_status(NODES, NODE, amounts)
        node.ready = False
        await node.start_agent()
        await eventually(lambda: "another device plugin gives out 1" in node.agent.not_ready(), "it waits")
        await node.client.patch_status(NODES, NODE, {"allocatable": {EXCLUSIVE_GPU: "0"}})
        await eventually(node.registered, "registered with kubelet")


# -- away from shared ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "words", "end"),
    [
        (
            "false",
            "label cgpu is false: parts of cards are not given out any more; 1 pods keep what they",
            "is started again only where device-plugin-recover-ds runs",
        ),
        (
            None,
            "label cgpu is gone: nobody gives its cards out now, neither shared nor whole; label it",
            "is started again by nobody",
        ),
    ],
)
async def test_an_agent_that_goes_for_good_leaves_no_amounts_behind(
    tmp_path: Path, value: str | None, words: str, end: str
) -> None:
    async with Bench(tmp_path, labels=SHARED, settings={"node_label": "cgpu"}).running() as node:
        await node.kubelet.admit(await node.place("p", 4, 0))
        await eventually(lambda: counted(node), "the cards are counted")
        await label(node, cgpu=value)
        await node.stop_agent()
        assert not await counted(node)
        (told,) = await said(node, "GPUSharingEnds")
        assert told.startswith(words)
        assert told.endswith(f"default/p; a container of theirs that ends meanwhile {end}")
        await label(node, cgpu="true")
        await node.start_agent()
        await eventually(lambda: counted(node), "the cards are counted again")


async def counted(node: Bench) -> bool:
    status = (await node.node_object()).get("status", {})
    return GPU_COUNT in status.get("capacity", {}) and GPU_COUNT in status.get("allocatable", {})


@pytest.mark.parametrize("labels", [SHARED, {"ack.node.gpu.schedule": "cgpu"}], ids=["own label", "ACK's"])
async def test_an_agent_that_comes_again_leaves_the_node_as_it_is(
    tmp_path: Path, labels: dict[str, str]
) -> None:
    async with Bench(tmp_path, labels=labels, settings={"node_label": "cgpu"}).running() as node:
        await eventually(lambda: counted(node), "the cards are counted")
        await node.stop_agent()
        assert await counted(node)
        assert await said(node, "GPUSharingEnds") == []


async def test_a_change_that_waits_for_the_agents_restart_is_told(tmp_path: Path) -> None:
    async with Bench(tmp_path, labels=SHARED).running() as node:
        await label(node, **{"cgpu.disable.isolation": "true"})
        (told,) = await eventually(lambda: said(node, "GPUModeWaits"), "an event on the node")
        assert "shared-without-isolation" in told
        assert node.agent.state.rules.isolation
        await node.restart_agent()
        assert not node.agent.state.rules.isolation


async def test_no_container_starts_where_its_limits_are_held_by_less_than_it_asks_for(tmp_path: Path) -> None:
    async with Bench(tmp_path, labels=SHARED).running() as node:
        await eventually(lambda: tier(node, "library"), "the tier on the node object")
        asking = {"gpuslice.io/min-tier": "library"}
        held = await node.place("held", 4, 0, labels=asking)
        await node.kubelet.admit(held)
        await node.kubelet.start_container(held)
        await label(node, **{"cgpu.disable.isolation": "true"})
        await node.restart_agent()
        await eventually(lambda: tier(node, "none"), "the tier is lower")
        loose = await node.place("loose", 4, 0, labels=asking)
        await node.kubelet.admit(loose)
        with pytest.raises(PluginError, match="min-tier=library, its limits would be held by none"):
            await node.kubelet.start_container(loose)


async def test_no_container_starts_that_mounts_something_over_what_enforces_its_limits(
    tmp_path: Path,
) -> None:
    spec = container(4) | {"terminationMessagePath": "/etc/ld.so.preload"}
    async with Bench(tmp_path, labels=SHARED).running() as node:
        hiding = await node.place("hiding", 0, 0, containers=[spec])
        await node.kubelet.admit(hiding)
        expected = (
            'pod default/hiding: container "main": terminationMessagePath is "/etc/ld.so.preload", must'
        )
        with pytest.raises(PluginError, match=expected):
            await node.kubelet.start_container(hiding)
        await label(node, **{"cgpu.disable.isolation": "true"})
        await node.restart_agent()
        free = await node.place("free", 0, 0, containers=[spec])
        await node.kubelet.admit(free)
        await node.kubelet.start_container(free)


async def test_which_of_two_equal_init_containers_mounts_over_its_limits_does_not_matter(
    tmp_path: Path,
) -> None:
    """kubelet does not list them: the amount says only that it is one of them."""
    hiding = container(2, "second") | {"terminationMessagePath": "/etc/ld.so.preload"}
    async with Bench(tmp_path, labels=SHARED).running() as node:
        inits = [container(2, "first"), hiding]
        pod = await node.place("p", 0, 0, containers=[container(4)], initContainers=inits)
        await node.kubelet.admit(pod)
        with pytest.raises(PluginError, match="terminationMessagePath"):
            await node.kubelet.start_container(pod, "second")
        beside = container(0, "beside") | {"terminationMessagePath": "/etc/ld.so.preload"}
        other = await node.place("other", 0, 0, containers=[container(4), beside], initContainers=inits[:1])
        await node.kubelet.admit(other)
        await node.kubelet.start_container(other, "first")  # who has no card may mount what it likes


async def test_no_claim_is_prepared_for_a_container_that_mounts_something_over_its_limits(
    tmp_path: Path,
) -> None:
    async with claim_node(tmp_path) as bench:
        await bench.offered("gpu-0")
        pod = await bench.pod("p", "c", ("main", ""))
        pod["spec"]["containers"][0]["terminationMessagePath"] = "/etc/gpuslice/limits"
        await bench.node.client.delete(PODS, "p", "default", grace_s=0)
        del pod["metadata"]["resourceVersion"]
        pod = await bench.node.client.create(PODS.as_dict(), pod)
        answer = await bench.prepare(await bench.claim("c", result("4Gi"), pod=pod))
        assert 'terminationMessagePath is "/etc/gpuslice/limits"' in answer.error


async def tier(node: Bench, word: str) -> bool:
    found = (await node.node_object())["metadata"].get("annotations", {})
    return bool(found.get("gpuslice.io/tier") == word)


async def offers(node: Bench, resource: str) -> bool | None:
    """Whether the node's status names the resource; None while its two sides differ."""
    status = (await node.node_object()).get("status", {})
    first, second = (resource in status.get(side, {}) for side in ("capacity", "allocatable"))
    return first if first is second else None


@pytest.mark.parametrize("schedule", ["share", "cgpu", "default"])
async def test_a_node_that_divides_compute_no_more_does_not_go_on_offering_it(
    tmp_path: Path, schedule: str
) -> None:
    """kubelet leaves resources in the node's status that it does not know itself."""

    async def offered() -> bool:
        return await offers(node, GPU_CORE) is True

    async def gone() -> bool:
        return await offers(node, GPU_CORE) is False

    async with Bench(tmp_path, labels={"ack.node.gpu.schedule": "core_mem"}).running() as node:
        await eventually(offered, "compute is offered")
        await label(node, **{"ack.node.gpu.schedule": schedule})
        await node.stop_agent()
        node.ready = False
        await node.start_agent()
        await eventually(gone, "compute is not offered any more")
        assert await offers(node, GPU_COUNT) is (schedule != "default")


# -- whole cards again, while pods hold parts --------------------------------------------------------------
EXCLUSIVE = [{"gpuslice.io/mode": "exclusive"}, {"ack.node.gpu.schedule": "default"}]


@pytest.mark.parametrize("labels", EXCLUSIVE, ids=["own label", "vendor's label"])
async def test_pods_that_hold_parts_go_on_until_they_end_and_nobody_new_gets_any(
    tmp_path: Path, labels: dict[str, str]
) -> None:
    async with Bench(tmp_path).running() as node:
        held = await node.place("p", 4, 0)
        await node.kubelet.admit(held)
        await label(node, **labels)
        node.ready = False
        await node.restart_agent()
        await eventually(lambda: node.kubelet.healthy() == 4, "kubelet has what is held, and nothing else")
        assert node.kubelet.ids(held) == node.kubelet.device_manager.healthy(GPU_MEM)
        assert len(node.kubelet.device_manager.devices[GPU_MEM]) == 15, (
            "the others are known, and not to be had"
        )
        assert node.agent.devices.counts() == {"Healthy": 4, "Unhealthy": 11}
        await eventually(lambda: not node.agent.not_ready(), "ready")
        await node.kubelet.start_container(held)  # as after a crash
        with pytest.raises(AdmissionError, match="Requested: 4, Available: 0"):
            await node.kubelet.admit(await node.place("new", 4, 0))
        await node.client.delete(PODS, "new", "default", grace_s=0)
        await node.client.patch_status(PODS.as_dict(), "p", {"phase": "Succeeded"}, "default")
        await eventually(lambda: not node.agent.server.registered, "the agent leaves")
        await eventually(lambda: node.kubelet.healthy() == 0, "kubelet noticed")
        await eventually(lambda: "not shared" in node.agent.not_ready(), "it says why")


async def test_an_agent_without_new_pods_serves_those_who_hold_parts_and_then_nobody(tmp_path: Path) -> None:
    """As it runs beside the switch to whole cards, where a label that it does not know may have led."""
    async with Bench(tmp_path).running() as node:
        held = await node.place("p", 4, 0)
        await node.kubelet.admit(held)
        await node.stop_agent()
        node.ready, node.settings = False, {"new_pods": False}
        await node.start_agent()
        await eventually(lambda: node.kubelet.healthy() == 4, "kubelet has what is held, and nothing else")
        await node.kubelet.start_container(held)
        await eventually(lambda: not_counted(node), "the node does not count its cards")
        await node.client.delete(PODS, "p", "default", grace_s=0)
        await eventually(lambda: not node.agent.server.registered, "the agent leaves")


async def not_counted(node: Bench) -> bool:
    return not await counted(node)


async def test_what_a_pod_leaves_behind_is_nobodys_where_cards_are_not_shared_any_more(
    tmp_path: Path,
) -> None:
    """kubelet may give ids of a pod that just ended before it has heard that they are not to be had."""
    async with Bench(tmp_path, settings={"hot_reload_isolation": True}).running() as node:
        first, second = [await node.place(name, 4, 0) for name in ("first", "second")]
        await node.kubelet.admit(first)
        await label(node, **EXCLUSIVE[0])
        await eventually(lambda: not node.agent.state.rules.shared, "the rules are in force")
        with pytest.raises(AdmissionError, match="does not share its cards any more"):
            await node.kubelet.admit(second)
        await eventually(lambda: node.kubelet.healthy() == 4, "kubelet has what is held")


async def test_an_agent_that_left_comes_back_with_the_label(tmp_path: Path) -> None:
    async with Bench(tmp_path, settings={"hot_reload_isolation": True}).running() as node:
        await label(node, **EXCLUSIVE[0])
        await eventually(lambda: not node.agent.server.registered, "the agent leaves")
        await label(node, **{"gpuslice.io/mode": "shared"})
        await eventually(node.registered, "registered again")
        assert node.kubelet.healthy() == 15


async def test_a_restart_of_kubelet_finds_what_is_held_healthy(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        held = await node.place("p", 4, 0)
        await node.kubelet.admit(held)
        await label(node, **EXCLUSIVE[0])
        node.ready = False
        await node.restart_agent()
        await eventually(lambda: node.kubelet.healthy() == 4, "kubelet has what is held")
        await node.kubelet.restart()
        await eventually(lambda: node.kubelet.healthy() == 4, "and again")
        await node.kubelet.admit(held)
        await node.kubelet.start_container(held)


# -- the plugin of whole cards ---------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def switching(node: Bench, to: str) -> AsyncIterator[Switch]:
    folder = node.folder / "kubernetes"
    (folder / "manifests").mkdir(parents=True, exist_ok=True)
    settings = SwitchSettings(
        to=to,  # type: ignore[arg-type]
        node_name=NODE,
        manifest=str(folder / "manifests" / "nvidia-device-plugin.yml"),
        backup_folder=str(folder / "manifests-backup"),
        every_s=0.05,
        port=0,
        host="127.0.0.1",
    )
    stopped = asyncio.Event()
    switch = Switch(settings, node.client)
    task = asyncio.create_task(switch.run(stopped.wait()))
    yield switch
    stopped.set()
    await task


async def test_the_static_pod_goes_at_once_and_comes_back_when_parts_are_free(tmp_path: Path) -> None:
    async with Bench(tmp_path, labels=SHARED).running() as node:
        manifest = tmp_path / "kubernetes" / "manifests" / "nvidia-device-plugin.yml"
        manifest.parent.mkdir(parents=True)
        manifest.write_text("kind: Pod\n")
        async with switching(node, "shared") as switch:
            await eventually(lambda: not switch.waits, "switched")
        assert not manifest.exists()
        await node.kubelet.admit(await node.place("p", 4, 0))
        async with switching(node, "exclusive") as switch:
            await eventually(lambda: "default/p" in switch.waits, "it waits for the pod")
            assert not manifest.exists()
            assert len(await eventually(lambda: said(node, "GPUModeWaits"), "told")) == 1
            await node.client.delete(PODS, "p", "default", grace_s=0)
            await eventually(lambda: not switch.waits, "switched")
        assert manifest.read_text() == "kind: Pod\n"


async def test_the_gpu_operators_label_follows_where_there_is_an_operator(tmp_path: Path) -> None:
    async def operators() -> str | None:
        labels: dict[str, str] = (await node.node_object())["metadata"].get("labels", {})
        return labels.get(LABEL_OTHER_PLUGIN)

    async with Bench(tmp_path, labels=SHARED).running() as node:
        async with switching(node, "shared") as switch:
            await eventually(lambda: not switch.waits, "switched")
        assert await operators() is None
        for to, before, after in (("shared", "true", "false"), ("exclusive", "false", "true")):
            await label(node, **{LABEL_OTHER_PLUGIN: before})
            async with switching(node, to) as switch:
                await eventually(lambda one=switch: not one.waits, "switched")  # type: ignore[misc]
            assert await operators() == after


def test_the_static_pod_is_moved_in_the_vendors_words(tmp_path: Path) -> None:
    manifest = tmp_path / "manifests" / "nvidia-device-plugin.yml"
    static = StaticPod(manifest, tmp_path / "backup")
    assert static.recover() == "No nvidia-device-plugin.yml to recover."
    assert static.remove() == "Skip removing nvidia-device-plugin.yml, because it doesn't exist."
    manifest.parent.mkdir()
    manifest.write_text("one")
    assert static.recover() == "Skip recovering nvidia-device-plugin.yml, because it already exist."
    static.remove()
    assert static.recover() == "Finish recovering nvidia-device-plugin.yml."
    assert manifest.read_text() == "one"
