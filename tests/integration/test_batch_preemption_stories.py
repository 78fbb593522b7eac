"""A kube-scheduler that sees the cluster late preempts for equal pods: each gets a card, for one victim."""

from __future__ import annotations

import random

import pytest

from tests.integration.preemption_rig import PODS, Object, Story

CARD, LOW, HIGH = 15, 8, 10


class LateScheduler:
    """kube-scheduler on nodes of one card each: it sees pods as they were some looks ago."""

    def __init__(self, story: Story, chance: random.Random) -> None:
        self.story = story
        self.chance = chance
        self.views = [story.api.pods()]
        self.nominated: dict[str, str] = {}  # its own, which it knows at once
        self.victims: dict[str, set[str]] = {}  # it tries a pod again when it sees that these leave

    def look(self) -> list[Object]:
        """All pods, of which it has seen nothing newer than this."""
        self.views = [*self.views[-3:], self.story.api.pods()]
        view = self.chance.choice(self.views)
        self.views = self.views[self.views.index(view) :]  # never back again
        return view

    def attempt(self, name: str) -> None:
        story, view = self.story, self.look()
        if story.api.bound_to(name):
            return
        by_name = {pod["metadata"]["name"]: pod for pod in view}
        staying = {each for each, pod in by_name.items() if not pod["metadata"].get("deletionTimestamp")}
        if name not in by_name or self.victims.get(name, set()) & staying:
            return
        held: dict[str, list[Object]] = {node: [] for node in story.nodes}
        claims = dict.fromkeys(story.nodes, 0)
        for pod in view:
            own = pod["metadata"]["name"]
            wanted = pod["status"].get("nominatedNodeName") or self.nominated.get(own)
            if node := pod["spec"].get("nodeName"):
                held[node].append(pod)
            elif wanted and own != name:
                claims[wanted] += HIGH
        room = {
            node: CARD - claims[node] - sum(LOW if low(pod) else HIGH for pod in pods)
            for node, pods in held.items()
        }
        mine = by_name[name]["status"].get("nominatedNodeName") or self.nominated.get(name)
        fitting = [node for node, free in room.items() if free >= HIGH]
        order = [[mine]] if mine in fitting else []
        for nodes in [*order, fitting]:
            if nodes and (passing := story.ask(story.api.pod(name), nodes)):
                story.api.patch(f"{PODS}/{name}/status", {"status": {"nominatedNodeName": passing[0]}})
                story.schedule(name)
                return
        if mine and any(pod["metadata"].get("deletionTimestamp") for pod in held[mine]):
            return
        candidates = {
            node: [pod["metadata"]["name"] for pod in pods if low(pod)]
            for node, pods in held.items()
            if not claims[node] and any(map(low, pods))
        }
        answer = story.propose_on(name, candidates) if candidates else {}
        if answer:
            node, victims = next(iter(answer.items()))  # several, where it named one that is gone
            self.victims[name] = victims
            self.nominated[name] = node
            story.api.patch(f"{PODS}/{name}/status", {"status": {"nominatedNodeName": node}})
            for victim in victims & story.names():
                story.api.delete_pod(victim, grace_s=30)


def low(pod: Object) -> bool:
    name: str = pod["metadata"]["name"]
    return name.startswith("low")


@pytest.mark.parametrize("seed", range(40))
def test_as_many_leave_as_there_are_pods_that_need_their_cards(seed: int) -> None:
    chance = random.Random(seed)
    nodes = chance.randint(3, 6)
    story = Story(nodes=nodes, cards=1)
    for number in range(nodes):
        story.place(f"low-{number}", LOW)
    highs = [f"high-{number}" for number in range(chance.randint(2, nodes - 1))]
    for name in highs:
        story.add(name, HIGH, 100)
    story.calm()
    scheduler = LateScheduler(story, chance)
    for _ in range(200):
        waiting = [name for name in highs if not story.api.bound_to(name)]
        if not waiting:
            break
        act = chance.random()
        if act < 0.5:
            scheduler.attempt(chance.choice(waiting))
        elif act < 0.7 and story.leaving():
            story.api.delete_pod(chance.choice(sorted(story.leaving())))
        elif act < 0.85:
            for stream in [each for each in story.network.streams if each.pending]:
                story.network.deliver_line(stream)
        else:
            story.calm(chance.choice((0, 1, 2)))
    gone = {f"low-{number}" for number in range(nodes)} - (story.names() - story.leaving())
    assert all(story.api.bound_to(name) for name in highs)
    assert len(gone) == len(highs)
    assert all(units <= CARD for units in story.held().values())
    story.close()
