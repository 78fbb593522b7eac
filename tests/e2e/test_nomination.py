"""Nominated nodes, with a real kube-scheduler: it takes them without a search, and nothing else changes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.kube.errors import ConflictError
from gpuslice.adapters.kube.slim import SLIM_PODS
from gpuslice.core.contract import ANN_INDEX
from tests.builders import api_node
from tests.e2e import control_plane
from tests.e2e.cluster import (
    Cluster,
    Running,
    cluster,
    extender,
    pod,
    scheduler_arguments,
    shipped_configuration,
)
from tests.e2e.control_plane import ControlPlane
from tests.e2e.marks import ON_A_CONTROL_PLANE

pytestmark = ON_A_CONTROL_PLANE

UNITS, CARDS, NODES, PODS = 16, 2, 240, 120
TAINT = {"key": "team", "value": "other", "effect": "NoSchedule"}
USED = re.compile(r'^gpuslice_extender_nominations_total\{result="used"\} (\d+)', re.MULTILINE)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    with control_plane.api_server(tmp_path, without=("TaintNodesByCondition",)) as made:
        yield made


def nodes() -> list[dict[str, Any]]:
    """Every second one is tainted: kube-scheduler's own filters let no pod go there."""
    made = [api_node(f"node-{number:03}", UNITS * CARDS, CARDS) for number in range(NODES)]
    for each in made[::2]:
        each["spec"]["taints"] = [TAINT]
    return made


CLEARED_SINCE = 35


async def test_a_queue_is_nominated_and_lands_where_it_may(plane: ControlPlane) -> None:
    choosy = pod("choosy", 4)
    wish = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-077"]}
    preferred = [{"weight": 100, "preference": {"matchExpressions": [wish]}}]
    choosy["spec"]["affinity"] = {
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
    }
    async with cluster(plane, UNITS) as made:
        await made.add_nodes(nodes())
        with contextlib.ExitStack() as stack:
            ours = stack.enter_context(extender(plane, "--nominate-from=1"))
            await made.add_pods([pod(f"p-{number:03}", 1 + number % 9) for number in range(PODS)] + [choosy])
            arguments = scheduler_arguments(shipped_configuration(ours.url))
            stack.enter_context(control_plane.scheduler(plane, **arguments))
            await made.until(lambda: len(made.log.bound_at) == PODS + 1, 120)
            assert used(ours) > PODS / 4
        assert made.log.wrong == []
        await expect_nothing_left(made)
        await expect_bound_well(made)


async def expect_bound_well(made: Cluster) -> None:
    for each in await made.pods():
        assert int(each.spec.node_name.removeprefix("node-")) % 2 == 1, "bound to a node with a taint"
        assert ANN_INDEX in (each.metadata.annotations or {})
    assert len({each.spec.node_name for each in await made.pods()}) < NODES / 4  # packed


async def expect_nothing_left(made: Cluster) -> None:
    """Binding clears what a pod was nominated to, since 1.35; before, bound pods keep it."""
    left = [each for each in await made.pods() if each.status.nominated_node_name]
    if control_plane.minor_version() < CLEARED_SINCE:
        left = [each for each in left if not each.spec.node_name]
    assert not [each.metadata.name for each in left]


def used(ours: Running) -> int:
    found = USED.search(ours.get("/metrics")[1].decode())
    assert found is not None
    return int(found[1])


async def test_a_binding_carries_annotations_and_meets_the_version_that_it_asks_for(
    plane: ControlPlane,
) -> None:
    """What a bind in one write, and the fence of a take-over, rest on."""
    async with cluster(plane, UNITS) as made:
        await made.add_nodes([api_node("node-001", UNITS, 1)])
        await made.add_pods([pod("p", 4)])
        patch = {"status": {"nominatedNodeName": "node-001"}}
        nominated = await made.client.merge_patch(SLIM_PODS, "p", patch, "default", subresource="status")
        assert nominated.status.nominated_node_name == "node-001"
        fence = {"metadata": {"annotations": {"a": "1"}}}
        fenced = await made.client.merge_patch(SLIM_PODS, "p", fence, "default")
        before, meta = nominated.metadata, fenced.metadata
        with pytest.raises(ConflictError, match="Precondition failed"):
            await made.client.bind(
                "default", "p", "node-001", uid=before.uid, resource_version=before.resource_version
            )
        await made.client.bind(
            "default",
            "p",
            "node-001",
            uid=meta.uid,
            resource_version=meta.resource_version,
            annotations={"a": "2"},
        )
        (bound,) = await made.pods()
        assert (bound.metadata.annotations, bound.spec.node_name) == ({"a": "2"}, "node-001")
        cleared = control_plane.minor_version() >= CLEARED_SINCE
        assert bound.status.nominated_node_name == ("" if cleared else "node-001")
