"""A node whose driver enforces limits, and what kubelet and the container runtime do there."""

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

from gpuslice.adapters.kube.resources import EVENTS, NODES, PODS
from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.core.contract import ANN_LIMIT, ANN_TIERS, NODE_TIER
from simcluster import gpu
from simcluster.cgroups import join

from .agent_bench import NODE, Bench, container, eventually, uuid
from .limiter_rig import Host, Root
from .sim_driver_client import ROOT, DriverProcess, require_driver

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

    async def tenant(
        self, name: str, labels: dict[str, str] | None = None, limit: str = "", **env: str
    ) -> Tenant:
        """A pod of 4 units that is admitted and not started yet. `limit`: what it may borrow up to."""
        spec = {**container(4), "env": [{"name": key, "value": value} for key, value in env.items()]}
        pod = await self.bench.place(name, 0, 0, containers=[spec], labels=labels)
        if limit:
            patch = {"metadata": {"annotations": {ANN_LIMIT: limit}}}
            await self.bench.client.merge_patch(PODS, name, patch, "default")

            def known() -> bool:
                view = self.bench.agent.state.living(pod["metadata"]["uid"])
                asked = view.request if view is not None else None
                return asked is not None and any(each.limit for each in asked.containers)

            await eventually(known, "its limit is known")
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
