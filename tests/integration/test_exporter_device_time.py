"""Two containers with shares, on a card whose samples of a process include its waits for its turn."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.integration.exporter_rig import GpuNode, Page, gpu_node, have_native
from tests.integration.isolation_rig import BUILD, SANITIZER
from tests.integration.sim_node import make_pod, state_of

pytestmark = [
    pytest.mark.skipif(not have_native(), reason="the native parts are not built (make native)"),
    pytest.mark.skipif(
        bool(SANITIZER), reason="the exporter's own interpreter would need the sanitizer's runtime first"
    ),
]
SECONDS = "gpuslice_container_sm_seconds_total"
RATIO = "gpuslice_container_sm_utilization_ratio"
SAMPLED = "DCGM_CUSTOM_PROCESS_SM_UTIL"
SHARES = {"small": 30, "large": 70}


WORK = f"""
export GPUSLICE_SIM_KERNEL_US=2000
(echo start 0; echo burn 600000 0 0 kernel; exec sleep 600) | {BUILD}/tests/worker dlsym
"""
"""Queues kernels for ever."""


def pod_with(name: str, percent: int) -> dict[str, Any]:
    pod = make_pod(name, 4, command=WORK)
    pod["spec"]["containers"][0]["resources"]["limits"]["aliyun.com/gpu-core.percentage"] = str(percent)
    return pod


def worked_s(host: GpuNode) -> list[float]:
    """The seconds of the card's time that each process had by the driver's own account, the least first."""
    with host.machine() as machine:
        return sorted(
            machine.worked_ns(each.pid) / 1e9 for each in machine.holdings() if each.kind == "context"
        )


def both(page: Page, metric: str) -> list[float]:
    return [page.value(metric, pod=name) or 0.0 for name in SHARES]


async def test_on_a_card_that_takes_turns_each_container_is_shown_with_the_time_it_had(
    tmp_path: Path,
) -> None:
    """An H100's samples of two such containers were 57 and 96 %, whose work was 29 and 71 % of the card's."""
    async with (
        gpu_node(tmp_path, ("H100-80GB-HBM3",), "ack.node.gpu.schedule=core_mem") as host,
        host.exporter(ack_metrics="true") as exporter,
    ):
        with host.machine() as machine:
            machine.set_gauge(0, sampled_turn_us=13_000)
        for name, percent in SHARES.items():
            await host.node.create(pod_with(name, percent))
        for name in SHARES:
            await host.node.wait_pod(name, lambda pod: state_of(pod) == "running")
        await exporter.page_when(lambda page: all(both(page, RATIO)))
        await asyncio.sleep(5)

        before, worked, since = both(await exporter.page(), SECONDS), worked_s(host), time.monotonic()
        sampled = []
        for _ in range(10):
            await asyncio.sleep(1)
            page = await exporter.page()
            sampled.append(sum(value for _, value in page.all(SAMPLED)) / 100)
            assert sum(both(page, RATIO)) <= 1.001  # rounded
        after, done, took_s = both(await exporter.page(), SECONDS), worked_s(host), time.monotonic() - since
        shown = [then - now for now, then in zip(before, after, strict=True)]
        had = [then - now for now, then in zip(worked, done, strict=True)]
        assert mean(sampled) > 1.2 * sum(had) / took_s  # what was shown before
        assert shown == pytest.approx(had, rel=0.1)
