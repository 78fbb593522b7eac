"""Pods that got one another's cards: whatever is lost on the way, no card is promised beyond its units."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.interleaving_node import CARDS, Object, uuid_of
from tests.integration.interleaving_rig import World
from tests.integration.virtual import Message

NODE = "n1"  # a card of 4 units and one of 3
FATES = ["deliver", "lose_request", "lose_answer", "delay", "agent dies before", "agent dies after"]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


class Story:
    """Delivers one thing after another and adds up after each; one PATCH meets a fate of its own."""

    def __init__(self, world: World, fated: int = -1, fate: str = "deliver") -> None:
        self.world = world
        self.fated = fated
        self.fate = fate
        self.patches = 0  # of pods, by the agent
        self.late: list[Message] = []
        self.most_free: tuple[int, ...] = CARDS[NODE]  # by card, what anybody may ever count

    def go_on(self, seconds: float) -> None:
        """Until nothing moves for so long."""
        end = self.world.loop.time() + seconds
        while self.world.loop.time() < end:
            while self._one_thing():
                self.check()
            self.world.loop.advance(0.1)

    def _one_thing(self) -> bool:
        network = self.world.network
        if messages := [one for one in network.messages if one not in self.late]:
            self._meet(messages[0])
        elif pending := [each for each in network.streams if each.pending]:
            network.deliver_line(pending[0])
        else:
            return False
        return True

    def _meet(self, message: Message) -> None:
        mine = message.sender is self.world.nodes[NODE].process and message.request.method == "PATCH"
        fate = "deliver"
        if mine and "/pods/" in message.request.path:
            fate = self.fate if self.patches == self.fated else fate
            self.patches += 1
        if fate == "delay":
            self.late.append(message)
        if fate.startswith("agent dies"):
            self._die(message, delivered=fate.endswith("after"))
        else:
            getattr(self.world.network, fate)(message)

    def _die(self, message: Message, *, delivered: bool) -> None:
        node = self.world.nodes[NODE]
        node.kill_agent()
        if delivered:
            self.world.network.deliver(message)
        else:
            self.world.network.messages.remove(message)
        node.start_agent()

    def arrive_late(self) -> None:
        """What its sender had given up arrives after all."""
        for message in self.late:
            self.world.network.deliver(message)
            self.check()
        self.late.clear()

    def check(self) -> None:
        assert self.world.extender is not None
        for ledger in (self.world.rebuilt(), self.world.extender.ledger):
            assert list(ledger.overcommitted()) == []
            state = ledger.state(NODE)
            assert state is not None
            assert all(left <= most for left, most in zip(state.left, self.most_free, strict=True))

    def admit(self, pod: Object) -> None:
        node = self.world.nodes[NODE]
        self.world.play(node, node.admit(pod))

    def start_all(self) -> None:
        node = self.world.nodes[NODE]
        for uid in list(node.admitted):
            self.world.play(node, node.start(uid))
            self.go_on(1.0)


def placed(story: Story, *units: int) -> list[Object]:
    """Pods that the extender has placed on the node, in order, and that kubelet has not admitted."""
    world = story.world
    for number, amount in enumerate(units):
        pod = world.create(f"app-{number}", amount)
        world.bind(pod, NODE)
        world.rest()
    state = world.rebuilt().state(NODE)
    assert state is not None
    story.most_free = state.left
    return sorted(world.waiting(NODE), key=lambda pod: str(pod["metadata"]["name"]))


def everybody_agrees(world: World) -> None:
    node = world.nodes[NODE]
    for view in world.views():
        assert view.placement is not None
        said = {uuid_of(NODE, part.card): part.units for part in view.placement.slices}
        assert said == node.cards_of(view.uid)
        assert view.assigned


ORDERS = [(2, 1, 0), (1, 0, 2), (2, 0, 1), (1, 2, 0)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("after_each_s", "after_all_s"), [(1.0, 0.0), (0.0, 12.0)], ids=["one by one", "between two looks"]
)
def test_equal_pods_in_another_order_never_make_a_sum_pass(
    world: World, order: tuple[int, ...], after_each_s: float, after_all_s: float
) -> None:
    """They fill the smaller card and the larger one, so there is no room for a moment of both.

    All may have their devices when the agent finds out: then two that run wait for one another's card.
    """
    story = Story(world)
    pods = placed(story, 2, 2, 2)
    for number in order:
        story.admit(pods[number])
        story.go_on(after_each_s)
    story.go_on(after_all_s)
    story.start_all()
    story.go_on(12.0)
    everybody_agrees(world)
    assert story.patches


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("fated", range(6))
def test_no_loss_on_the_way_makes_a_sum_pass(world: World, fated: int, fate: str) -> None:
    story = Story(world, fated, fate)
    pods = placed(story, 2, 2, 2)
    story.admit(pods[2])
    story.go_on(1.0)
    story.admit(pods[1])
    story.go_on(6.0)
    story.arrive_late()
    story.go_on(6.0)
    story.admit(pods[0])
    story.go_on(6.0)
    story.start_all()
    story.go_on(12.0)
    assert len(world.nodes[NODE].admitted) == 3, world.rejections
    everybody_agrees(world)
