"""Pod groups by labels with a real kube-scheduler that knows of none: gates of a real API server, and binds.

By the node's sum, all that kube-scheduler knows, fourteen members fit where there are cards for eight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice.core.contract import GATE_POD_GROUP, LABEL_GROUP_MIN, LABEL_GROUP_NAME
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

pytestmark = ON_A_CONTROL_PLANE

GATES_FIRST = 27
UNITS, CARDS, NODES = 16, 8, 4
MEMBERS, GANGS = 5, 6  # 30 of 32 cards
MORE_THAN_HALF = 9  # units: one to a card


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    if control_plane.minor_version() < GATES_FIRST:
        pytest.skip(f"scheduling gates came with Kubernetes 1.{GATES_FIRST}")
    with control_plane.api_server(tmp_path, without=("TaintNodesByCondition",)) as made:
        yield made


def member(gang: str, number: int) -> Object:
    made = pod(f"{gang}-{number}", MORE_THAN_HALF)
    made["metadata"]["labels"] = {LABEL_GROUP_NAME: gang, LABEL_GROUP_MIN: str(MEMBERS)}
    made["spec"]["schedulingGates"] = [{"name": GATE_POD_GROUP}]  # as the webhook gives it
    return made


async def bound(made: Cluster) -> dict[str, int]:
    """How many members of each gang have a node; of those that have any."""
    names = [each.metadata.name.rpartition("-")[0] for each in await made.pods() if each.spec.node_name]
    return dict(Counter(names))


async def test_gangs_start_whole_and_others_beside_them_also_when_the_leader_is_killed(
    plane: ControlPlane,
) -> None:
    names = [f"gang{number}" for number in range(GANGS + 1)]
    async with cluster(plane, UNITS) as made:
        nodes = [api_node(f"node-{number}", UNITS * CARDS, CARDS) for number in range(NODES)]
        nodes[0]["spec"] = {"unschedulable": True}  # what only kube-scheduler's own filters look at
        await made.add_nodes([*nodes, api_node("node-4", UNITS * CARDS, CARDS)])
        with extender(plane, log="first") as first:
            arguments = scheduler_arguments(shipped_configuration(first.url))
            with control_plane.scheduler(plane, **arguments):
                await made.add_pods([member(name, n) for name in names[:2] for n in range(MEMBERS)])
                await made.until(lambda: len(made.log.bound_at) >= MEMBERS, 120)
                first.kill()
        with extender(plane, log="second") as second:
            arguments = scheduler_arguments(shipped_configuration(second.url))
            with control_plane.scheduler(plane, **arguments):
                await made.until(lambda: len(made.log.bound_at) == 2 * MEMBERS, 120)
                await made.add_pods([member(name, n) for name in names[2:] for n in range(MEMBERS)])
                await made.until(lambda: len(made.log.bound_at) >= GANGS * MEMBERS, 120)
                await made.add_pods([pod(f"alone-{number}", MORE_THAN_HALF) for number in range(2)])
                await made.until(lambda: len(made.log.bound_at) == GANGS * MEMBERS + 2, 120)
                found = await bound(made)
                assert found.pop("alone") == 2
                assert set(found.values()) == {MEMBERS}
                (waiting,) = set(names) - set(found)

                for number in range(MEMBERS):
                    await made.remove_pod(f"{next(iter(found))}-{number}")
                await made.until(lambda: len(made.log.bound_at) == GANGS * MEMBERS + 2, 120)
                assert (await bound(made))[waiting] == MEMBERS
        assert made.log.wrong == []
