"""The extender killed at every message that it waits for, under load; the next one finds all as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.wire.extender import BindingArgs
from gpuslice.apps.extender.main import Extender
from gpuslice.apps.extender.routes import inspect_all
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.core.contract import ANN_INDEX, ANN_POD_UNITS
from tests.integration.extender_rig import Api
from tests.integration.virtual import HeldTransport, Message, Network, Process, VirtualLoop
from tests.speedups import with_speedups

UNITS = (5, 5, 4, 3, 6, 7, 2)
"""Asked for on two cards of 15: in all more than fits, so that each promise counts."""
FATES = ("lost", "done", "late")
"""What became of the message at which the extender died: never sent, carried out, carried out much later."""


class Story:
    """One cluster, one network, one extender after the other."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.api = Api()
        self.api.add_node("n1", 30, 2)
        self.pods = [self.api.add_pod(f"p{number}", str(units)) for number, units in enumerate(UNITS)]
        self.network = Network(self.api.cluster, self.loop)
        self.start()

    def start(self) -> None:
        self.process = Process("extender", self.loop)
        client = KubeClient(HeldTransport(self.network, self.process))
        self.extender = Extender(ExtenderSettings(policy="binpack"), client, with_speedups=with_speedups())
        self.process.start(self.extender.work(), "work")
        self.loop.settle()

    def until_ready(self) -> None:
        while self.extender.not_ready():
            assert self.network.calm(), self.extender.not_ready()

    def bind(self, pods: Iterable[dict[str, Any]]) -> None:
        """All of them at once."""
        for pod in pods:
            meta = pod["metadata"]
            args = BindingArgs(meta["name"], meta["namespace"], meta["uid"], "n1")
            self.process.start(self.extender.binder.bind(args), f"bind {meta['name']}")
        self.loop.settle()

    def writes(self) -> list[Message]:
        return [message for message in self.network.messages if message.request.method != "GET"]

    def kill(self) -> None:
        self.process.kill()
        self.network.forget(self.process)

    def inspect(self) -> object:
        found = self.loop.run_until_complete(inspect_all(self.extender.ledger))
        return msgspec.to_builtins(found)

    def held(self) -> dict[str, int]:
        """Units per card, summed over the annotations of bound pods."""
        sums: dict[str, int] = {}
        for pod in self.api.pods():
            if pod["spec"].get("nodeName"):
                annotations = pod["metadata"]["annotations"]
                card = annotations[ANN_INDEX]
                sums[card] = sums.get(card, 0) + int(annotations[ANN_POD_UNITS])
        return sums

    def waiting(self) -> list[int]:
        """What the pods that are not bound ask for."""
        bound = {pod["metadata"]["name"] for pod in self.api.pods() if pod["spec"].get("nodeName")}
        return [units for number, units in enumerate(UNITS) if f"p{number}" not in bound]

    def close(self) -> None:
        self.kill()
        self.loop.close()
        asyncio.set_event_loop(None)


@pytest.fixture
def story() -> Iterator[Story]:
    played = Story()
    yield played
    played.close()


def die_at(story: Story, number: int, fate: str) -> list[Message]:
    """Let `number` writes through, then kill with the next one on its way; what of it arrives later."""
    story.until_ready()
    story.bind(story.pods)
    for _ in range(number):
        if not story.writes():
            break
        story.network.deliver(story.writes()[0])
    late = story.writes()
    if fate == "done":
        for message in late:
            story.network.deliver(message)
    story.kill()
    story.network.messages.clear()
    return late if fate == "late" else []


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("number", range(15))
def test_killed_at_any_message_nothing_is_doubled_or_lost(story: Story, number: int, fate: str) -> None:
    late = die_at(story, number, fate)
    story.start()
    story.until_ready()
    others = [story.api.add_pod(name, "12") for name in "xy"]
    story.bind(others)
    story.network.calm()
    for message in late:  # what the dead one had sent arrives now that its cards are promised to others
        story.network.messages.append(message)
        story.network.deliver(message)
    story.network.calm()
    assert all(units <= 15 for units in story.held().values())
    story.bind(story.pods)
    story.network.calm()
    held = story.held()
    assert all(units <= 15 for units in held.values())
    assert all(units > 15 - min(held.values()) for units in story.waiting())  # who waits, fits nowhere
    seen = story.inspect()
    story.kill()
    story.start()
    story.until_ready()
    assert story.inspect() == seen
    assert not [
        pod["metadata"]["name"]
        for pod in story.api.pods()
        if ANN_INDEX in (pod["metadata"].get("annotations") or {}) and not pod["spec"].get("nodeName")
    ]
