"""A whole node for the exporter's tests: API server, kubelet, agent, simulated driver, the program."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from gpuslice.adapters.gpu.recorded import RecordedSource, record
from gpuslice.adapters.gpu.source import DriverCard, Inventory
from gpuslice.apps.agent.main import Agent
from gpuslice.apps.agent.settings import AgentSettings
from simcluster import gpu
from tests import HANG_S
from tests.integration.sim_node import NATIVE, Node, simulated_node

LIBRARY = NATIVE.parent / "lib" / "libgpuslice.so"
PROGRAM = Path(sys.executable).parent / "gpuslice"
Labels = dict[str, str]
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


class Page:
    """A scrape, read back by the reference parser."""

    def __init__(self, text: str) -> None:
        self.text = text
        read = read_openmetrics if text.endswith("# EOF\n") else text_string_to_metric_families
        self.samples = [sample for family in read(text) for sample in family.samples]

    def all(self, name: str, **labels: str) -> list[tuple[Labels, float]]:
        return [
            (sample.labels, sample.value)
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def one(self, name: str, **labels: str) -> float:
        found = self.all(name, **labels)
        assert len(found) == 1, f"{name}{labels}: {found}"
        return found[0][1]

    def value(self, name: str, **labels: str) -> float | None:
        found = self.all(name, **labels)
        return found[0][1] if len(found) == 1 else None

    def short(self) -> str:
        """What is not about cards and fields."""
        left_out = ("#", "DCGM_", "gpuslice_gpu_", "gpuslice_exporter_field")
        return "\n".join(line for line in self.text.splitlines() if not line.startswith(left_out))

    def series(self) -> list[str]:
        """Names and labels as they are written: the parsers have their own idea of a counter's name."""
        return [line.rpartition(" ")[0] for line in self.text.splitlines() if not line.startswith("#")]

    def names(self) -> set[str]:
        return {sample.name for sample in self.samples}

    def balance(self) -> dict[str, tuple[float, float]]:
        """uuid → (containers and the rest, used)."""
        found = {}
        for labels, used in self.all("gpuslice_gpu_memory_used_bytes"):
            uuid = labels["gpu_uuid"]
            parts = self.all("gpuslice_container_memory_used_bytes", gpu_uuid=uuid)
            parts += self.all("gpuslice_unattributed_memory_bytes", gpu_uuid=uuid)
            found[uuid] = (sum(value for _, value in parts), used)
        return found


@dataclass
class RunningExporter:
    """The program `gpuslice exporter`, scraped over HTTP."""

    process: asyncio.subprocess.Process
    port: int
    log: list[dict[str, Any]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/metrics"

    async def page(self, url: str = "", accept: str = "*/*") -> Page:
        asked = {"Accept": accept}
        async with aiohttp.ClientSession(headers=asked) as session, session.get(url or self.url) as answer:
            assert answer.status == 200
            return Page(await answer.text())

    async def page_when(self, met: Callable[[Page], Any], timeout_s: float = HANG_S) -> Page:
        """The first page of which `met` is true."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            page = await self.page()
            if met(page):
                return page
            assert asyncio.get_running_loop().time() < deadline, f"still\n{page.short()}\n{self.log[-5:]}"
            await asyncio.sleep(0.1)

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.log if line["event"] == event]


@contextlib.asynccontextmanager
async def running_exporter(state: Path, *arguments: str, **settings: str) -> AsyncIterator[RunningExporter]:
    """The program on a simulated driver. `settings` are GPUSLICE_ variables; `driver` is its folder."""
    variables = gpu.environment(state, settings.pop("driver", str(NATIVE)))
    variables |= {f"GPUSLICE_{name.upper()}": value for name, value in settings.items()}
    for name in ("KUBECONFIG", "HOME", "KUBERNETES_SERVICE_HOST"):
        variables.pop(name, None)
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        "exporter",
        "-a",
        "127.0.0.1:0",
        "-c",
        "200",
        *arguments,
        env=variables,
        stderr=asyncio.subprocess.PIPE,
    )
    log: list[dict[str, Any]] = []
    serving: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    reading = asyncio.create_task(_read_log(process, log, serving))
    try:
        port = await asyncio.wait_for(serving, HANG_S)
        yield RunningExporter(process, port, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        await reading


async def _read_log(
    process: asyncio.subprocess.Process, log: list[dict[str, Any]], serving: asyncio.Future[int]
) -> None:
    assert process.stderr is not None
    async for line in process.stderr:
        try:
            log.append(json.loads(line))
        except ValueError:
            log.append({"event": line.decode(errors="replace")})
        if log[-1]["event"] == "serving" and not serving.done():
            serving.set_result(log[-1]["port"])
    if not serving.done():
        serving.set_exception(AssertionError(f"the exporter ended: {log}"))


@dataclass
class GpuNode:
    """One node with cards, its agent running."""

    node: Node
    state: Path
    root: Path

    def machine(self) -> gpu.Machine:
        return gpu.Machine(self.state)

    def exporter(self, *arguments: str, **settings: str) -> Any:
        """`running_exporter` with this node's surroundings."""
        kubeconfig = self.root.parent / "kubeconfig"
        kubeconfig.write_text(self.node.server.kubeconfig())
        own = {
            "node_name": self.node.settings.name,
            "kubeconfig": str(kubeconfig),
            "proc": str(self.node.settings.proc),
            "root": str(self.root),
            "pod_resources_kubelet_socket": str(self.node.settings.pod_resources_socket),
            "pod_resources_interval_s": "0.2",
        }
        return running_exporter(self.state, *arguments, **{**own, **settings})


@contextlib.asynccontextmanager
async def gpu_node(
    folder: Path, cards: tuple[str, ...] = ("V100-SXM2-16GB",), label: str = "cgpu=true"
) -> AsyncIterator[GpuNode]:
    state = gpu.create(folder / "machine", list(cards), seed="exporter")
    name, _, value = label.partition("=")
    labels = {name: value}
    async with simulated_node(folder, driver=NATIVE, gpu_state=state, labels=labels) as node:
        agent = _agent(folder, node, state)
        stop = asyncio.Event()
        running = asyncio.create_task(agent.run(stop.wait()))
        try:
            await node.wait_node(lambda found: found["status"]["capacity"].get("aliyun.com/gpu-mem"))
            yield GpuNode(node, state, folder / "gpuslice")
        finally:
            stop.set()
            await running


def _agent(folder: Path, node: Node, state: Path) -> Agent:
    with gpu.Machine(state) as machine:
        cards = tuple(
            DriverCard(card.index, card.uuid, card.total_mib, card.name)
            for card in machine.cards()
            if card.parent is None
        )
    record(Inventory(cards), folder / "recording.json")
    settings = AgentSettings(
        node_name=node.settings.name,
        root=str(folder / "gpuslice"),
        library=str(LIBRARY),
        device_plugin_folder=str(node.settings.plugin_folder),
        pod_resources_socket=str(node.settings.pod_resources_socket),
        unhealthy_file=str(folder / "none"),
        host="127.0.0.1",
        port=0,
        place_unplaced=True,
    )
    return Agent(settings, node.client, RecordedSource(folder / "recording.json"))


def have_native() -> bool:
    return (NATIVE / "libnvidia-ml.so.1").exists() and LIBRARY.exists() and os.access(PROGRAM, os.X_OK)
