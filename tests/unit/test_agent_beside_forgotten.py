"""What annotations say where containers run that kubelet has forgotten."""

from __future__ import annotations

from dataclasses import replace

from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.forgotten import RunningContainer
from gpuslice.core.contract import device_id
from gpuslice.core.device_assignment import DeviceAssignment
from tests.builders import make_node
from tests.unit.test_agent_moves import Play, steps_of


def test_a_pod_is_promised_no_card_that_is_full_of_what_kubelet_forgot() -> None:
    """It may not start there, and counts against every card until it may."""
    play = Play(make_node(cards=(3, 3)), [2, 2], [0, 1])
    ids = play.ids_of({0: 0})[0]
    play.state.kubelet_came([RunningContainer("f", "uid-p0", DeviceAssignment("default", "p0", "main", ids))])
    play.kubelet_gave({1: 0})
    assert play.state.forgotten()
    assert steps_of(play) == [("p1", "")]
    play.state.pod_gone("uid-p0")
    play.pods[0]["metadata"]["annotations"] = {}
    assert steps_of(play) == [("p1", "0")]


def test_who_may_not_start_beside_what_kubelet_forgot_leaves_the_card_to_who_runs() -> None:
    """kubelet gave the forgotten container's ids to p1, which was annotated before the agent knew of that."""
    play = Play(make_node(cards=(2, 2)), [1, 1, 1], [0, 0, None])
    first, last = (frozenset({device_id(play.node.cards[0].uuid, unit)}) for unit in range(2))
    for number in (0, 2):
        play.pods[number]["status"]["containerStatuses"] = [{"name": "main", "state": {"running": {}}}]
        play.show(number)
    lost = DeviceAssignment("default", "p0", "main", first)
    play.state.kubelet_came([RunningContainer("f", "uid-p0", lost)])
    play.state.assignments_read(
        [DeviceAssignment("default", "p1", "main", first), DeviceAssignment("default", "p2", "main", last)],
        1.0,
    )
    assert steps_of(play) == [("p1", ""), ("p2", "0")]
    assert play.adds_up()


def test_annotations_follow_a_container_that_kubelet_forgot() -> None:
    """kubelet lost its checkpoint between giving another card than was meant and the write that says so."""
    play = Play(make_node(cards=(3, 3)), [2], [0])
    ids = play.ids_of({0: 1})[0]
    play.state.kubelet_came([RunningContainer("f", "uid-p0", DeviceAssignment("default", "p0", "main", ids))])
    play.kubelet_gave({})
    assert steps_of(play) == [("p0", "1")]


def test_a_label_that_was_changed_later_hides_no_container_that_kubelet_forgot() -> None:
    """It asked for two cards, and its owner has taken label and annotations away since."""
    play = Play(make_node(cards=(3, 3)), [4], [None])
    ids = frozenset(device_id(card.uuid, unit) for card in play.node.cards for unit in range(2))
    play.state.kubelet_came([RunningContainer("f", "uid-p0", DeviceAssignment("default", "p0", "main", ids))])
    play.kubelet_gave({})
    assert steps_of(play) == [("p0", "0,1")]


def test_a_container_of_whose_pod_there_is_no_news_is_taken_for_running_until_the_pod_is_gone() -> None:
    """Its pod may come to be known, or be gone: only the API server can tell while the watch is behind."""
    state = AllocationState(make_node(cards=(3,)), clock=lambda: 0.0)
    ids = frozenset(device_id(state.node.cards[0].uuid, unit) for unit in range(2))
    unknown = RunningContainer("f", "", DeviceAssignment("default", "unknown", "main", ids))
    state.kubelet_came([unknown])
    state.assignments_read((), asked_at_s=0.0)
    assert [each.assignment.ids for each in state.forgotten()] == [ids]
    refused = state.crowded(ids, "uid-other")
    assert refused is not None
    assert "default/unknown" in refused.reason
    state.assignments_read((), asked_at_s=3600.0)
    (asked,) = state.of_unknown_pods()
    state.kubelet_came([replace(unknown)])
    state.assignments_read((), asked_at_s=3600.0)
    state.pod_is_gone(asked)
    assert state.forgotten() != (), "another kubelet found it, of whose pod nobody has asked yet"
    (asked,) = state.of_unknown_pods()
    state.pod_is_gone(asked)
    assert state.forgotten() == ()
