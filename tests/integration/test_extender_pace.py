"""kube-scheduler decides faster than an API server writes: pods are bound more slowly, none is refused."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from gpuslice.apps.extender.binder import MOST_AT_ONCE
from gpuslice.apps.extender.gated_groups import GATHER_S
from gpuslice.apps.extender.settings import ExtenderSettings
from simcluster.cluster.faults import Fault
from tests.integration.extender_rig import Rig, cluster, rig

ROOT = Path(__file__).parents[2]
PODS = 2 * MOST_AT_ONCE
TOO_BUSY_FOR = 16  # requests


async def bind_all(extender: Rig) -> tuple[list[str], int]:
    """As kube-scheduler does: filter after filter, and binds beside them; the most of these at once."""
    calls: list[asyncio.Task[str]] = []
    most = 0
    for number in range(PODS):
        pod = extender.api.add_pod(f"p{number:03}", "1")
        assert (await extender.filter(pod, "n1"))["NodeNames"] == ["n1"]
        calls.append(asyncio.create_task(extender.bind_unasked(pod)))
        most = max(most, sum(not call.done() for call in calls))
    return list(await asyncio.gather(*calls)), most


def strike(extender: Rig, **how: int | float) -> Fault:
    fault = Fault(method="POST", path=".*/binding", **how)  # type: ignore[arg-type]
    extender.api.cluster.add_fault(fault)
    return fault


@pytest.mark.parametrize("delay_s", [0.005, 0.05, 0.5])
async def test_with_a_slow_api_server_binds_do_not_pile_up(delay_s: float) -> None:
    async with rig(cluster(n1=(PODS, 4))) as extender:
        slow = strike(extender, delay_s=delay_s, times=1000)
        answers, most = await bind_all(extender)
        assert answers == [""] * PODS
        assert most <= MOST_AT_ONCE + 2  # the last one asked about, and one that is being answered
        assert slow.times == 1000 - PODS  # each was asked for once


async def test_with_an_api_server_that_is_too_busy_each_bind_is_repeated_when_it_says_so() -> None:
    async with rig(cluster(n1=(PODS, 4))) as extender:
        strike(extender, code=429, retry_after_s=1, times=TOO_BUSY_FOR)
        counted = strike(extender, delay_s=0.001, times=1000)
        answers, most = await bind_all(extender)
        assert answers == [""] * PODS
        assert most <= MOST_AT_ONCE + 2
        assert counted.times == 1000 - PODS  # and none more often than the API server had refused it


async def test_a_bind_that_is_told_ten_times_in_a_row_to_wait_is_not_refused() -> None:
    async with rig(cluster(n1=(PODS, 4))) as extender:
        strike(extender, code=429, retry_after_s=0, times=10)
        assert await extender.bind(extender.api.add_pod(memory="1")) == ""


def test_a_bind_has_time_to_wait_so_often_before_kube_scheduler_gives_it_up() -> None:
    assert ExtenderSettings().bind_timeout_s > 10 * 1.0
    configuration = (ROOT / "charts/gpuslice/templates/extender-certificate.yaml").read_text()
    (given,) = re.findall(r"^httpTimeout: (\d+)s$", configuration, re.MULTILINE)
    assert GATHER_S + ExtenderSettings().bind_timeout_s < float(given)
