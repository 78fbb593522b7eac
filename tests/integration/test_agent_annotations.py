"""What stands on a pod is what kubelet assigned, no matter who wrote something else there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuslice.adapters.kube.resources import PODS
from tests.integration.agent_bench import Bench, eventually

V100 = 16130
TWO = {0: V100, 1: V100}


# -- what cannot be read ---------------------------------------------------------------------------------
@pytest.mark.parametrize("index", ["-1", "zero", "", "7,7", "99999999999"])
async def test_a_corrupt_annotation_is_mended_by_the_truth(tmp_path: Path, index: str) -> None:
    async with Bench(tmp_path).running() as node:
        pod = await node.place("p", 4, annotations={"ALIYUN_COM_GPU_MEM_IDX": index})
        await node.kubelet.admit(pod)
        await node.kubelet.start_container(pod)
        await node.annotated("p", IDX="0", POD="4", ASSIGNED="true")


async def test_an_annotation_that_somebody_changed_is_set_right(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        pod = await node.place("p", 4, 1)
        await node.kubelet.admit(pod)
        await node.annotated("p", IDX="1", ASSIGNED="true")
        wrong = {
            "ALIYUN_COM_GPU_MEM_IDX": "0",
            "scheduler.framework.gpushare.allocation": '{"0":{"0":4}}',
        }
        await node.client.merge_patch(PODS, "p", {"metadata": {"annotations": wrong}}, "default")
        said = await node.annotated("p", IDX="1")
        assert json.loads(said["scheduler.framework.gpushare.allocation"]) == {"0": {"1": 4}}


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        ("ALIYUN_COM_GPU_MEM_IDX", "0"),
        ("ALIYUN_COM_GPU_MEM_POD", "1"),
        ("gpuslice.io/visible-devices", "all"),
        ("scheduler.framework.gpushare.allocation", '{"0":{"0":4}}'),
        ("gpushare.alibabacloud.com/core-percentage", '{"0":{"1":5}}'),
        ("gpushare.alibabacloud.com/core-percentage", "x"),
    ],
)
async def test_no_annotation_says_something_else_than_the_others(tmp_path: Path, name: str, lie: str) -> None:
    """Where two disagree we go by one of them, and tools that read the other would be led astray."""
    async with Bench(tmp_path, TWO).running() as node:
        pod = await node.place("p", 4, 1)
        await node.kubelet.admit(pod)
        await node.kubelet.start_container(pod)
        before = await node.annotations("p")
        await node.client.merge_patch(PODS, "p", {"metadata": {"annotations": {name: lie}}}, "default")
        node.agent.reconciler.wake()

        async def mended() -> bool:
            return without_times(await node.annotations("p")) == without_times(before)

        await eventually(mended, f"{name} is set right")
        await eventually(lambda: not node.agent.state.due_repairs(), "nothing is left to be written")


def without_times(annotations: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in annotations.items() if not name.endswith("_TIME")}
