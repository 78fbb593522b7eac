"""Orders of events that were met once, or thought of: each must end as it should."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice.core.contract import ENV_INDEX
from tests.integration.interleaving_node import Object, uuid_of
from tests.integration.interleaving_rig import World


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
        assert node.running[view.uid].environment[ENV_INDEX] == str(part.card)
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
    through(world, "deliver", "lose_answer")
    world.bind(second, "n2")  # the watch has not shown the first one yet
    while world.network.messages:
        world.network.deliver(world.network.messages[0])
    assert list(world.rebuilt().overcommitted()) == []
    assert sum(bool(pod.node) for pod in world.views()) == 1


def test_a_binding_that_arrives_when_it_was_given_up_does_nothing(world: World) -> None:
    first, second = world.create("app-0", 3), world.create("app-1", 3)
    world.network.calm()
    world.bind(first, "n2")
    through(world, "deliver", "delay")
    (late,) = [one for one in world.network.messages if one.request.path.endswith("/binding")]
    through(world, "deliver", "deliver")  # it reads the pod and takes the annotations back
    world.bind(second, "n2")
    through(world, "deliver", "deliver")
    world.network.deliver(late)
    assert list(world.rebuilt().overcommitted()) == []
    assert [pod.name for pod in world.views() if pod.node] == ["app-1"]


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
    through(world, "deliver", "deliver")  # it reads the pod and takes the annotations back
    world.network.deliver(late)
    assert not any(pod.node for pod in world.views())


def test_a_binding_is_sent_on_no_version_without_annotations(world: World) -> None:
    """Else who takes over could not know of it: the annotations went after the extender had seen them."""
    second = nominated_second(world)
    node, name = second["status"]["nominatedNodeName"], second["metadata"]["name"]
    annotations = dict.fromkeys(second["metadata"]["annotations"])
    path = f"/api/v1/namespaces/default/pods/{name}"
    world.call("PATCH", path, {"metadata": {"annotations": annotations}}, "application/merge-patch+json")
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
