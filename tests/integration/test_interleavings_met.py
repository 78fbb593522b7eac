"""Orders of events that were met once, or thought of: each must end as it should."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice.apps.agent.plugin import IDENTIFY_S
from gpuslice.core.contract import ENV_INDEX
from simcluster.cluster.faults import Fault
from tests.integration.interleaving_node import Object, uuid_of
from tests.integration.interleaving_rig import World
from tests.integration.virtual import Process, Stream


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_two_equal_pods_started_in_the_opposite_order_keep_to_their_cards(world: World) -> None:
    """The race that the amount alone cannot decide: annotations, kubelet and environment still agree."""
    first, second = world.create("app-0", 3), world.create("app-1", 3)
    for pod in (first, second):
        world.bind(pod, "n1")
        world.rest()
    node = world.nodes["n1"]
    for pod in reversed(world.waiting("n1")):
        world.play(node, node.admit(pod))
        world.rest()
    for uid in list(node.admitted):
        world.play(node, node.start(uid))
        world.rest()
    assert len(node.running) == 2
    for view in world.views():
        assert view.placement is not None
        (part,) = view.placement.slices
        assert node.running[view.uid, "main"].environment[ENV_INDEX] == str(part.card)
        assert node.cards_of(view.uid) == {uuid_of("n1", part.card): 3}


def through(world: World, *fates: str) -> None:
    """Let the extender's messages meet their fates, one after another."""
    for fate in fates:
        sent = [one for one in world.network.messages if one.sender is world.process]
        getattr(world.network, fate)(sent[-1])


def test_a_binding_whose_answer_was_lost_keeps_its_card(world: World) -> None:
    first, second = world.create("app-0", 3), world.create("app-1", 3)
    world.network.calm()
    world.bind(first, "n2")
    through(world, "lose_answer")
    world.bind(second, "n2")  # the watch has not shown the first one yet
    while world.network.messages:
        world.network.deliver(world.network.messages[0])
    assert list(world.rebuilt().overcommitted()) == []
    assert sum(bool(pod.node) for pod in world.views()) == 1


def test_a_bind_ends_with_its_process(world: World) -> None:
    """Its caller waits for it behind a shield, and the loop would complain of a task that nobody ended."""
    world.bind(world.create("app-0", 3), "n2")
    assert world.process is not None
    assert "bind default/app-0" in [each.get_name() for each in world.loop.tasks_of(world.process)]
    world.process.kill()
    assert world.loop.tasks_of(world.process) == []


def test_a_binding_that_arrives_when_it_was_given_up_does_nothing(world: World) -> None:
    first, second = world.create("app-0", 3), world.create("app-1", 3)
    world.network.calm()
    world.bind(first, "n2")
    through(world, "delay")
    (late,) = [one for one in world.network.messages if one.request.path.endswith("/binding")]
    through(world, "deliver")  # it makes another version of the pod
    world.bind(second, "n2")
    through(world, "deliver")
    world.network.deliver(late)
    assert list(world.rebuilt().overcommitted()) == []
    assert [pod.name for pod in world.views() if pod.node] == ["app-1"]


def test_a_binding_that_arrived_twice_keeps_its_card_though_the_pod_cannot_be_read(world: World) -> None:
    """The second is answered with a conflict, which says nothing of the first."""
    first, second = world.create("app-0", 3), world.create("app-1", 3)
    world.network.calm()
    world.bind(first, "n2")
    through(world, "repeat")
    world.cluster.add_fault(Fault(method="GET", path=".*/pods/app-0", code=410, times=1))
    through(world, "deliver")
    world.bind(second, "n2")  # the watch has not shown the first one yet
    world.loop.advance(5.0)
    while world.network.messages:
        world.network.deliver(world.network.messages[0])
    assert list(world.rebuilt().overcommitted()) == []
    assert [pod.name for pod in world.views() if pod.node] == ["app-0"]


def test_a_pod_made_anew_under_its_name_is_known_however_late_the_news_is(world: World) -> None:
    """Else the ids that it got, which the one before had too, would be held for the one before for ever."""
    node = world.nodes["n2"]

    def news(owner: Process | None) -> list[Stream]:
        return [each for each in world.network.streams if each.owner is owner and each.pending]

    def carry_on(seconds: float) -> None:
        """All but the agent's news."""
        for _ in range(20):
            while world.network.messages or news(world.process):
                for message in list(world.network.messages):
                    world.network.deliver(message)
                for stream in news(world.process):
                    world.network.deliver_line(stream)
            world.loop.advance(seconds / 20)

    def begin() -> None:
        world.bind(world.create("app-0", 4), "n2")
        carry_on(1.0)
        (pod,) = world.waiting("n2")
        world.play(node, node.admit(pod))
        carry_on(8.0)
        world.play(node, node.start(pod["metadata"]["uid"]))
        carry_on(8.0)

    world.bind(world.create("app-0", 4), "n2")
    world.rest()
    (first,) = world.waiting("n2")
    world.play(node, node.admit(first))
    world.rest()
    world.delete("app-0")
    node.finish(first["metadata"]["uid"])
    carry_on(0.5)
    begin()
    world.rest(6.0)
    (view,) = world.views()
    assert (view.uid, "main") in node.running
    assert view.assigned


def nominated_second(world: World) -> Object:
    """Of two pods the first is looked at on all nodes, so the second one is nominated."""
    first, second = world.create("app-0", 3), world.create("app-1", 3)
    world.network.calm()
    world.search(first)
    world.network.calm()
    (found,) = [pod for pod in world.pods() if pod["metadata"]["uid"] == second["metadata"]["uid"]]
    assert found["status"]["nominatedNodeName"]
    return found


def test_a_dead_leaders_binding_of_a_nominated_pod_does_nothing(world: World) -> None:
    second = nominated_second(world)
    world.bind(second, second["status"]["nominatedNodeName"])
    (late,) = [one for one in world.network.messages if one.request.path.endswith("/binding")]
    world.network.messages.remove(late)
    world.kill_extender()
    world.start_extender()
    world.network.calm()
    world.network.messages.append(late)
    world.network.deliver(late)
    assert not any(pod.node for pod in world.views())


def test_a_binding_of_a_nominated_pod_that_arrives_when_it_was_given_up_does_nothing(world: World) -> None:
    second = nominated_second(world)
    world.bind(second, second["status"]["nominatedNodeName"])
    (late,) = [one for one in world.network.messages if one.request.path.endswith("/binding")]
    world.network.delay(late)
    through(world, "deliver")  # it makes another version of the pod
    world.network.deliver(late)
    assert not any(pod.node for pod in world.views())


def test_a_binding_is_for_the_version_that_was_known(world: World) -> None:
    """Else a version made by who takes over would not keep it away: the pod changed unseen."""
    second = nominated_second(world)
    node, name = second["status"]["nominatedNodeName"], second["metadata"]["name"]
    path = f"/api/v1/namespaces/default/pods/{name}"
    world.call("PATCH", path, {"metadata": {"labels": {"a": "b"}}}, "application/merge-patch+json")
    world.bind(second, node)
    through(world, "deliver")
    assert not any(pod.node for pod in world.views())  # another version by now
    world.network.calm()
    assert [pod.node for pod in world.views() if pod.name == name] == [node]


def test_a_nomination_that_arrives_late_changes_nothing_of_a_binding(world: World) -> None:
    first, second = world.create("app-0", 3), world.create("app-1", 3)
    world.network.calm()
    world.search(first)
    (late,) = [one for one in world.network.messages if one.request.path.endswith("/status")]
    world.network.delay(late)
    world.bind(second, "n2")
    world.network.messages.remove(late)
    world.network.calm()
    world.network.messages.append(late)
    world.network.deliver(late)
    (view,) = [pod for pod in world.views() if pod.name == "app-1"]
    assert view.node == "n2"
    assert not view.nominated
    assert list(world.rebuilt().overcommitted()) == []


def test_a_container_whose_pod_ended_before_the_agent_heard_of_it_keeps_no_card_from_others(
    world: World,
) -> None:
    """Its folder does not say whose it was, and a kubelet that comes later does not list it."""
    node = world.nodes["n2"]
    unheard = world.create("app-0", 1, node="n2")  # no message is delivered until it has ended
    for work in (node.admit(unheard), node.start(unheard["metadata"]["uid"])):
        world.play(node, work)
        world.loop.advance(IDENTIFY_S + 1.0)
    assert node.running
    node.finish(unheard["metadata"]["uid"])
    world.rest()
    node.restart(keeps_checkpoint=True)
    world.rest()
    whole_card = world.create("app-1", 4, node="n2")
    world.rest()
    for work in (node.admit(whole_card), node.start(whole_card["metadata"]["uid"])):
        world.play(node, work)
        world.rest()
    assert node.running, world.rejections
    world.rest()
    (view,) = world.views()
    assert view.assigned
