"""Our processes beside each other, each as a process of some release, around one node with two cards.

The API server and kubelet are simulated; pods go through webhook, extender, kubelet and agent.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from gpuslice.adapters.kube.resources import NODES, PODS
from simcluster import gpu
from simcluster.cluster.patch import json_patch
from tests import HANG_S
from tests.builders import api_pod
from tests.integration.agent_bench import NODE, Bench, eventually
from tests.integration.isolation_rig import BUILD
from tests.integration.sim_driver_client import require_driver
from tests.unit.admission_rig import review

PROGRAM = "from gpuslice.apps.cli.main import main; main()"
UNITS = {"aliyun.com/gpu-mem": "30", "aliyun.com/gpu-count": "2"}


@dataclass(frozen=True)
class Release:
    """`folder`: of a checkout; None is this one."""

    name: str
    folder: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.folder / "src")} if self.folder is not None else {}

    @property
    def library(self) -> Path:
        return BUILD / "lib" if self.folder is None else self.folder / "native/build/lib"

    def python(self, code: str, *arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=True,
        ).stdout


OURS = Release("ours")


@dataclass
class Process:
    """One of our processes, of some release."""

    release: Release
    name: str
    folder: Path
    flags: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    _process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        log = self.folder / f"{self.name}-{self.release.name}-{len(list(self.folder.glob('*.log')))}.log"
        with log.open("wb") as out:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", PROGRAM, self.name, *self.flags),
                env={
                    **os.environ,
                    **self.release.environment,
                    **self.variables,
                    "NODE_NAME": NODE,
                    "KUBECONFIG": str(self.folder / "kubeconfig"),
                },
                stdout=out,
                stderr=out,
            )

        def logged() -> int:
            assert self._process is not None
            assert self._process.returncode is None, log.read_text()
            found = re.search(r'"event":"serving".*?"port":(\d+)', log.read_text())
            return int(found[1]) if found else 0

        self.port = await eventually(logged, f"{self.name} serves")

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            async with asyncio.timeout(HANG_S):
                await self._process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        assert self._process.returncode is None
        return self._process.pid

    async def ask(self, path: str, body: Any = None) -> Any:
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                "GET" if body is None else "POST", f"http://127.0.0.1:{self.port}{path}", json=body
            ) as answer,
        ):
            text = await answer.text()
            return answer.status, json.loads(text) if text[:1] in ("{", "[") else text


@dataclass
class Installation:
    """A node with two cards, and who serves it now. What runs there goes on."""

    bench: Bench
    folder: Path
    extender: Process | None = None
    agent: Process | None = None
    webhook: Process | None = None
    exporter: Process | None = None
    console: Process | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    running: dict[str, tuple[dict[str, Any], Path, dict[str, str]]] = field(default_factory=dict)
    """By name: the pod, its limits file, and what that said of each card's memory when it started."""

    async def upgrade(self, name: str, release: Release) -> None:
        """Or roll back. Of extenders and webhooks the new one starts beside the other; of agents after it."""
        before: Process | None = getattr(self, name)
        now = Process(release, name, self.folder, self._flags(name), self.variables)
        if name == "agent" and before is not None:
            await before.stop()
        await now.start()
        setattr(self, name, now)
        if name != "agent" and before is not None:
            await before.stop()
        if name == "extender":
            await eventually(self._extender_ready, "the extender leads")
        if name == "agent":
            await eventually(lambda: self.bench.kubelet.healthy() == 30, "kubelet has the cards' devices")

    async def _extender_ready(self) -> bool:
        assert self.extender is not None
        status, _ = await self.extender.ask("/readyz")
        return bool(status == 200)

    def _flags(self, name: str) -> list[str]:
        here = ["--port=0", "--host=127.0.0.1"]
        others = {
            "extender": ["--policy=binpack", "--lease-duration-s=4", *here],
            "webhook": here,
            "exporter": ["--address=127.0.0.1:0", f"--root={self.folder / 'host'}", f"--node-name={NODE}"],
            "console": ["--access=token", "--log-level=info", *here],
        }
        if name in others:
            return others[name]
        own = self.bench.agent_settings()
        names = ("device_plugin_folder", "pod_resources_socket", "root", "library", "unhealthy_file")
        flags = [f"--{each.replace('_', '-')}={getattr(own, each)}" for each in names]
        return [
            *flags,
            *here,
            f"--recording={self.bench.recording}",
            "--inventory-s=0.2",
            "--reconcile-s=0.2",
        ]

    async def run_pod(self, name: str) -> None:
        """Through webhook, extender, kubelet and agent."""
        assert self.webhook is not None
        assert self.extender is not None
        pod = api_pod(name, "3")
        _, answer = await self.webhook.ask("/mutate", json.loads(review(pod)))
        assert answer["response"]["allowed"], answer
        if "patch" in answer["response"]:
            pod = json_patch(pod, json.loads(base64.b64decode(answer["response"]["patch"])))
        del pod["metadata"]["uid"]
        pod = await self.bench.client.create(PODS.as_dict(), pod)
        question = {"Pod": pod, "Nodes": None, "NodeNames": [NODE]}

        async def passes() -> bool:
            assert self.extender is not None
            _, answer = await self.extender.ask("/gpushare-scheduler/filter", question)
            return bool(answer["NodeNames"] == [NODE])

        await eventually(passes, f"{name} passes")
        meta = pod["metadata"]
        binding = {
            "PodName": name,
            "PodNamespace": "default",
            "PodUID": meta["uid"],
            "Node": NODE,
        }
        _, answer = await self.extender.ask("/gpushare-scheduler/bind", binding)
        assert not answer["Error"], answer
        bound = await self.bench.client.get(PODS.as_dict(), name, "default")
        (granted,) = (await self.bench.kubelet.admit(bound)).values()
        await self.bench.kubelet.start_container(bound)
        await self.bench.annotated(name, ASSIGNED="true")
        limits = [each.host_path for each in granted.mounts if each.container_path == "/etc/gpuslice"]
        path = Path(limits[0]) / "limits"
        self.running[name] = bound, path, memory_of(path)

    async def end_pod(self, name: str) -> None:
        pod, _, _ = self.running.pop(name)
        self.bench.kubelet.remove(pod)
        await self.bench.client.delete(PODS, name, "default", grace_s=0)

    def processes(self) -> list[Process]:
        found = (self.extender, self.agent, self.webhook, self.exporter, self.console)
        return [each for each in found if each is not None]

    async def all_holds(self) -> None:
        """What runs has its limits, also after its container restarts; and the extender knows all of it."""
        assert self.extender is not None
        for name, (pod, path, memory) in self.running.items():
            assert memory_of(path) == memory
            await self.bench.kubelet.start_container(pod)
            assert memory_of(path) == memory
            await self.bench.annotated(name, ASSIGNED="true")

        async def known() -> bool:
            assert self.extender is not None
            _, answer = await self.extender.ask("/gpushare-scheduler/inspect")
            pods = [pod for node in answer["nodes"] for card in node["devs"] for pod in card["pods"]]
            return {pod["name"]: pod["usedGPU"] for pod in pods} == dict.fromkeys(self.running, 3)

        await eventually(known, "the extender knows what runs")


def memory_of(limits: Path) -> dict[str, str]:
    """By card, whatever else a release writes there."""
    lines = [line.split() for line in limits.read_text().splitlines() if "memory=" in line]
    return {uuid: next(each for each in rest if each.startswith("memory=")) for uuid, *rest in lines}


@contextlib.asynccontextmanager
async def installed(folder: Path, variables: Mapping[str, str] | None = None) -> AsyncIterator[Installation]:
    state = gpu.create(folder / "gpus", ["V100-SXM2-16GB"] * 2, seed="installed")
    bench = Bench(folder, {0: 16130, 1: 16130}, ready=False)
    async with bench.running() as node:
        await node.stop_agent()
        (folder / "kubeconfig").write_text(node.server.kubeconfig())
        await node.client.patch_status(NODES.as_dict(), NODE, {"capacity": UNITS, "allocatable": UNITS})
        driver = gpu.environment(state, require_driver())
        there = Installation(node, folder, variables={**driver, **(variables or {})})
        try:
            yield there
        finally:
            for each in there.processes():
                await each.stop()
