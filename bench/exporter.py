"""What the exporter costs: the real program over the simulated driver, with real processes in its cards.

    python bench/exporter.py --gpus 8 --containers-per-gpu 20 --json
    python bench/exporter.py --series 25000 --json

The exporter samples once a second and finds them by cgroups, device assignments over kubelet's socket, and
the agent's folders on disk. Each scrape is one HTTP request on a kept connection, of a sample that nobody has
scraped before, so that it pays for rendering; it asks for gzip, as Prometheus does. CPU is taken while
Prometheus would scrape every 15 s, and is all of the process: what the simulated driver costs inside it too.

    scrape_p50_ms, scrape_p99_ms   latency of a scrape at the client
    plain_p50_ms, plain_p99_ms     the same without compression
    waited_ms                      how long the exporter was ready and got no core, each second: the machine
    cpu_pct                        of one core, sampling each second
    rss_mib, rss_mb                resident memory at the end
    simulated_mib                  how much of it is the simulated driver's machine, which the process maps
    client_p50_ms                  prometheus-client rendering the same series
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from gpuslice.adapters.kubelet.proto import podresources_pb2 as pr
from gpuslice.adapters.kubelet.rpc import Server
from gpuslice.adapters.region.limits import LimitsEntry, write_limits
from gpuslice.adapters.region.reader import prepare_region
from gpuslice.core.contract import GPU_MEM, device_id
from simcluster import gpu
from simcluster.kubelet.rpc import PodResourcesService

ROOT = Path(__file__).resolve().parent.parent
SIM = ROOT / "native" / "build" / "sim"
PROGRAM = Path(sys.executable).parent / "gpuslice"
PROFILE = "H100-80GB-HBM3"
SERIES_A_CONTAINER = 10
MOST_PROCESSES = 160
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
GOALS = {"scrape_p99_ms": 10.0, "cpu_pct": 1.0, "rss_mb": 60.0}
GOALS_LARGE = {"scrape_p99_ms": 30.0}


@dataclass(frozen=True, slots=True)
class Tenant:
    """One container: its number, card and pod."""

    number: int
    card: int

    @property
    def name(self) -> str:
        return f"app-{self.number}"

    @property
    def uid(self) -> str:
        return f"00000000-0000-4000-8000-{self.number:012x}"

    @property
    def container_id(self) -> str:
        return f"{self.number:064x}"


class Assignments(PodResourcesService):
    """kubelet's answer, created once."""

    def __init__(self, tenants: list[Tenant], uuids: list[str]) -> None:
        self._answer = pr.ListPodResourcesResponse(
            pod_resources=[_pod_resources(tenant, uuids) for tenant in tenants]
        )

    async def list(self, request: pr.ListPodResourcesRequest) -> pr.ListPodResourcesResponse:
        return self._answer

    async def get(self, request: pr.GetPodResourcesRequest) -> pr.GetPodResourcesResponse:
        raise NotImplementedError

    async def get_allocatable_resources(
        self, request: pr.AllocatableResourcesRequest
    ) -> pr.AllocatableResourcesResponse:
        raise NotImplementedError


def _pod_resources(tenant: Tenant, uuids: list[str]) -> pr.PodResources:
    identifier = device_id(uuids[tenant.card], tenant.number)
    devices = pr.ContainerDevices(resource_name=GPU_MEM, device_ids=[identifier])
    container = pr.ContainerResources(name="main", devices=[devices])
    return pr.PodResources(name=tenant.name, namespace="default", containers=[container])


def lay_out(folder: Path, tenants: list[Tenant], uuids: list[str]) -> None:
    """Create log folders and the agent's folders for all containers."""
    for tenant in tenants:
        (folder / "logs" / f"default_{tenant.name}_{tenant.uid}" / "main").mkdir(parents=True)
        place = folder / "root" / "containers" / tenant.name
        (place / "etc").mkdir(parents=True)
        (place / "var").mkdir()
        owner = {"ids": [], "namespace": "default", "pod": tenant.name, "container": "main"}
        (place / "owner.json").write_text(json.dumps(owner))
        write_limits(place / "etc" / "limits", [LimitsEntry(uuids[tenant.card], 4 << 30, 20)])
        prepare_region(place / "var" / "region")


@contextlib.contextmanager
def assignment(folder: Path, state: Path, tenants: list[Tenant]) -> Iterator[None]:
    """Start a process on the card of each tenant, and create a /proc that shows whose it is."""
    processes = []
    try:
        for tenant in tenants:
            environment = gpu.environment(state, SIM) | {"CUDA_VISIBLE_DEVICES": str(tenant.card)}
            process = subprocess.Popen(
                [SIM / "cuda_malloc", "1G"],
                env=environment,
                stdout=subprocess.DEVNULL,
                stdin=subprocess.DEVNULL,
            )
            processes.append(process)
            _show(folder / "proc" / str(process.pid), process.pid, tenant)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _show(place: Path, pid: int, tenant: Tenant) -> None:
    place.mkdir(parents=True)
    (place / "stat").symlink_to(f"/proc/{pid}/stat")
    pod = tenant.uid.replace("-", "_")
    group = f"/kubepods.slice/kubepods-pod{pod}.slice/cri-containerd-{tenant.container_id}.scope"
    (place / "cgroup").write_text(f"0::{group}\n")


@contextlib.contextmanager
def exporter(folder: Path, state: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    variables = gpu.environment(state, SIM) | {
        "GPUSLICE_POD_SOURCE": "logs",
        "GPUSLICE_POD_LOGS": str(folder / "logs"),
        "GPUSLICE_PROC": str(folder / "proc"),
        "GPUSLICE_ROOT": str(folder / "root"),
        "GPUSLICE_MAX_SERIES": "1000000",
        "NODE_NAME": "n1",
    }
    arguments = ["-a", f"127.0.0.1:{port}", "--pod-resources-kubelet-socket", str(folder / "kubelet.sock")]
    process = subprocess.Popen([PROGRAM, "exporter", *arguments], env=variables, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def scrape(port: int, connection: http.client.HTTPConnection | None = None, coding: str = "gzip") -> bytes:
    """The body as received: compressed and in the format that Prometheus prefers, or neither."""
    connection = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    accept = OPENMETRICS if coding == "gzip" else "text/plain"
    connection.request("GET", "/metrics", headers={"Accept": accept, "Accept-Encoding": coding})
    return connection.getresponse().read()


def wait_until(port: int, containers: int, processes: int) -> None:
    """Wait until a page lists all containers and processes."""
    page, deadline = b"", time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            page = scrape(port, coding="identity")
            held = page.count(b"\ngpuslice_container_memory_used_bytes{")
            busy = page.count(b"\ngpuslice_container_processes{") and page.count(b'container="main"} 1\n')
            if held == containers and busy >= processes:
                return
        time.sleep(0.5)
    raise SystemExit("the exporter does not show everybody: " + page.decode()[-2000:])


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def mapped_mib(pid: int, file: Path) -> float:
    """How much of a file is resident in a process, in MiB."""
    found, ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(f" {file}")
        elif ours and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found / 1024


def latencies_ms(port: int, count: int, coding: str) -> list[float]:
    """One scrape for each sample of the cards, at a random time after it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    found = []
    for number in range(count):
        time.sleep(1.0 + (number * 0.37) % 0.2)
        began = time.perf_counter()
        scrape(port, connection, coding)
        found.append((time.perf_counter() - began) * 1000)
    return found


def waited_s(pid: int) -> float:
    """How long all threads of a process have waited for a core, in seconds."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[1]) for thread in threads) / 1e9


def quantiles_ms(times: list[float], name: str) -> dict[str, float]:
    return {
        f"{name}_p50_ms": round(statistics.median(times), 2),
        f"{name}_p99_ms": round(statistics.quantiles(times, n=100, method="inclusive")[98], 2),
    }


def client_ms(page: bytes) -> float:
    """prometheus-client over the same families, as a custom collector."""
    families: list[Metric] = list(text_string_to_metric_families(page.decode()))

    class Same:
        def collect(self) -> list[Metric]:
            return families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Same())
    times = []
    for _ in range(5):
        began = time.perf_counter()
        generate_latest(registry)
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    containers = options.containers_per_gpu
    if options.series:
        containers = max(1, options.series // SERIES_A_CONTAINER // options.gpus)
    tenants = [Tenant(number, number % options.gpus) for number in range(options.gpus * containers)]
    with tempfile.TemporaryDirectory(prefix="exporter-") as name:
        folder = Path(name)
        state = gpu.create(folder / "machine", [PROFILE] * options.gpus)
        with gpu.Machine(state) as machine:
            uuids = [card.uuid for card in machine.cards()]
        lay_out(folder, tenants, uuids)
        server = Server([Assignments(tenants, uuids)])
        await server.start(path=str(folder / "kubelet.sock"))
        busy = tenants[: min(len(tenants), MOST_PROCESSES)]
        with assignment(folder, state, busy), exporter(folder, state, options.port) as process:
            found = await asyncio.to_thread(_measure, options, process.pid, len(tenants), len(busy))
            found["simulated_mib"] = round(mapped_mib(process.pid, state), 1)
        server.close()
        await server.wait_closed()
    return {"gpus": options.gpus, "containers": len(tenants), "processes": len(busy), **found}


def _measure(options: argparse.Namespace, pid: int, containers: int, processes: int) -> dict[str, Any]:
    wait_until(options.port, containers, processes)
    began, before = time.monotonic(), cpu_s(pid)
    while time.monotonic() - began < options.cpu_seconds:
        time.sleep(15 if options.cpu_seconds > 15 else options.cpu_seconds)
        scrape(options.port)
    cpu_pct = (cpu_s(pid) - before) / (time.monotonic() - began) * 100
    page = scrape(options.port, coding="identity")
    waited = waited_s(pid)
    times = latencies_ms(options.port, options.scrapes, "gzip")
    waited_ms = (waited_s(pid) - waited) / options.scrapes * 1000
    plain = latencies_ms(options.port, options.scrapes // 3, "identity")
    return {
        "series": sum(not line.startswith(b"#") for line in page.splitlines()),
        "page_kib": round(len(page) / 1024),
        "gzip_kib": round(len(scrape(options.port)) / 1024),
        **quantiles_ms(times, "scrape"),
        **quantiles_ms(plain, "plain"),
        "waited_ms": round(waited_ms, 2),
        "cpu_pct": round(cpu_pct, 2),
        "rss_mib": round(rss_mib(pid), 1),
        "rss_mb": round(rss_mib(pid) * 1.048576, 1),
        "client_p50_ms": round(client_ms(page), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--containers-per-gpu", type=int, default=20)
    parser.add_argument(
        "--series", type=int, default=0, help="as many containers as make about so many series"
    )
    parser.add_argument("--scrapes", type=int, default=100)
    parser.add_argument("--cpu-seconds", type=float, default=30)
    parser.add_argument("--port", type=int, default=19400)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    if options.json:
        print(json.dumps(found))
        return
    goals = GOALS_LARGE if options.series else GOALS
    for name, value in found.items():
        goal = f"   goal {goals[name]:g}" if name in goals else ""
        print(f"{name:16} {value}{goal}")


if __name__ == "__main__":
    main()
