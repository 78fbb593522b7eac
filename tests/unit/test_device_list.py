"""Which devices kubelet may give out on a node that is to share no more."""

from __future__ import annotations

import msgspec

from gpuslice.adapters.kubelet.rpc import HEALTHY
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.device_list import DeviceList
from gpuslice.apps.agent.forgotten import RunningContainer
from gpuslice.apps.agent.pods import AgentPod, node_pod
from gpuslice.core.contract import device_id
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.mode import Rules
from gpuslice.core.model import NodeMode
from tests.builders import api_pod, make_node, make_pod, placed_annotations


async def test_what_runs_stays_healthy_while_a_kubelet_that_has_just_started_lists_nobody() -> None:
    """It looks at its pods later, and takes none in again whose devices are not healthy then."""
    node = make_node(cards=(3,))
    state = AllocationState(node)
    state.rules = Rules(NodeMode.EXCLUSIVE)
    annotations = placed_annotations(make_pod("p", 2, node="n1", card=0), node)
    document = api_pod("p", "2", node="n1", phase="Running", annotations=annotations)
    state.pod_changed(node_pod(msgspec.convert(document, AgentPod)))
    ids = frozenset(device_id(node.cards[0].uuid, unit) for unit in range(2))
    held = DeviceAssignment("default", "p", "main", ids)
    state.assignments_read((held,), asked_at_s=0.0)
    devices = DeviceList(state)
    await devices.update(node.cards, ())
    await devices.refresh()
    assert devices.counts()[HEALTHY] == 2

    state.kubelet_came([RunningContainer("f", "uid-p", held)])
    state.assignments_read((), asked_at_s=1e12)
    await devices.refresh()
    assert devices.counts()[HEALTHY] == 2

    state.pod_gone("uid-p")
    await devices.refresh()
    assert devices.counts()[HEALTHY] == 0
