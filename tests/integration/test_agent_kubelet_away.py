"""While kubelet is away its node says so, and nothing is placed there."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path

import msgspec

from gpuslice.adapters.kube.resources import NODES
from gpuslice.adapters.kube.slim import SlimNode
from gpuslice.adapters.kube.views import node_view
from gpuslice.core.contract import GPU_MEM, NODE_KUBELET_AWAY
from gpuslice.core.holds import NodeHolds
from gpuslice.core.model import Placement
from gpuslice.core.placement import place
from tests.builders import make_request
from tests.integration.agent_bench import NODE, Bench, eventually


async def test_while_kubelet_is_away_nothing_is_placed_on_its_node(tmp_path: Path) -> None:
    """What is bound meanwhile, kubelet would admit before it knows any device plugin, and fail for good."""
    async with Bench(tmp_path).running() as node:

        async def fits() -> bool:
            seen = node_view(msgspec.convert(await node.node_object(), SlimNode, strict=False))
            answer = place(NodeHolds(NODE, seen).state(), make_request(4))
            return isinstance(answer, Placement)

        await node.client.patch_status(
            NODES.as_dict(), NODE, {"capacity": {GPU_MEM: "15"}}
        )  # as kubelet does
        await eventually(fits, "cards are told")
        await node.kubelet.stop()
        await eventually(lambda: _not(fits()), "kept off", timeout_s=4.5)
        await node.kubelet.start()
        await eventually(fits, "placed again")
        await eventually(node.registered, "registered")


async def test_an_agent_that_starts_with_kubelet_there_takes_back_that_it_was_away(tmp_path: Path) -> None:
    away = {"metadata": {"annotations": {NODE_KUBELET_AWAY: "true"}}}
    async with Bench(tmp_path).running() as node:
        await node.stop_agent()
        await node.client.merge_patch(NODES.as_dict(), NODE, away)
        await node.start_agent()

        async def said() -> bool:
            return NODE_KUBELET_AWAY in ((await node.node_object())["metadata"].get("annotations") or {})

        await eventually(lambda: _not(said()), "taken back")


async def _not(answer: Awaitable[bool]) -> bool:
    return not await answer
