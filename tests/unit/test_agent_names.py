"""kubelet lists containers by the names of their pods, and a name may be another pod's by then."""

from __future__ import annotations

import msgspec
import pytest

from gpuslice.apps.agent.allocation_state import UNLISTED_AFTER_S, AllocationState
from gpuslice.apps.agent.pending import Recipient
from gpuslice.apps.agent.pods import AgentPod, node_pod
from gpuslice.core.annotations import placement_annotations
from gpuslice.core.contract import device_id
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.model import Node
from gpuslice.core.placement import on_cards
from tests.builders import api_pod, make_node, make_request


def show(state: AllocationState, node: Node, name: str, uid: str, version: int) -> None:
    """A pod of four units on the node's only card."""
    annotations = placement_annotations(on_cards("n1", [0], make_request(4)), make_request(4), node, 1)
    pod = api_pod(name, "4", node="n1", uid=uid, version=str(version), annotations=annotations)
    state.pod_changed(node_pod(msgspec.convert(pod, AgentPod)))


def test_what_kubelet_lists_under_a_name_is_the_living_pods_once_the_one_before_is_long_gone() -> None:
    """News of the first one's end came late, so its ids were taken for its own."""
    node, now = make_node(cards=(4,)), 0.0
    state = AllocationState(node, clock=lambda: now)

    def read() -> list[str]:
        ids = frozenset(device_id(node.cards[0].uuid, unit) for unit in range(4))
        state.assignments_read([DeviceAssignment("default", "p", "main", ids)], now)
        return [repair.reason for repair in state.due_repairs()]

    show(state, node, "p", "first", 1)
    assert read() == ["assigned"]
    now = 1.0
    state.pod_gone("first")
    show(state, node, "p", "second", 2)
    assert read() == []
    now = 1.0 + UNLISTED_AFTER_S
    assert read() == ["assigned"]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("given", [range(4), range(2, 6)], ids=["the same ids", "others, too"])
def test_a_pod_waits_whose_name_kubelet_lists_with_ids_that_it_has_given_away_since(
    given: range, late: bool
) -> None:
    """kubelet frees what has ended when it gives something, and its list was read before."""
    node = make_node(cards=(8,))
    state = AllocationState(node, clock=lambda: 1.0)
    units = [device_id(node.cards[0].uuid, unit) for unit in range(8)]
    listed = DeviceAssignment("default", "p1", "main", frozenset(units[:4]))
    show(state, node, "p1", "earlier", 1)
    state.assignments_read([listed], 0.0)
    state.pod_gone("earlier")
    show(state, node, "p0", "0", 2)
    show(state, node, "p1", "1", 3)
    ids = frozenset(units[number] for number in given)
    recipient = state.recipient(ids)
    assert isinstance(recipient, Recipient)
    assert recipient.uid == "0"
    state.granted(ids, recipient)
    if late:
        state.assignments_read([listed], 0.5)  # the answer to a question asked before
    assert [each.pod.view.name for each in state.waiting()] == ["p1"]


def test_a_third_pod_of_a_name_waits_though_kubelet_gave_the_first_two_the_same_ids() -> None:
    """The second was taken for one that had its ids before, so what is listed of it became the third's."""
    node, now = make_node(cards=(8,)), 0.0
    state = AllocationState(node, clock=lambda: now)
    ids = frozenset(device_id(node.cards[0].uuid, unit) for unit in range(4))
    listed = DeviceAssignment("default", "p", "main", ids)
    for number in range(3):
        show(state, node, "p", str(number), number + 1)
        assert [each.pod.view.uid for each in state.waiting()] == [str(number)]
        recipient = state.recipient(ids)
        assert isinstance(recipient, Recipient)
        state.granted(ids, recipient)
        now += 1.0
        state.assignments_read([listed], now)
        assert state.waiting() == []
        state.pod_gone(str(number))
