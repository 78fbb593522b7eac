"""Containers whose limits the driver enforces: set before their first instruction, and kept right."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.kube.resources import EVENTS, NODES, PODS, RESOURCE_CLAIMS
from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.core.contract import ANN_TIERS, LABEL_MIN_TIER, NODE_TIER
from simcluster import gpu
from simcluster.cgroups import join
from simcluster.kubelet.plugin_calls import PluginError

from .agent_bench import NODE, Bench, container, eventually, uuid
from .claims_rig import claim_node, result
from .limiter_rig import Host, Root
from .sim_driver_client import MIB, ROOT, DriverProcess, out, require_driver

CARD_MIB = 143771
LIMIT_MIB = 4107  # of 4 units of 140
OUT_OF_MEMORY = 2
DRIVER = "615.71.05"
SHARED = {"cgpu": "true"}
HOOK = ROOT / "native/build/lib/gpuslice-limits-hook"


@dataclass
class DriverNode:
    """A node whose driver enforces limits, and the container runtime's part of a container's start."""

    bench: Bench
    host: Host
    runs_hooks: bool = True
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    async def tier(self) -> str:
        node = await self.bench.client.get(NODES, NODE)
        return (node.metadata.annotations or {}).get(NODE_TIER, "")

    async def says(self, tier: str) -> None:
        async def ask() -> bool:
            return await self.tier() == tier

        await eventually(ask, f"the node says {tier}")

    async def tenant(self, name: str, labels: dict[str, str] | None = None, **env: str) -> Tenant:
        """A pod of 4 units that is admitted and not started yet."""
        spec = {**container(4), "env": [{"name": key, "value": value} for key, value in env.items()]}
        pod = await self.bench.place(name, 0, 0, containers=[spec], labels=labels)
        answers = await self.bench.kubelet.admit(pod)
        return Tenant(self, name, pod, answers["main"])

    async def warnings(self, reason: str) -> list[str]:
        found = (await self.bench.client.list(EVENTS)).items or ()
        return [each.message for each in found if each.reason == reason]


@dataclass
class Tenant:
    """A container, whose program talks to the driver without any library of ours: a static one, say."""

    node: DriverNode
    name: str
    pod: dict[str, Any]
    answer: dp.ContainerAllocateResponse

    @property
    def id(self) -> str:
        return self.name.encode().hex().ljust(64, "0")

    @property
    def cgroup(self) -> Path:
        uid = self.pod["metadata"]["uid"].replace("-", "_")
        path = f"kubepods.slice/kubepods-pod{uid}.slice/cri-containerd-{self.id}.scope"
        return self.node.host.cgroups.make(path)

    @property
    def library(self) -> bool:
        return any(each.container_path == "/etc/ld.so.preload" for each in self.answer.mounts)

    def edits(self) -> list[dict[str, Any]]:
        """Of its CDI devices that are ours."""
        found = []
        for each in self.answer.cdi_devices:
            kind, _, name = each.name.partition("=")
            if kind == "gpuslice.io/limits":
                document = json.loads((self.node.bench.folder / "cdi/gpuslice.io-limits.json").read_bytes())
                found += [one["containerEdits"] for one in document["devices"] if one["name"] == name]
        return found

    async def start(self) -> DriverProcess:
        """As kubelet and the runtime do it. Raises GRPCError, and RuntimeError with what a hook said."""
        node = self.node
        await node.bench.kubelet.start_container(self.pod)
        program = DriverProcess(node.host.state, visible="0")
        node._stack.callback(program.kill)
        join(self.cgroup, program.pid)
        proc = node.bench.folder / "proc" / str(program.pid)
        proc.mkdir(parents=True)
        (proc / "cgroup").write_text(f"0::/{self.cgroup.relative_to(node.host.cgroups.root)}\n")
        for edits in self.edits() if node.runs_hooks else ():
            for hook in edits["hooks"]:
                await run_hook(hook, program.pid)
        status = {
            "phase": "Running",
            "containerStatuses": [
                {"name": "main", "containerID": f"containerd://{self.id}", "state": {"running": {}}}
            ],
        }
        await node.bench.client.patch_status(PODS, self.name, status, "default")
        return program

    async def tiers(self) -> dict[str, str]:
        """What its annotation says; nothing where the node says it."""
        pod = await self.node.bench.client.get(PODS, self.name, "default")
        found: dict[str, str] = json.loads((pod.metadata.annotations or {}).get(ANN_TIERS, "{}"))
        return found

    async def held(self) -> None:
        uid = self.pod["metadata"]["uid"]
        state = self.node.bench.agent.state

        def seen() -> bool:
            pod = state.pod(uid)
            return pod is not None and "main" in pod.running and (uid, "main") in state.by_driver.containers

        await eventually(seen, f"the driver holds {self.name}")


async def run_hook(hook: dict[str, Any], pid: int) -> None:
    """As runc does: its program by path, the state on stdin. Raises RuntimeError with what it said."""
    assert hook["hookName"] == "createRuntime"
    state = {"ociVersion": "1.2.0", "id": "x", "status": "creating", "pid": pid, "bundle": "/b"}
    process = await asyncio.create_subprocess_exec(
        hook["path"], *hook["args"][1:], stdin=-1, stdout=-1, stderr=-1, env={}
    )
    _, said = await process.communicate(json.dumps(state).encode())
    if process.returncode:
        raise RuntimeError(said.decode())


@contextlib.contextmanager
def machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, accounting: str = "misc", cgroups: Path | None = None
) -> Iterator[tuple[Host, dict[str, Any]]]:
    """A machine of one card in the test's environment, and the fields of a `Bench` on it.

    `cgroups`: the kernel's, where they are mounted.
    """
    if not HOOK.exists():
        pytest.skip("the hook is not built: run `make native`")
    folder.mkdir(exist_ok=True)
    host = Host(
        folder / "machine", accounting, cards=(gpu.CardSpec("H200", uuid=uuid(0)),), kernels=bool(cgroups)
    )
    path = {"PATH": os.environ["PATH"]}
    for name, value in gpu.environment(host.state, require_driver(), base=path).items():
        monkeypatch.setenv(name, value)
    shutil.copy(HOOK, folder / HOOK.name)
    root = Root(host)
    places = {"cgroup_folder": str(cgroups or host.cgroups.root), "cdi_folder": str(folder / "cdi")}
    try:
        yield host, {"cards": {0: CARD_MIB}, "driver_version": DRIVER, "limiter": root, "settings": places}
    finally:
        root.close()


@contextlib.asynccontextmanager
async def driver_node(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    accounting: str = "misc",
    labels: dict[str, str] = SHARED,
    cgroups: Path | None = None,
    **settings: Any,
) -> AsyncIterator[DriverNode]:
    with machine(folder, monkeypatch, accounting, cgroups) as (host, fields):
        fields["settings"] |= settings
        async with Bench(folder, labels=labels, **fields).running() as bench:
            node = DriverNode(bench, host)
            with node._stack:
                yield node


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
        await eventually(lambda: node.bench.agent.limits._told, "it was checked")
        assert node.host.set(tenant.cgroup, 0, 100000) == 0
        (said,) = await eventually(lambda: node.warnings("GPUDriverLimitChanged"), "an event")
        assert "it was 100000 MiB" in said
        assert node.host.get(tenant.cgroup)[:3] == (0, 0, LIMIT_MIB)


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
