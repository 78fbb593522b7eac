"""The agent as the process that a DaemonSet starts, over NVML of the simulated driver."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from gpuslice.adapters.gpu.nvml import NvmlSource
from gpuslice.adapters.gpu.source import GpuUnavailableError
from simcluster import gpu
from tests import HANG_S
from tests.integration.agent_bench import NODE, Bench, eventually
from tests.integration.sim_driver_client import require_driver

PROGRAM = "from gpuslice.apps.cli.main import main; main()"
VENDORS_FLAGS = ("-logtostderr", "--v=5", "-memory-unit=GiB", "-health-check=true", "-query-kubelet=false")


@dataclass
class Started:
    """A running agent process on a bench whose own agent was stopped."""

    bench: Bench
    process: asyncio.subprocess.Process
    log: Path
    machine: gpu.Machine

    async def ended(self) -> int:
        async with asyncio.timeout(HANG_S):
            return await self.process.wait()

    async def port(self) -> int:
        def logged() -> int:
            found = re.search(r'"event":"serving".*?"port":(\d+)', self.log.read_text())
            return int(found[1]) if found else 0

        port: int = await eventually(logged, "the agent serves")
        return port


@contextlib.asynccontextmanager
async def started(folder: Path, *cards: str) -> AsyncIterator[Started]:
    library = require_driver()
    state = gpu.create(folder / "gpus", cards, seed="agent")
    bench = Bench(folder, {}, ready=False)
    async with bench.running() as node:
        await node.stop_agent()
        log = folder / "agent.log"
        with gpu.Machine(state) as machine, log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", PROGRAM, "agent", *VENDORS_FLAGS, *_flags(node),
                env={**os.environ, **gpu.environment(state, library), "NODE_NAME": NODE,
                     "KUBECONFIG": str(folder / "kubeconfig")},
                stdout=out, stderr=out,
            )  # fmt: skip
            try:
                yield Started(node, process, log, machine)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


def _flags(node: Bench) -> list[str]:
    (node.folder / "kubeconfig").write_text(node.server.kubeconfig())
    own = node.agent_settings()
    names = ("device_plugin_folder", "pod_resources_socket", "root", "library", "host", "unhealthy_file")
    flags = [f"--{name.replace('_', '-')}={getattr(own, name)}" for name in names]
    return [*flags, "--port=0", "--inventory-s=0.2", "--reconcile-s=0.2"]


async def test_the_process_serves_kubelet_from_nvml_and_ends_cleanly(tmp_path: Path) -> None:
    async with started(tmp_path, "V100-SXM2-16GB", "T4") as agent:
        node = agent.bench
        await eventually(lambda: node.kubelet.healthy() == 15 + 14, "registered")
        cards = json.loads(
            await eventually(lambda: _annotation(node, "gpuslice.io/gpus"), "cards on the node object")
        )
        assert [(card["index"], card["memory_mib"], card["units"]) for card in cards] == [
            (0, 16130, 15),
            (1, 15079, 14),
        ]
        node.cards = {0: 16130, 1: 15079}
        pod = await node.place("p", 4, 0, known=False)
        granted = (await node.kubelet.admit(pod))["main"]
        assert granted.envs["NVIDIA_VISIBLE_DEVICES"] == cards[0]["uuid"]
        await node.kubelet.start_container(pod)
        await node.annotated("p", ASSIGNED="true", IDX="0")
        agent.machine.inject_xid(1, 79)
        await eventually(lambda: node.kubelet.healthy() == 15, "card 1 is out")
        agent.machine.lose(0)
        await eventually(lambda: node.kubelet.healthy() == 0, "card 0 is lost")
        agent.machine.restore(0)
        await eventually(lambda: node.kubelet.healthy() == 15, "card 0 is back")
        agent.machine.inject_xid(0, 79)
        await eventually(lambda: node.kubelet.healthy() == 0, "its faults are followed again")
        async with aiohttp.ClientSession() as web:
            port = await agent.port()
            async with web.get(f"http://127.0.0.1:{port}/readyz") as answer:
                assert (answer.status, await answer.text()) == (200, "ok")
        agent.process.send_signal(signal.SIGHUP)
        await eventually(
            lambda: agent.log.read_text().count("registered with kubelet") == 2, "SIGHUP registers again"
        )
        agent.process.send_signal(signal.SIGTERM)
        assert await agent.ended() == 0
        assert '"event":"ending","signal":"SIGTERM"' in agent.log.read_text()
        assert not (node.kubelet.plugin_folder / "aliyungpushare.sock").exists()
        assert "Traceback" not in agent.log.read_text()


async def test_a_killed_process_is_replaced_and_its_socket_taken_over(tmp_path: Path) -> None:
    async with started(tmp_path, "V100-SXM2-16GB") as agent:
        node = agent.bench
        await eventually(lambda: node.kubelet.healthy() == 15, "registered")
        agent.process.kill()
        await agent.ended()
        await eventually(lambda: node.kubelet.healthy() == 0, "kubelet noticed")
        assert (node.kubelet.plugin_folder / "aliyungpushare.sock").exists()
        node.record({0: 16130})
        await node.start_agent()
        await eventually(lambda: node.kubelet.healthy() == 15, "the next one took over")


async def test_a_driver_that_was_away_is_opened_anew(tmp_path: Path) -> None:
    """As after `nvidia-smi -r` of all cards, or where its module is loaded again."""
    async with started(tmp_path, "V100-SXM2-16GB", "T4") as agent:
        node = agent.bench
        await eventually(lambda: node.kubelet.healthy() == 15 + 14, "registered")
        agent.machine.lose(0)
        await eventually(lambda: node.kubelet.healthy() == 14, "card 0 is lost")
        agent.machine.unload_driver()
        await eventually(lambda: node.kubelet.healthy() == 0, "nothing is known of the other any more")
        agent.machine.restore(0)
        agent.machine.load_driver()
        await eventually(lambda: node.kubelet.healthy() == 15 + 14, "both are back")
        assert agent.process.returncode is None
        said = [json.loads(line)["event"] for line in agent.log.read_text().splitlines()]
        assert said.count("card out of use") == said.count("card back in use") == 2
        assert said.count("cards cannot be given out") == 1
        assert said.count("the driver answers") == 2


async def test_an_agent_whose_driver_was_replaced_is_started_again(tmp_path: Path) -> None:
    """NVML in its memory is of the earlier driver, and nothing in the process can change that."""
    async with started(tmp_path, "V100-SXM2-16GB", "T4") as agent:
        await eventually(lambda: agent.bench.kubelet.healthy() == 15 + 14, "registered")
        agent.machine.lose(0)
        await eventually(lambda: agent.bench.kubelet.healthy() == 14, "card 0 is lost")
        agent.machine.load_driver("999.1")
        assert await agent.ended() == 1
        *_, last = agent.log.read_text().splitlines()
        assert "the driver was replaced" in last
        assert "must be started again" in last


async def _annotation(node: Bench, name: str) -> str:
    metadata = (await node.node_object())["metadata"]
    return str(metadata.get("annotations", {}).get(name, ""))


async def test_a_missing_driver_is_named() -> None:
    source = NvmlSource(library="/nowhere/libnvidia-ml.so.1")
    with pytest.raises(GpuUnavailableError, match=r"/nowhere/libnvidia-ml\.so\.1"):
        await source.inventory()
