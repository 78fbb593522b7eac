"""What the agent writes about its node, where the API server says no, or the node is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.node_reconciler import NodeReconciler
from gpuslice.apps.agent.settings import AgentSettings
from gpuslice.apps.agent.upkeep import LONGEST_RETRY_S
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.contract import NODE_GPUS
from gpuslice.core.model import Card, Node
from simcluster.cluster.faults import Fault
from tests.integration.extender_rig import Api
from tests.integration.virtual import HeldTransport, Network, Process, VirtualLoop


class CountingTransport(HeldTransport):
    """Counts what is written."""

    writes = 0

    async def request(self, request: ApiRequest) -> ApiResponse:
        self.writes += request.method != "GET"
        return await super().request(request)


class Upkeep:
    """The part of an agent that writes its node, in virtual time."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.api = Api()
        self.api.add_node("n1")
        self.network, self.process = Network(self.api.cluster, self.loop), Process("agent", self.loop)
        self.transport = CountingTransport(self.network, self.process)
        client = KubeClient(self.transport)
        state = AllocationState(Node("n1", (Card(0, "GPU-0", 16130, 15),)), clock=self.loop.time)
        settings, writer = AgentSettings(node_name="n1"), Writer(client, "n1", clock=self.loop.time)
        self.node = NodeReconciler(client, writer, state, settings, lambda: "", clock=self.loop.time)
        self.process.start(self.node.watch(), "watch")
        self.process.start(self.node.upkeep.run(), "keep")
        self.loop.settle()

    def passes(self, seconds: float) -> int:
        """How many writes were tried meanwhile."""
        before, end_s = self.transport.writes, self.loop.time() + seconds
        while self.loop.time() < end_s:
            self.network.calm()
            self.loop.advance(0.1)
        return self.transport.writes - before

    def says_its_cards(self) -> bool:
        return NODE_GPUS in (self.api.call("GET", "/api/v1/nodes/n1")["metadata"].get("annotations") or {})


@pytest.fixture
def upkeep() -> Iterator[Upkeep]:
    played = Upkeep()
    yield played
    played.process.kill()
    played.loop.close()
    asyncio.set_event_loop(None)


@pytest.mark.parametrize("code", [403, 503])
def test_a_node_that_cannot_be_written_is_tried_ever_more_rarely(upkeep: Upkeep, code: int) -> None:
    """An API server in need has thousands of agents."""
    upkeep.api.cluster.add_fault(Fault(method="PATCH", path="/api/v1/nodes/.*", code=code))
    upkeep.passes(60.0)
    assert upkeep.passes(10 * LONGEST_RETRY_S) <= 10
    upkeep.api.cluster.faults.clear()
    upkeep.passes(LONGEST_RETRY_S + 1.0)
    assert upkeep.says_its_cards()


def test_of_a_node_that_is_gone_nothing_is_written_until_it_is_made_anew(upkeep: Upkeep) -> None:
    upkeep.passes(1.0)
    assert upkeep.says_its_cards()
    upkeep.api.call("DELETE", "/api/v1/nodes/n1")
    upkeep.passes(1.0)
    upkeep.node.kubelet_answers(False)
    assert upkeep.passes(60.0) == 0
    upkeep.api.add_node("n1")
    upkeep.passes(1.0)
    assert upkeep.says_its_cards()
