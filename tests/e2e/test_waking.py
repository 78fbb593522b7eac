"""Room that is no event of Kubernetes' own has a real kube-scheduler look at waiting pods again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from gpuslice.adapters.kube.resources import CONFIG_MAPS, PODS
from tests import HANG_S
from tests.builders import api_node
from tests.e2e import control_plane
from tests.e2e.cluster import Cluster, cluster, extender, pod, scheduler_arguments, shipped_configuration
from tests.e2e.control_plane import api_server
from tests.e2e.marks import ON_A_CONTROL_PLANE

pytestmark = ON_A_CONTROL_PLANE

CARD_UNITS = 16
FENCE = "unhealthy-gpu-n1"
QUIET_S = 3.0  # longer than the back-off after a first refusal: who is not tried by then waits for an event


@contextlib.asynccontextmanager
async def fenced_card(folder: Path) -> AsyncIterator[Cluster]:
    """One node whose only card is out of use, our extender and the chart's scheduler."""
    with contextlib.ExitStack() as stack:
        context = api_server(folder, without=("TaintNodesByCondition",))
        plane = await asyncio.to_thread(stack.enter_context, context)
        async with cluster(plane, CARD_UNITS) as made:
            await made.client.create(CONFIG_MAPS, fence("0"), "kube-system")
            node = api_node("n1", CARD_UNITS, 1)
            node["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
            await made.add_nodes([node])
            running = await asyncio.to_thread(stack.enter_context, extender(plane))
            arguments = scheduler_arguments(shipped_configuration(running.url))
            await asyncio.to_thread(stack.enter_context, control_plane.scheduler(plane, **arguments))
            yield made


def fence(cards: str) -> dict[str, object]:
    metadata = {"name": FENCE, "namespace": "kube-system"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"gpus": cards}}


async def refused(made: Cluster, name: str) -> None:
    """Until kube-scheduler has tried the pod in vain, and the node's beginnings are no news any more."""
    async with asyncio.timeout(HANG_S):
        while not await conditions(made, name):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.05)
    await asyncio.sleep(QUIET_S)


async def conditions(made: Cluster, name: str) -> object:
    found = msgspec.to_builtins(await made.client.get(PODS, name, "default"))
    return found["status"].get("conditions")


async def test_a_pod_gets_a_card_at_once_that_an_operator_gives_back(tmp_path: Path) -> None:
    async with fenced_card(tmp_path) as made:
        await made.add_pods([pod("waits", 4)])
        await refused(made, "waits")
        assert not made.log.bindings
        await made.client.merge_patch(CONFIG_MAPS, FENCE, {"data": {"gpus": ""}}, "kube-system")
        await made.until(
            lambda: made.log.bindings, timeout_s=HANG_S
        )  # kube-scheduler by itself tries after 300
