"""Pod groups with a real kube-scheduler (1.36, behind its gates): a gang is bound whole or not at all.

By the node's sum, all that kube-scheduler knows, fourteen members fit where there are cards for eight.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice.adapters.kube.http import ApiRequest
from tests.builders import api_node
from tests.e2e import control_plane
from tests.e2e.cluster import (
    Cluster,
    Object,
    cluster,
    extender,
    pod,
    scheduler_arguments,
    shipped_configuration,
)
from tests.e2e.control_plane import ControlPlane
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.e2e.pod_groups import FIRST, api_flags, gates, group, groups_path

pytestmark = ON_A_CONTROL_PLANE

UNITS, CARDS, NODES = 16, 8, 4
MEMBERS, GANGS = 5, 6  # 30 of 32 cards
MORE_THAN_HALF = 9  # units: one to a card


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    if control_plane.minor_version() < FIRST:
        pytest.skip(f"pod groups came with Kubernetes 1.{FIRST}")
    with control_plane.api_server(tmp_path, without=("TaintNodesByCondition",), flags=api_flags()) as made:
        yield made


async def add_gang(made: Cluster, name: str) -> None:
    headers, body = {"Content-Type": "application/json"}, json.dumps(group(name, MEMBERS)).encode()
    answer = await made.transport.request(ApiRequest("POST", groups_path(), headers=headers, body=body))
    assert answer.status == 201, answer.body
    await made.add_pods([member(name, number) for number in range(MEMBERS)])


def member(gang: str, number: int) -> Object:
    made = pod(f"{gang}-{number}", MORE_THAN_HALF)
    made["spec"]["schedulingGroup"] = {"podGroupName": gang}
    return made


async def bound(made: Cluster) -> dict[str, int]:
    """How many members of each gang have a node; of those that have any."""
    names = [each.metadata.name.rpartition("-")[0] for each in await made.pods() if each.spec.node_name]
    return dict(Counter(names))


async def test_gangs_are_bound_whole_and_others_beside_them(plane: ControlPlane) -> None:
    names = [f"gang{number}" for number in range(GANGS + 1)]
    async with cluster(plane, UNITS) as made:
        await made.add_nodes([api_node(f"node-{number}", UNITS * CARDS, CARDS) for number in range(NODES)])
        with contextlib.ExitStack() as stack:
            ours = stack.enter_context(extender(plane))
            arguments = scheduler_arguments(shipped_configuration(ours.url))
            arguments["flags"] += (gates(),)
            stack.enter_context(control_plane.scheduler(plane, **arguments))
            for name in names:
                await add_gang(made, name)
            await made.until(lambda: len(made.log.bound_at) >= GANGS * MEMBERS, 120)
            await made.add_pods([pod(f"alone-{number}", MORE_THAN_HALF) for number in range(2)])
            await made.until(lambda: len(made.log.bound_at) == GANGS * MEMBERS + 2, 120)
            found = await bound(made)
            assert found.pop("alone") == 2  # beside a gang that is tried again and again
            assert set(found.values()) == {MEMBERS}
            (waiting,) = set(names) - set(found)

            for number in range(MEMBERS):
                await made.remove_pod(f"{next(iter(found))}-{number}")
            await made.until(lambda: len(made.log.bound_at) == GANGS * MEMBERS + 2, 120)
            assert (await bound(made))[waiting] == MEMBERS
        assert made.log.wrong == []
