"""The unit in which an agent cuts its cards into kubelet's devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice.apps.agent.device_list import TooManyUnitsError
from tests.integration.agent_bench import Bench, eventually


async def test_a_unit_too_fine_for_kubelet_stops_the_start_with_a_sentence(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {0: 81559}, settings={"memory_unit": "MiB"}, ready=False)
    with pytest.raises(ExceptionGroup) as stopped:
        async with bench.running() as node:
            await eventually(lambda: node.agent.not_ready() == "never", timeout_s=0.5)
    refused = stopped.value.subgroup(TooManyUnitsError)
    assert refused is not None
    assert "81559 devices in units of 1 MiB" in str(refused.exceptions[0])


async def test_small_cards_may_be_cut_into_mib(tmp_path: Path) -> None:
    async with Bench(tmp_path, {0: 16130}, settings={"memory_unit": "MiB"}).running() as node:
        assert node.kubelet.healthy() == 16130
        pod = await node.place("p", 4000, containers=None)
        granted = (await node.kubelet.admit(pod))["main"]
        assert granted.envs["ALIYUN_COM_GPU_MEM_DEV"] == "16130"
        assert granted.envs["ALIYUN_COM_GPU_MEM_CONTAINER"] == "4000"
