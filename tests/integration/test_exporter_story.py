"""Who uses what: two applications share a card, a third asks for too much, and the page tells them apart."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.kube.resources import PODS
from simcluster import gpu
from tests.integration.exporter_rig import GpuNode, Page, gpu_node, have_native
from tests.integration.isolation_rig import BUILD, Worker, descriptor_of
from tests.integration.sim_node import make_pod, state_of
from tests.tools import find

pytestmark = pytest.mark.skipif(not have_native(), reason="native libraries are not built: run `make native`")

MIB = 1 << 20
IMAGE = "registry.cn-shanghai.aliyuncs.com/tensorflow-samples/cuda-malloc"
USED = "gpuslice_container_memory_used_bytes"
LIMIT = "gpuslice_container_memory_limit_bytes"
UNATTRIBUTED = "gpuslice_unattributed_memory_bytes"


def app(name: str, units: int, tag: str = "3G") -> dict[str, Any]:
    """The seed's application: holds as many GiB as its tag says."""
    pod = make_pod(name, units)
    (container,) = pod["spec"]["containers"]
    container["image"] = f"{IMAGE}:{tag}"
    del container["command"]
    return pod


async def running(host: GpuNode, *names: str) -> None:
    for name in names:
        await host.node.wait_pod(name, lambda pod: state_of(pod) == "running")


async def test_each_application_has_its_own_memory_limit_and_the_card_adds_up(tmp_path: Path) -> None:
    async with gpu_node(tmp_path) as host, host.exporter() as exporter:
        for name in ("app-0", "app-1"):
            await host.node.create(app(name, 4))
        await host.node.create(make_pod("idle", 3))
        await running(host, "app-0", "app-1", "idle")
        page = await exporter.page_when(
            lambda page: (
                all(page.value(USED, pod=name) == 3193 * MIB for name in ("app-0", "app-1"))
                and page.value(USED, pod="idle") is not None
            )
        )
        assert page.one(LIMIT, pod="app-0") == 4301 * MIB
        assert page.one(LIMIT, pod="idle") == 3226 * MIB
        assert page.one("gpuslice_container_memory_allocated_bytes", pod="app-1") == 4301 * MIB
        assert page.one(USED, pod="idle") == 0
        assert page.one("gpuslice_container_processes", pod="idle") == 0
        assert page.one("gpuslice_gpu_memory_allocated_bytes") == (4301 * 2 + 3226) * MIB
        assert page.one("gpuslice_gpu_memory_used_bytes") == (6386 + 10) * MIB  # the seed's 6396 MiB
        assert page.one("gpuslice_unattributed_memory_bytes") == 10 * MIB
        assert page.one("gpuslice_gpu_allocate_mode") == 2
        ((about, _),) = page.all("gpuslice_container_info", pod="app-0")
        assert about["share_mode"] == "share"
        assert len(about["container_id"]) == 64
        assert about["pod_uid"] == (await host.node.pod("app-0"))["metadata"]["uid"]
        assert_balanced(page)
        assert page.one("gpuslice_exporter_attribution_available") == 1
        assert_device_series_carry_no_pod(page)
        assert_promtool_accepts(page)


async def test_a_refused_application_is_counted_and_its_neighbour_goes_on(tmp_path: Path) -> None:
    async with gpu_node(tmp_path) as host, host.exporter() as exporter:
        await host.node.create(app("good", 4))
        await running(host, "good")
        greedy = make_pod("greedy", 4, command="cuda_malloc -size=6144; sleep 60")
        greedy["spec"]["containers"][0]["image"] = f"{IMAGE}:3G"
        await host.node.create(greedy)
        page = await exporter.page_when(
            lambda page: (
                page.value("gpuslice_container_memory_refused_total", pod="greedy")
                and page.value(USED, pod="greedy") == 0
                and page.value(USED, pod="good")
            )
        )
        assert page.one("gpuslice_container_memory_refused_total", pod="greedy") >= 1
        assert page.one("gpuslice_container_memory_refused_total", pod="good") == 0
        assert page.one(USED, pod="good") == 3193 * MIB
        assert page.one("gpuslice_container_memory_peak_bytes", pod="good") == 3193 * MIB
        assert_balanced(page)


async def test_series_of_a_pod_end_with_it_and_the_cards_series_stay(tmp_path: Path) -> None:
    async with gpu_node(tmp_path) as host, host.exporter() as exporter:
        before = await exporter.page_when(lambda page: page.all("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"))
        await host.node.create(app("short", 4))
        during = await exporter.page_when(lambda page: page.value(USED, pod="short") == 3193 * MIB)
        await host.node.client.delete(PODS, "short", "default")
        after = await exporter.page_when(lambda page: not page.all(USED, pod="short"))
        device = [
            {
                (sample.name, *sorted(sample.labels.items()))
                for sample in page.samples
                if sample.name.startswith(("DCGM_", "gpuslice_gpu_"))
            }
            for page in (before, during, after)
        ]
        assert device[0] == device[1] == device[2]


async def test_processes_of_nobody_are_told_apart(tmp_path: Path) -> None:
    async with gpu_node(tmp_path) as host, host.exporter() as exporter:
        environment = gpu.environment(host.state, Path(host.node.settings.driver or ""))
        with host.machine() as machine:
            machine.add_ghost(0, 4_000_000, 500, "left behind")  # no such process any more
        process = await asyncio.create_subprocess_exec(
            Path(host.node.settings.driver or "") / "cuda_malloc", "1G", env=environment,
            stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            page = await exporter.page_when(
                lambda page: (
                    page.value("gpuslice_unattributed_memory_bytes", reason="host")
                    and page.value("gpuslice_unattributed_memory_bytes", reason="gone")
                )
            )
        finally:
            process.kill()
            await process.wait()
        assert page.one("gpuslice_unattributed_memory_bytes", reason="gone") == 500 * MIB
        assert page.one("gpuslice_unattributed_memory_bytes", reason="host") >= 1024 * MIB
        assert_balanced(page)


async def test_memory_that_only_a_descriptor_keeps_is_shown_as_no_process_s(tmp_path: Path) -> None:
    """Of a program without the library, or one that takes the lock off its descriptor, only this tells."""
    rest = {"reason": "driver"}
    async with gpu_node(tmp_path) as host, host.exporter() as exporter:
        environment = gpu.environment(host.state, Path(host.node.settings.driver or ""))
        page = await exporter.page_when(lambda page: page.value(UNATTRIBUTED, **rest) is not None)
        before = page.one(UNATTRIBUTED, **rest)
        with Worker([str(BUILD / "tests/worker"), "dlsym", "12020"], environment) as maker:
            maker.ok("start 0")
            maker.ok(f"alloc 0 physical {600 * MIB}")
            kept = descriptor_of(*maker.ok("share 0"))
        page = await exporter.page_when(lambda page: page.value(UNATTRIBUTED, **rest) == before + 600 * MIB)
        assert_balanced(page)
        os.close(kept)
        await exporter.page_when(lambda page: page.value(UNATTRIBUTED, **rest) == before)


def assert_balanced(page: Page) -> None:
    for uuid, (parts, used) in page.balance().items():
        assert parts == used, uuid


def assert_device_series_carry_no_pod(page: Page) -> None:
    for sample in page.samples:
        if sample.name.startswith(("DCGM_", "gpuslice_gpu_")):
            assert not {"pod", "namespace", "container"} & sample.labels.keys()


def assert_promtool_accepts(page: Page) -> None:
    """What it says of dcgm-exporter's names is theirs; of ours it has nothing to say."""
    told = subprocess.run(
        [find("promtool"), "check", "metrics"], input=page.text, capture_output=True, text=True, check=False
    )
    assert told.returncode in {0, 3}, told.stderr  # 3: style
    assert [line for line in told.stderr.splitlines() if not line.startswith("DCGM_")] == []
