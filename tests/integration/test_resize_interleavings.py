"""Resizes under lost, late and repeated messages, and deaths: ledger, limits files and node agree again.

GPUSLICE_RESIZES=10000 plays as many.
"""

from __future__ import annotations

import os
import random
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.region.limits import parse_limits
from gpuslice.apps.agent.main import Agent
from gpuslice.core.model import Pod, Refusal
from gpuslice.core.resize import grown, more
from gpuslice.core.units import limit_bytes
from tests.integration.interleaving_node import Fleet, NodeInMemory
from tests.integration.interleaving_rig import World

RESIZES = int(os.environ.get("GPUSLICE_RESIZES", "120"))
REQUEST = "gpuslice.io/memory-request"
UNITS = 15
FLEET = Fleet({"n1": (UNITS, UNITS), "n2": (UNITS,)})
CREATED = 2
PODS = {"a": "n1", "b": "n1", "c": "n1", "d": "n1", "e": "n2", "f": "n2", "g": "n2"}
FATES = ("deliver", "deliver", "lose_answer", "lose_request", "delay", "repeat")
SETTLED_EVERY = 20
SETTLED_S = 45
"""Longer than any retry of a request whose answer was lost."""


class ResizingNode(NodeInMemory):
    def work_of(self, agent: Agent) -> dict[str, Coroutine[Any, Any, None]]:
        return {**agent.upkeep(), "resize": agent.resizer.run()}


class ResizingWorld(World):
    node_class = ResizingNode

    def begin(self) -> None:
        for name, node in PODS.items():
            self.create(name, CREATED)
            self.rest()
            self.bind(next(pod for pod in self.pods() if pod["metadata"]["name"] == name), node)
            self.rest()
            (pod,) = self.waiting(node)
            self.play(self.nodes[node], self.nodes[node].admit(pod))
            self.rest()
            self.play(self.nodes[node], self.nodes[node].start(pod["metadata"]["uid"]))
            self.rest(6.0)

    def resize(self, name: str, units: int) -> None:
        body = {"metadata": {"annotations": {REQUEST: str(units)}}}
        path = f"/api/v1/namespaces/default/pods/{name}"
        self.call("PATCH", path, body, "application/merge-patch+json")

    def trouble(self) -> None:
        """Something dies and comes back, or messages have fates of their own."""
        kind, node = self.dice.random(), self.nodes[self.dice.choice(sorted(self.nodes))]
        if kind < 0.05:
            self.kill_extender()
            self.start_extender()
        elif kind < 0.15:
            node.kill_agent()
            node.start_agent()
        elif kind < 0.2 and not node.busy:
            node.restart(keeps_checkpoint=True)
        for _ in range(self.dice.choice((0, 1, 3))):
            if self.network.messages:
                getattr(self.network, self.dice.choice(FATES))(self.dice.choice(self.network.messages))
        if self.network.streams and self.dice.random() < 0.1:
            self.network.cut(self.dice.choice(self.network.streams))
        if self.dice.random() < 0.5:
            self.network.calm()

    def settle(self) -> None:
        """Deliver everything for a while: who waits for room asks again each second, so it is never calm."""
        for _ in range(SETTLED_S * 2):
            self.network.calm()
            self.loop.advance(0.5)

    def in_force(self) -> Iterator[tuple[Pod, int]]:
        """Each pod as it is recorded, and the bytes that its limits file says."""
        for pod in self.views():
            (limit,) = parse_limits(self.nodes[pod.node].running[pod.uid, "main"].limits_now())
            yield pod, limit.memory_bytes or 0

    def nobody_has_more_than_is_recorded(self) -> None:
        for process in self.processes():
            process.check()
        assert list(self.rebuilt().overcommitted()) == []
        assert self.extender is not None
        assert list(self.extender.ledger.overcommitted()) == []
        for pod, in_force in self.in_force():
            assert in_force <= self.bytes_of(pod)

    def all_agree(self) -> None:
        rebuilt, extender = self.rebuilt(), self.extender
        assert extender is not None
        for name, node in self.nodes.items():
            assert rebuilt.state(name) == extender.ledger.state(name)
            assert node.agent is not None
            aside = node.agent.state.aside.ids()
            for pod, in_force in self.in_force():
                assert in_force == self.bytes_of(pod)
                assert pod.request is not None
                if pod.node == name:
                    assert len(aside.get(pod.uid, ())) == pod.request.units - CREATED
        for pod in self.views():  # what is not granted has no room
            if (larger := more(pod)) is not None:
                holds = rebuilt.holds.on(pod.node)
                assert holds is not None
                assert isinstance(grown(pod, larger, holds.state(), {}), Refusal)
            else:
                assert pod.request == pod.wanted or pod.wanted is None

    @staticmethod
    def bytes_of(pod: Pod) -> int:
        assert pod.request is not None
        return limit_bytes(FLEET.memory_mib(UNITS), pod.request.units, UNITS)


@pytest.mark.parametrize("seed", range(2))
def test_ledger_limits_and_node_agree_after_resizes_under_faults(tmp_path: Path, seed: int) -> None:
    world = ResizingWorld(tmp_path, seed, FLEET)
    dice = random.Random(seed)
    try:
        world.begin()
        for number in range(1, RESIZES // 2 + 1):
            world.resize(dice.choice(sorted(PODS)), dice.randint(CREATED, 9))
            world.trouble()
            world.loop.advance(dice.choice((0.05, 0.3, 1.0)))
            world.nobody_has_more_than_is_recorded()
            if number % SETTLED_EVERY == 0:
                world.settle()
                world.all_agree()
    finally:
        world.close()
