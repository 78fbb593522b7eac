"""Room is made ahead for pods that wait behind their equal, and only where kube-scheduler would make it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.preemption_rig import PODS, Story

NODES = 4


def full() -> tuple[Story, dict[str, tuple[str, ...]]]:
    """A low pod on the only card of each node; kube-scheduler would evict it."""
    story, on = Story(nodes=NODES, cards=1), dict[str, tuple[str, ...]]()
    for number in range(NODES):
        story.place(f"low-{number}", 8)
        on[story.api.bound_to(f"low-{number}")] = (f"low-{number}",)
    return story, on


def test_those_who_wait_behind_their_equal_get_their_rooms_with_it() -> None:
    story, on = full()
    for number in range(3):
        story.add(f"high-{number}", 10, 100)
    story.calm()
    (node,) = story.propose_on("high-0", on)
    story.calm(1)
    assert not story.nominated("high-0"), "which is left to kube-scheduler"
    nodes = {name: story.nominated(name) for name in ("high-1", "high-2")}
    assert len({node, *nodes.values()}) == 3
    assert story.leaving() == {on[each][0] for each in nodes.values()}
    assert story.extender.preemptor.results["ahead"] == 2
    story.bury()
    for name, nominated in nodes.items():
        assert story.schedule(name) == nominated
    story.close()


def test_kube_scheduler_waits_where_room_is_made_already() -> None:
    """It took the pod up before it saw that it is nominated, and that somebody leaves or is gone."""
    story, on = full()
    for number in range(2):
        story.add(f"high-{number}", 10, 100)
    story.calm()
    story.propose_on("high-0", on)
    story.calm(1)
    (victim,) = story.leaving()
    assert story.propose_on("high-1", on) == {}
    story.calm()
    node = story.nominated("high-1")
    assert on[node] == (victim,)
    story.bury()
    assert story.propose_on("high-1", on) == {}, "it sees the victim yet"
    assert story.propose_on("high-1", {each: on[each] for each in on if each != node}) == {}
    assert story.schedule("high-1") == node
    story.close()


def test_nobody_else_leaves_for_a_pod_that_lost_what_was_kept_for_it() -> None:
    """A plan took its place and came to nothing, and kube-scheduler took the nomination back."""
    story, on = full()
    for number in range(3):
        story.add(f"high-{number}", 10, 100)
    story.calm()
    others = dict(list(on.items())[:2])
    story.propose_on("high-0", others)
    story.calm(1)
    assert len(story.leaving()) == 1
    (name,) = [each for each in ("high-1", "high-2") if story.nominated(each)]
    story.extender.ledger.holds.end_reservation(story.uids[name])
    story.api.patch(f"{PODS}/{name}/status", {"status": {"nominatedNodeName": None}})
    story.calm()
    assert story.propose_on(name, on) == {}
    left = {node: victims for node, victims in on.items() if node not in others}
    (other,) = {"high-1", "high-2"} - {name}
    story.propose_on("high-0", left)
    story.calm(1)
    assert (bool(story.nominated(name)), bool(story.nominated(other))) == (False, True)
    story.close()


def other_request(story: Story) -> None:
    story.add("second", 9, 100)


def other_priority(story: Story) -> None:
    story.add("second", 10, 200)


def other_spec(story: Story) -> None:
    story.add("second", 10, 100, hostname="alone")


def never_preempts(story: Story) -> None:
    story.add("second", 10, 100, preemptionPolicy="Never")


def labelled(story: Story) -> None:
    story.add("second", 10, 100, labels={"app": "other"})


def budget(story: Story) -> None:
    story.add("second", 10, 100)
    story.protect("any")


@pytest.mark.parametrize(
    "second", [other_request, other_priority, other_spec, never_preempts, labelled, budget]
)
def test_nobody_leaves_for_a_pod_that_kube_scheduler_may_judge_otherwise(
    second: Callable[[Story], None],
) -> None:
    story, on = full()
    story.add("high", 10, 100)
    second(story)
    story.calm()
    assert story.propose_on("high", on)
    story.calm(1)
    assert not story.leaving()
    assert not story.nominated("second")
    story.close()


def test_nobody_leaves_while_there_is_room() -> None:
    """A pod went by itself since kube-scheduler looked."""
    story, on = full()
    for number in range(2):
        story.add(f"high-{number}", 10, 100)
    story.calm()
    story.api.delete_pod("low-1")
    story.calm()
    del on[next(node for node, victims in on.items() if victims == ("low-1",))]
    assert story.propose_on("high-0", on)
    story.calm(1)
    assert not story.leaving()
    story.close()


def test_a_node_that_changed_since_is_left_alone() -> None:
    story, on = full()
    for number in range(4):
        story.add(f"high-{number}", 10, 100)
    story.calm()
    story.api.delete_pod("low-2", grace_s=30)  # by itself
    story.calm()
    story.propose_on("high-0", on)
    story.calm(1)
    nominated = {story.nominated(f"high-{number}") for number in range(4)} - {""}
    (left_alone,) = [node for node, victims in on.items() if victims == ("low-2",)]
    assert left_alone not in nominated
    assert len(nominated) == 2, "one is answered, and two are as they were"
    story.close()


def test_a_node_that_another_pod_was_told_of_is_left_alone() -> None:
    story, on = full()
    story.add("other", 9, 200)
    for number in range(4):
        story.add(f"high-{number}", 10, 100)
    story.calm()
    told = "n2"
    assert story.propose_on("other", {told: on[told]})
    story.propose_on("high-0", on)
    story.calm(1)
    nominated = {story.nominated(f"high-{number}") for number in range(4)} - {""}
    assert told not in nominated
    assert len(nominated) == 2
    story.close()


def test_kube_scheduler_waits_whomever_else_it_names_on_that_node() -> None:
    story, on = Story(nodes=2, cards=2), dict[str, list[str]]()
    for number in range(4):
        story.place(f"low-{number}", 8)
        on.setdefault(story.api.bound_to(f"low-{number}"), []).append(f"low-{number}")
    for number in range(2):
        story.add(f"high-{number}", 10, 100)
    story.calm()
    story.propose_on("high-0", {node: victims[:1] for node, victims in on.items()})
    story.calm(1)
    assert len(story.leaving()) == 1
    assert story.propose_on("high-1", {node: victims[1:] for node, victims in on.items()}) == {}
    story.close()


def test_switched_off_it_makes_no_room() -> None:
    story = Story(nodes=NODES, cards=1, preemption=False)
    on = {}
    for number in range(NODES):
        story.place(f"low-{number}", 8)
        on[story.api.bound_to(f"low-{number}")] = (f"low-{number}",)
    for number in range(2):
        story.add(f"high-{number}", 10, 100)
    story.calm()
    assert story.propose_on("high-0", on)
    story.calm(1)
    assert not story.leaving()
    story.close()
