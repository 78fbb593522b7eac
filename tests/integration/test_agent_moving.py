"""A node that changes from the open-source gpushare's plugin to ours while pods of it run."""

from __future__ import annotations

from pathlib import Path

from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.core.contract import ANN_ASSIGNED
from tests.integration.agent_bench import Bench, uuid


async def test_a_pod_that_another_plugin_gave_ids_of_several_cards_keeps_its_annotation(
    tmp_path: Path,
) -> None:
    """That plugin takes any ids and tells the card by the annotation alone: the ids say nothing."""
    async with Bench(tmp_path, {0: 16130, 1: 16130}).running() as node:
        theirs = await node.place("theirs", 4, 1)
        await node.client.merge_patch(
            PODS, "theirs", {"metadata": {"annotations": {ANN_ASSIGNED: "true"}}}, "default"
        )
        ids = frozenset(f"{uuid(card)}-_-{number}" for card in (0, 1) for number in (7, 8))
        node.kubelet.hold(theirs, ids, dp.ContainerAllocateResponse())
        ours = await node.place("ours", 4, 0)
        await node.kubelet.admit(ours)
        await node.annotated("ours", ASSIGNED="true", IDX="0")  # kubelet's device assignments was read
        assert (await node.annotations("theirs"))["ALIYUN_COM_GPU_MEM_IDX"] == "1"


async def test_on_a_node_with_one_card_its_pods_simply_go_on(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        theirs = await node.place("theirs", 4, 0)
        ids = frozenset(f"{uuid(0)}-_-{number}" for number in (0, 3, 6, 9))
        node.kubelet.hold(theirs, ids, dp.ContainerAllocateResponse())
        await node.annotated("theirs", ASSIGNED="true", IDX="0")
        ours = await node.place("ours", 11, 0)
        await node.kubelet.admit(ours)
        assert not node.kubelet.ids(ours) & ids
