"""The unit in which an agent cuts its cards into kubelet's devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.kube.resources import EVENTS, PODS
from gpuslice.adapters.region.limits import read_limits
from gpuslice.apps.agent.device_list import TooManyUnitsError
from gpuslice.core.contract import NAME_SETS
from simcluster.kubelet.devices import AdmissionError
from tests.integration.agent_bench import Bench, eventually
from tests.integration.claims_rig import claim_node, result


async def test_a_unit_too_fine_for_kubelet_stops_the_start_with_a_sentence(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {0: 81559}, settings={"memory_unit": "MiB"}, ready=False)
    with pytest.raises(ExceptionGroup) as stopped:
        async with bench.running() as node:
            await eventually(lambda: node.agent.not_ready() == "never", timeout_s=0.5)
    refused = stopped.value.subgroup(TooManyUnitsError)
    assert refused is not None
    assert "81559 devices in units of 1 MiB" in str(refused.exceptions[0])


async def test_small_cards_may_be_cut_into_mib(tmp_path: Path) -> None:
    async with Bench(tmp_path, {0: 16130}, settings={"memory_unit": "MiB"}).running() as node:
        assert node.kubelet.healthy() == 16130
        pod = await node.place("p", 4000, containers=None)
        granted = (await node.kubelet.admit(pod))["main"]
        assert granted.envs["ALIYUN_COM_GPU_MEM_DEV"] == "16130"
        assert granted.envs["ALIYUN_COM_GPU_MEM_CONTAINER"] == "4000"


# -- beside pods that hold parts ---------------------------------------------------------------------------
async def waits(node: Bench) -> str:
    """What the agent tells of units that it does not change."""

    async def told() -> str:
        events = (await node.client.list(EVENTS, "default")).items or []
        return next((each.message for each in events if each.reason == "GPUUnitsWait"), "")

    message: str = await eventually(told, "an event on the node")
    return message


async def holding(node: Bench, units: int, name: str = "old") -> dict[str, Any]:
    pod = await node.place(name, units, 0)
    await node.kubelet.admit(pod)
    await node.kubelet.start_container(pod)
    return pod


def promised_mib(node: Bench) -> int:
    """The sum of all limits."""
    files = (node.folder / "host" / "containers").glob("*/etc/limits")
    return sum((each.memory_bytes or 0) >> 20 for file in files for each in read_limits(file) or ())


@pytest.mark.parametrize("record", ["kept", "lost"])
@pytest.mark.parametrize(("before", "after", "units"), [("GiB", "MiB", 1), ("MiB", "GiB", 1500)])
async def test_the_size_of_a_unit_changes_only_once_nobody_holds_one(
    tmp_path: Path, before: str, after: str, units: int, record: str
) -> None:
    async with Bench(tmp_path, {0: 4096}, settings={"memory_unit": before}).running() as node:
        pod = await holding(node, units)
        healthy = node.kubelet.healthy()
        await node.stop_agent()
        if record == "lost":
            (tmp_path / "host" / "units.json").unlink()
        node.settings = {"memory_unit": after}
        await node.start_agent()
        said = await waits(node)
        assert said.startswith(f"the memory unit stays {before}, not {after}: 1 hold parts of cards")
        assert "(default/old)" in said
        assert node.kubelet.healthy() == healthy
        await node.kubelet.start_container(pod)  # it can be started again
        with pytest.raises(AdmissionError):
            await holding(node, healthy - units + 1, "new")
        assert promised_mib(node) <= 4096

        node.kubelet.remove(pod)
        await node.client.delete(PODS, "old", "default", grace_s=0)
        await node.client.delete(PODS, "new", "default", grace_s=0)
        await eventually(lambda: node.kubelet.healthy() == {"GiB": 4, "MiB": 4096}[after], "it has changed")
        assert not node.agent.units.waits


@pytest.mark.parametrize(("before", "after"), [(16130, 32258), (32258, 16130), (16130, 15079)])
async def test_a_card_of_another_size_keeps_its_units_while_pods_hold_some(
    tmp_path: Path, before: int, after: int
) -> None:
    async with Bench(tmp_path, {0: before, 1: 8192}).running() as node:
        pod = await holding(node, 14)
        await node.kill_agent()
        node.record({0: after, 1: 8192})
        await node.start_agent()
        units = before // 1024
        assert f"card 0 stays {units} units, not {after // 1024}: 1 hold parts" in await waits(node)
        assert node.kubelet.healthy() == units + 8
        await node.kubelet.start_container(pod)
        assert promised_mib(node) <= after
        node.kubelet.remove(pod)
        await node.client.delete(PODS, "old", "default", grace_s=0)
        await eventually(lambda: node.kubelet.healthy() == after // 1024 + 8, "it has changed")


@pytest.mark.parametrize(("before", "after"), [("aliyun.com", "gpuslice.io"), ("gpuslice.io", "aliyun.com")])
async def test_the_names_of_resources_change_only_once_nobody_holds_one(
    tmp_path: Path, before: str, after: str
) -> None:
    bench = Bench(tmp_path, settings={"resource_names": before})
    async with bench.running() as node:
        spec = {"name": "main", "image": "i", "resources": {"limits": {NAME_SETS[before].memory: "4"}}}
        pod = await node.place("old", 0, 0, containers=[spec])
        await node.kubelet.admit(pod)
        await node.kill_agent()
        node.settings = {"resource_names": after}
        await node.start_agent()
        assert f"resources stay {before}, not {after}" in await waits(node)
        await node.kubelet.start_container(pod)
        node.kubelet.remove(pod)
        await node.client.delete(PODS, "old", "default", grace_s=0)
        offered = node.kubelet.device_manager
        await eventually(lambda: len(offered.healthy(NAME_SETS[after].memory)) == 15, "under the other name")
        assert not offered.healthy(NAME_SETS[before].memory)


async def test_prepared_claims_hold_units_too(tmp_path: Path) -> None:
    async with claim_node(tmp_path, cards={0: 4096}) as bench:
        await bench.offered("gpu-0")
        claim = await bench.claim("a", result("1Gi"), pod=await bench.pod("p", "a", ("main", "")))
        assert not (await bench.prepare(claim)).error
        await bench.node.kill_agent()
        bench.node.settings = {**bench.node.settings, "memory_unit": "MiB"}
        await bench.node.start_agent()
        assert "the memory unit stays GiB, not MiB: 1 hold parts" in await waits(bench.node)
        assert "(claim default/a)" in await waits(bench.node)
        other = await bench.claim("b", result("4Gi", share="s2"), pod=await bench.pod("q", "b", ("main", "")))
        assert "prepared claims with this one would hold 5" in (await bench.prepare(other)).error
