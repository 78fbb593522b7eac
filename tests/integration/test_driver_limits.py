"""Containers whose limits the driver enforces: set before their first instruction, and kept right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuslice.adapters.kube.resources import PODS, RESOURCE_CLAIMS
from gpuslice.adapters.region.limits import LimitsEntry
from gpuslice.core.contract import LABEL_MIN_TIER
from simcluster import gpu
from simcluster.kubelet.plugin_calls import PluginError

from .agent_bench import eventually, uuid
from .claims_rig import claim_node, result
from .driver_limits_rig import (
    LIMIT_MIB,
    OUT_OF_MEMORY,
    SHARED,
    driver_node,
    machine,
    run_hook,
)
from .sim_driver_client import MIB, out


@pytest.mark.parametrize("accounting", ["misc", "dmem"])
async def test_a_container_is_limited_before_its_first_instruction_and_without_the_library(
    accounting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driver_node(tmp_path, monkeypatch, accounting) as node:
        await node.says("driver")
        first = await node.tenant("first")
        assert first.library, "until it is seen that the runtime runs hooks"
        await first.start()
        second = await node.tenant("second")
        assert not second.answer.mounts
        program = await second.start()
        program.start()
        assert program.memory()[1] == LIMIT_MIB * MIB
        assert program.call("cuMemAlloc_v2", out(), LIMIT_MIB * MIB).result == OUT_OF_MEMORY
        program.alloc(2000 * MIB)
        for each in (first, second):
            assert node.host.get(each.cgroup)[:3] == (0, 0, LIMIT_MIB)
            await each.held()
            assert await each.tiers() == {}, "the node's"


async def test_the_variables_of_nvidias_toolkit_are_set_over_a_pods_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driver_node(tmp_path, monkeypatch) as node:
        await node.says("driver")
        tenant = await node.tenant("t", NVIDIA_GPU_MEMORY_LIMIT="100000", NVIDIA_GPU_MEMORY_REQUEST="100000")
        await tenant.start()
        (edits,) = tenant.edits()
        assert edits["env"] == ["NVIDIA_GPU_MEMORY_REQUEST=0", f"NVIDIA_GPU_MEMORY_LIMIT={LIMIT_MIB}"]


async def test_a_container_starts_with_its_limit_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driver_node(tmp_path, monkeypatch) as node:
        await node.says("driver")
        tenant = await node.tenant("t")
        with gpu.Machine(node.host.state) as machine:
            machine.refuse(0, "nvmlDeviceSetMemoryLimits", 17)
            with pytest.raises(RuntimeError, match=r"GPU limits are not set.*NVML 17"):
                await tenant.start()
            machine.refuse(0, "", 0)
        await tenant.start()


async def test_without_an_agent_no_container_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with driver_node(tmp_path, monkeypatch) as node:
        await node.says("driver")
        tenant = await node.tenant("t")
        await node.bench.kubelet.start_container(tenant.pod)
        (edits,) = tenant.edits()
        await node.bench.kill_agent()
        with pytest.raises(RuntimeError, match="the node's agent does not answer"):
            await run_hook(edits["hooks"][0], 1)
        await node.bench.start_agent()
        await tenant.start()


async def test_a_limit_that_somebody_changes_is_set_again_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driver_node(tmp_path, monkeypatch) as node:
        await node.says("driver")
        tenant = await node.tenant("t")
        await tenant.start()
        await tenant.held()
        await eventually(lambda: node.bench.agent.state.by_driver.applied, "it was checked")
        assert node.host.set(tenant.cgroup, 0, 100000) == 0
        (said,) = await eventually(lambda: node.warnings("GPUDriverLimitChanged"), "an event")
        assert "it was 100000 MiB" in said
        assert node.host.get(tenant.cgroup)[:3] == (0, 0, LIMIT_MIB)


async def test_a_limit_that_the_agent_changes_is_the_drivers_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driver_node(tmp_path, monkeypatch) as node:
        await node.says("driver")
        tenant = await node.tenant("t")
        await tenant.start()
        await eventually(lambda: node.bench.agent.state.by_driver.applied, "it was checked")
        folders = node.bench.agent.folders
        name = folders.current(node.bench.kubelet.ids(tenant.pod))
        folders.change_limits(name, [LimitsEntry(uuid(0), 9000 * MIB)])
        await eventually(lambda: node.host.get(tenant.cgroup)[:3] == (0, 0, 9000), "it is set")
        assert not await node.warnings("GPUDriverLimitChanged")


async def test_a_container_that_borrows_keeps_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driver_node(tmp_path, monkeypatch) as node:
        await node.says("driver")
        await (await node.tenant("first")).start()
        borrower = await node.tenant("borrower", limit="9")
        assert borrower.library
        assert not (await node.tenant("other")).library


async def test_what_the_driver_no_longer_holds_is_said_of_its_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driver_node(tmp_path, monkeypatch, watchdog="warn") as node:
        await node.says("driver")
        await (await node.tenant("first")).start()
        tenant = await node.tenant("t")
        assert not tenant.library
        await tenant.start()
        await tenant.held()
        with gpu.Machine(node.host.state) as machine:
            machine.refuse(0, "nvmlDeviceGetMemoryLimits", 17)
            (said, *_) = await eventually(lambda: node.warnings("GPULimitNotHeldByDriver"), "an event")
            assert "NVML 17" in said

            async def told() -> bool:
                return await tenant.tiers() == {"main": "watchdog"}

            await eventually(told, "its tier is what holds it")
            machine.refuse(0, "", 0)

            async def well() -> bool:
                return await tenant.tiers() == {}

            await eventually(well, "it is held again")


async def test_where_the_runtime_runs_no_hooks_the_node_does_not_say_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driver_node(tmp_path, monkeypatch) as node:
        await node.says("driver")
        node.runs_hooks = False
        tenant = await node.tenant("t")
        await tenant.start()
        (said,) = await eventually(lambda: node.warnings("GPULimitHookNotRun"), "an event")
        assert "enable CDI" in said
        await node.says("library")
        assert node.host.get(tenant.cgroup)[:3] == (0, 0, LIMIT_MIB), "it was set all the same"
        later = await node.tenant("later")
        assert later.library


async def test_a_container_that_was_granted_before_the_proof_gets_its_limit_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driver_node(tmp_path, monkeypatch, driver_limits=False) as node:
        await node.says("library")
        tenant = await node.tenant("t")
        assert tenant.library
        await tenant.start()
        node.bench.settings = {**node.bench.settings, "driver_limits": True}
        await node.bench.restart_agent()
        await node.says("driver")
        await tenant.held()
        assert node.host.get(tenant.cgroup)[:3] == (0, 0, LIMIT_MIB)
        assert not await node.warnings("GPUDriverLimitChanged")


async def test_a_pod_that_asks_for_the_driver_starts_under_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driver_node(tmp_path, monkeypatch) as node:
        await node.says("driver")
        wanting = await node.tenant("wanting", labels={LABEL_MIN_TIER: "driver"})
        await wanting.start()
        await wanting.held()
    async with driver_node(tmp_path / "other", monkeypatch, driver_limits=False) as node:
        await node.says("library")
        later = await node.tenant("later", labels={LABEL_MIN_TIER: "driver"})
        with pytest.raises(PluginError, match="its limits would be held by library"):
            await later.start()


async def test_shares_of_compute_need_the_library_besides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {**SHARED, "gpuslice.io/compute-policy": "fair"}
    async with driver_node(tmp_path, monkeypatch, labels=labels) as node:
        await node.says("driver")
        await (await node.tenant("first")).start()
        second = await node.tenant("second")
        assert second.library
        await second.start()
        await second.held()


async def test_a_soft_limit_is_taken_back_before_the_container_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driver_node(tmp_path, monkeypatch, "dmem", driver_soft_limit=True) as node:
        await node.says("driver")
        tenant = await node.tenant("t")
        await tenant.start()
        assert node.host.get(tenant.cgroup)[:3] == (0, LIMIT_MIB, LIMIT_MIB)
        above = tenant.cgroup.parent
        assert node.host.get(above)[1] == LIMIT_MIB
        await node.bench.client.delete(PODS, "t", "default", grace_s=30)
        await eventually(lambda: node.host.get(tenant.cgroup)[:3] == (0, 0, LIMIT_MIB), "it is zero")
        assert node.host.get(above)[1] == 0


async def test_a_claim_of_one_container_is_limited_by_the_driver_and_a_shared_one_by_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine(tmp_path, monkeypatch) as (host, fields):
        async with claim_node(tmp_path, **fields) as bench:

            async def by_driver() -> bool:
                return [each["attributes"]["tier"] for each in await bench.devices()] == [
                    {"string": "driver"}
                ]

            await eventually(by_driver, "claims can choose such cards")
            own = await bench.pod("own", "c", ("main", "gpu"))
            shared = await bench.pod("shared", "d", ("one", "gpu"), ("two", "gpu"))
            tiers = []
            for name, pod in (("c", own), ("d", shared)):
                claim = await bench.claim(name, result("4Gi", share=name), pod=pod)
                assert not (await bench.prepare(claim)).error
                told = await bench.node.client.get(RESOURCE_CLAIMS.as_dict(), name, "default")
                tiers.append(told["status"]["devices"][0]["data"]["tier"])
                (file,) = bench.cdi.glob(f"*{claim['metadata']['uid']}.json")
                (device,) = json.loads(file.read_bytes())["devices"]
                for hook in device["containerEdits"].get("hooks", ()):
                    leaf = host.cgroups.make(f"pods/{name}")
                    proc = tmp_path / "proc" / "77"
                    proc.mkdir(parents=True)
                    (proc / "cgroup").write_text(f"0::/pods/{name}\n")
                    await run_hook(hook, 77)
                    assert host.get(leaf)[:3] == (0, 0, LIMIT_MIB)
            assert tiers == ["driver", "library"]
