"""Two leaders one after the other, with messages of the first still on their way: no card is given twice.

The first lost its lease without noticing it in time: it hangs, or its network does. What it had sent arrives
whenever the test says so, before, amid and after the second's take-over.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.wire.extender import BindingArgs
from gpuslice.apps.extender.binder import LONGEST_REQUEST_S
from gpuslice.apps.extender.main import Extender
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.core.contract import ANN_ASSIGNED, ANN_GRANTED, ANN_INDEX, ANN_POD_UNITS, ANN_REQUEST
from simcluster.cluster.faults import Fault
from tests.integration.extender_rig import Api
from tests.integration.virtual import HeldTransport, Message, Network, Process, VirtualLoop
from tests.speedups import with_speedups

LEASE = "gpushare-schd-extender"
UNITS = (9, 8, 7, 9, 8, 7, 9, 8)
"""Asked for on three cards of 15: no two of them fit on one, so that each card given twice shows."""


class Replica:
    """One extender, and kube-scheduler's calls to it."""

    def __init__(self, name: str, network: Network, loop: VirtualLoop) -> None:
        self.process = Process(name, loop)
        self.stopped_at_s: float | None = None  # its clock
        self._loop = loop
        settings = ExtenderSettings(policy="binpack", leader_elect=True, lease_identity=name)
        self.extender = Extender(
            settings,
            KubeClient(HeldTransport(network, self.process)),
            clock=self._clock,
            with_speedups=with_speedups(),
        )
        self.process.start(self.extender.work(), "work")
        loop.settle()

    def _clock(self) -> float:
        return self._loop.time() if self.stopped_at_s is None else self.stopped_at_s

    def bind(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        args = BindingArgs(meta["name"], meta["namespace"], meta["uid"], "n1")
        self.process.start(self.extender.binder.bind(args), f"bind {meta['name']}")


class Succession:
    """A cluster of one node, a first leader that has sent what it could, and one that stands by."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.api = Api()
        self.api.add_node("n1", 45, 3)
        self.pods = [self.api.add_pod(f"p{number}", str(units)) for number, units in enumerate(UNITS)]
        self.network = Network(self.api.cluster, self.loop)
        self.first = Replica("first", self.network, self.loop)
        self.until_ready(self.first)
        self.second = Replica("second", self.network, self.loop)
        self.network.calm()

    def until_ready(self, replica: Replica) -> None:
        for _ in range(100):
            self.network.calm()
            if not replica.extender.not_ready():
                return
            self.loop.advance(1.0)
        raise AssertionError(replica.extender.not_ready())

    def sent_by(self, replica: Replica) -> list[Message]:
        return [message for message in self.network.messages if message.sender is replica.process]

    def held(self) -> dict[str, int]:
        """Units per card, of bound pods."""
        sums: dict[str, int] = {}
        for pod in self.api.pods():
            if pod["spec"].get("nodeName"):
                annotations = pod["metadata"]["annotations"]
                card, granted = annotations[ANN_INDEX], json.loads(annotations.get(ANN_GRANTED, "{}"))
                units = int(annotations[ANN_POD_UNITS])
                sums[card] = sums.get(card, 0) + granted.get("main", units)
        return sums

    def close(self) -> None:
        for replica in (self.first, self.second):
            replica.process.kill()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        asyncio.set_event_loop(None)


@pytest.fixture
def succession() -> Iterator[Succession]:
    played = Succession()
    yield played
    played.close()


@pytest.mark.parametrize("seed", range(40))
def test_what_the_first_leader_sent_does_nothing_once_the_second_answers(
    succession: Succession, seed: int
) -> None:
    dice = random.Random(seed)
    world, network = succession, succession.network
    for pod in world.pods:
        world.first.bind(pod)
    world.loop.settle()

    # some of what the first sends arrives, in any order, and then nothing of it for longer than a lease lives
    for _ in range(dice.randrange(12)):
        if sent := world.sent_by(world.first):
            network.deliver(dice.choice(sent))
    held_back: list[Message] = []
    for _ in range(1000):  # what slips through may renew the first one's lease
        held_back += world.sent_by(world.first)
        network.messages = [each for each in network.messages if each not in held_back]
        if not world.second.extender.not_ready() and not network.messages:
            break
        # and one of them may slip through at any moment of the second's take-over; not of those that renew
        # the lease, with which the first would rightly lead on
        renewals = ("PUT", "PATCH", "POST")
        strays = [
            each
            for each in held_back
            if not (each.request.path.endswith(f"/{LEASE}") and each.request.method in renewals)
        ]
        if strays and dice.random() < 0.1:
            held_back.remove(late := dice.choice(strays))
            network.messages.append(late)
            network.deliver(late)
        elif network.messages:
            network.deliver(dice.choice(network.messages))
        else:
            for stream in [each for each in network.streams if each.owner is world.second.process]:
                while stream.pending:
                    network.deliver_line(stream)
            world.loop.advance(0.5)
    assert not world.second.extender.not_ready()

    # the second gives the cards to others; then all the rest arrives
    for pod in reversed(world.pods):
        world.second.bind(pod)
    world.loop.settle()
    while world.sent_by(world.second):
        network.deliver(dice.choice(world.sent_by(world.second)))
    network.messages += held_back
    network.calm()
    assert all(units <= 15 for units in world.held().values())
    assert len(world.held()) == 3
    world.until_ready(world.second)
    assert list(world.second.extender.ledger.overcommitted()) == []
    assert world.held() == {
        str(card): 15 - left for card, left in enumerate(world.second.extender.ledger.snapshot()["n1"].left)
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_grant_that_the_first_leader_sent_late_takes_no_card_from_whom_the_second_bound(
    succession: Succession, seed: int
) -> None:
    dice = random.Random(seed)
    world, network = succession, succession.network
    running = world.pods[::3]  # of 9 units each
    for pod in running:
        world.first.bind(pod)
    world.loop.settle()
    network.calm()
    for pod in running:
        wish = {ANN_ASSIGNED: "true", ANN_REQUEST: str(dice.choice((12, 15)))}
        path = f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}"
        world.api.patch(path, {"metadata": {"annotations": wish}})
    held_back: list[Message] = []
    while not held_back:
        for stream in network.streams:
            while stream.pending:
                network.deliver_line(stream)
        held_back = [each for each in world.sent_by(world.first) if "/pods/" in each.request.path]
        for message in [each for each in network.messages if each not in held_back]:
            network.deliver(message)
        world.loop.advance(0.1)
    world.first.process.kill()
    network.forget(world.first.process)
    network.messages = [each for each in network.messages if each.sender is world.second.process]

    late_s = [dice.uniform(0, 60) for _ in held_back]  # when each of them arrives after all
    small = [world.api.add_pod(f"late-{number}", "4") for number in range(6)]
    began_s = world.loop.time()
    for _ in range(400):
        network.calm()
        world.loop.advance(0.25)
        for at_s, message in zip(late_s, held_back, strict=True):
            if began_s + at_s <= world.loop.time() < began_s + at_s + 0.25:
                world.api.cluster.handle(message.request)
        if small and not world.second.extender.not_ready():  # into the room that the grants are to take
            world.second.bind(small.pop())
            world.loop.settle()
    network.calm()
    assert all(units <= 15 for units in world.held().values()), world.held()
    assert list(world.second.extender.ledger.overcommitted()) == []
    assert world.held() == {
        str(card): 15 - left for card, left in enumerate(world.second.extender.ledger.snapshot()["n1"].left)
    }


def test_a_leader_whose_clock_stands_still_binds_no_pod_that_its_successor_has_not_seen(
    succession: Succession,
) -> None:
    """A machine that was stopped and goes on: by its clock its lease is still good."""
    world, first, second = succession, succession.first, succession.second
    first.stopped_at_s = world.loop.time()
    while second.extender.not_ready():
        for message in world.sent_by(second):
            world.network.deliver(message)
        for stream in world.network.streams:
            while stream.pending:
                world.network.deliver_line(stream)
        world.loop.advance(0.5)
    assert not first.extender.not_ready()
    world.network.messages = [each for each in world.network.messages if each.sender is second.process]

    late = world.api.add_pod("late", "9")
    for stream in world.network.streams:
        while stream.pending:
            world.network.deliver_line(stream)
    for pod in world.pods:
        second.bind(pod)
    world.loop.settle()
    while world.sent_by(second):
        world.network.deliver(world.sent_by(second)[0])
    first.bind(late)  # it has not heard of those that the second bound
    world.loop.settle()
    while sent := [each for each in world.sent_by(first) if each.request.method != "PUT"]:
        world.network.deliver(sent[0])
        world.loop.settle()
    assert first.extender.not_ready() == "not the leader, that is second"
    assert world.api.bound_to("late") == ""
    assert len(world.held()) == 3


@pytest.mark.parametrize("code", [403, 500])
def test_a_pod_that_nobody_may_change_does_not_keep_the_second_leader_from_answering_for_good(
    succession: Succession, code: int
) -> None:
    """An admission policy that was made after the pod refuses each update of it; or its webhook is down."""
    world = succession
    stuck, other = world.pods[0], world.pods[1]
    world.first.bind(stuck)
    world.loop.settle()
    while not [each for each in world.sent_by(world.first) if each.request.path.endswith("/binding")]:
        world.network.deliver(world.sent_by(world.first)[0])
    world.first.process.kill()
    world.network.forget(world.first.process)
    world.network.messages.clear()  # its Binding is lost, and nobody knows
    world.api.cluster.add_fault(Fault(method="PATCH", path=f".*/pods/{stuck['metadata']['name']}", code=code))

    began_s = world.loop.time()
    world.until_ready(world.second)
    assert world.loop.time() - began_s > LONGEST_REQUEST_S  # what the API server had begun has ended
    world.second.bind(other)
    world.loop.settle()
    world.network.calm()
    assert world.held() == {"0": UNITS[1]}
    assert list(world.second.extender.ledger.overcommitted()) == []


def test_a_lease_that_lapses_unseen_and_is_renewed_late_leaves_no_leader_that_never_answers(
    succession: Succession,
) -> None:
    """The lapse was not told, nor was its end: who takes over must look again by itself."""
    world, second = succession, succession.second
    world.first.process.kill()
    world.network.forget(world.first.process)
    world.network.messages.clear()

    def sent_about(what: str) -> list[Message]:
        return [each for each in world.sent_by(second) if each.request.path.endswith(f"/{what}")]

    elector = second.extender.leadership.elector
    assert elector is not None
    while not (elector.leading and sent_about("pods")):  # it begins to take over
        for message in world.sent_by(second):
            world.network.deliver(message)
        world.loop.advance(0.1)

    def renewed_after(seconds: float) -> None:
        while not sent_about(LEASE):
            world.loop.advance(0.1)
        world.loop.advance(seconds)
        for _ in range(2):  # read, and written
            world.network.deliver(sent_about(LEASE)[0])

    renewed_after(2.5)
    while not sent_about(LEASE):
        world.loop.advance(0.1)
    world.loop.advance(elector._held_until - world.loop.time() - 0.5)
    world.network.lose_request(sent_about("pods")[0])
    world.loop.advance(1.1)  # it tries again, and does not lead
    assert not elector.leading
    renewed_after(0.0)
    assert elector.leading
    for _ in range(30):
        world.network.calm()
        world.loop.advance(0.5)
    assert second.extender.not_ready() == ""
