"""One meaning under two sets of names: a pod asks in one, a node offers one, everything reads both."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpuslice.adapters.kube import objects
from gpuslice.apps.agent.node_reconciler import wanted_amounts
from gpuslice.apps.exporter.device_grants import grants_of
from gpuslice.core.admission import AdmissionRules
from gpuslice.core.contract import NAME_SETS, NEUTRAL_NAMES, VENDOR_NAMES, ResourceNames
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.explanation import explain
from gpuslice.core.ledger import Ledger
from gpuslice.core.lookalikes import resource_hint
from gpuslice.core.mode import Rules
from gpuslice.core.model import Refusal, Request
from gpuslice.core.node_filters import Place, Wish
from gpuslice.core.placement import NodeState, place
from gpuslice.core.report import NodeFacts, report
from gpuslice.core.request import ContainerSpec, pod_request
from gpuslice.core.views import node_of
from gpuslice.diagnosis.doctor.facts import Facts, Level
from gpuslice.diagnosis.doctor.nodes import one_set_of_names
from tests.builders import api_container, api_pod, make_node, make_request
from tests.unit.admission_rig import HAMI, denial, invalid, mutated

BOTH = pytest.mark.parametrize("names", NAME_SETS.values(), ids=NAME_SETS)


def asked(limits: dict[str, Any], labels: dict[str, str] | None = None) -> Request:
    request = pod_request([ContainerSpec("main", 0, limits)], labels)
    assert request is not None
    return request


@BOTH
def test_the_same_is_asked_for_in_either_set_of_names(names: ResourceNames) -> None:
    request = asked({names.memory: "4", names.compute: "30"})
    assert (request.units, request.compute_percent, request.names) == (4, 30, names)


@BOTH
@pytest.mark.parametrize("label", [VENDOR_NAMES.cards, NEUTRAL_NAMES.cards])
def test_the_label_of_either_set_spreads_any_pod_over_cards(names: ResourceNames, label: str) -> None:
    assert asked({names.memory: "4"}, {label: "2"}).card_count == 2


@BOTH
def test_what_is_wrong_is_told_in_the_authors_own_names(names: ResourceNames) -> None:
    with pytest.raises(
        InvalidRequestError, match=re.escape(f'limits["{names.memory}"] is "4.5", must be a whole')
    ):
        asked({names.memory: "4.5"})
    with pytest.raises(
        InvalidRequestError, match=re.escape(f'limits["{names.compute}"] is "30", must be accompanied')
    ):
        asked({names.compute: "30", names.memory: "0"} | {names.memory: 0})
    with pytest.raises(InvalidRequestError, match=f'label "{names.cards}" spreads it evenly over 3 cards'):
        asked({names.memory: "4"}, {names.cards: "3"})


def test_a_pod_asks_in_one_set_and_labels_do_not_contradict() -> None:
    both = {VENDOR_NAMES.memory: "4", NEUTRAL_NAMES.memory: "4"}
    with pytest.raises(InvalidRequestError, match=r"left out beside aliyun\.com/gpu-mem"):
        asked(both)
    assert "left out beside aliyun.com/gpu-mem" in denial(api_pod(containers=[api_container(**both)]))
    with pytest.raises(InvalidRequestError, match=r'"2" as label "aliyun\.com/gpu-count" says'):
        asked({VENDOR_NAMES.memory: "4"}, {VENDOR_NAMES.cards: "2", NEUTRAL_NAMES.cards: "4"})


@BOTH
@pytest.mark.parametrize("offered", NAME_SETS.values(), ids=NAME_SETS)
def test_the_webhook_gives_every_pod_the_names_that_nodes_offer(
    names: ResourceNames, offered: ResourceNames
) -> None:
    pod = api_pod(containers=[api_container(**{names.memory: "4", names.compute: "20", "cpu": "1"})])
    resources = mutated(pod, AdmissionRules(names=offered))["spec"]["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"] == {offered.memory: "4", offered.compute: "20", "cpu": "1"}


def test_hamis_names_become_those_that_nodes_offer() -> None:
    pod = api_pod(containers=[api_container(**{"nvidia.com/gpumem": "4096"})])
    changed = mutated(pod, AdmissionRules(names=NEUTRAL_NAMES), HAMI)
    assert changed["spec"]["containers"][0]["resources"]["limits"] == {NEUTRAL_NAMES.memory: "4"}


def test_how_many_cards_a_pod_is_on_cannot_change_under_either_label() -> None:
    old = api_pod(memory="4", labels={NEUTRAL_NAMES.cards: "2"})
    new = api_pod(memory="4", labels={NEUTRAL_NAMES.cards: "4"})
    assert f'metadata.labels["{NEUTRAL_NAMES.cards}"] is "4", must be "2"' in invalid(
        new, operation="UPDATE", old=old
    )


# -- nodes -------------------------------------------------------------------------------------------------


def amounts(names: ResourceNames, units: int = 30, cards: int = 2) -> dict[str, str]:
    return {names.memory: str(units), names.cards: str(cards), names.compute: str(100 * cards)}


@BOTH
def test_a_node_is_read_in_the_names_that_it_offers(names: ResourceNames) -> None:
    (other,) = set(NAME_SETS.values()) - {names}
    left_over = {other.memory: "0"}  # kubelet keeps what was offered once
    node = node_of(name="n1", labels={}, annotations={}, capacity={**left_over, **amounts(names)})
    assert ([card.units for card in node.cards], node.compute_percent, node.names) == ([15, 15], 100, names)
    (use,) = report([NodeFacts("n1", allocatable=amounts(names), capacity=amounts(names))], []).shared
    assert use.total == 30


@BOTH
def test_what_was_offered_under_other_names_is_taken_off_the_node(names: ResourceNames) -> None:
    (other,) = set(NAME_SETS.values()) - {names}
    assert wanted_amounts(2, Rules(divides_compute=True), names) == {
        names.cards: "2",
        names.compute: "200",
        other.cards: None,
        other.compute: None,
    }


@BOTH
def test_refusals_and_hints_are_told_in_the_names_of_the_pod(names: ResourceNames) -> None:
    node = make_node(names=names)
    without = place(NodeState(node, (15,), (0,)), asked({names.memory: "4", names.compute: "30"}))
    assert isinstance(without, Refusal)
    assert without.reason == f"Insufficient {names.compute} in one device"
    dividing = make_node(names=names, compute_percent=100, compute_required=True)
    plain = place(NodeState(dividing, (15,), (100,)), asked({names.memory: "4"}))
    assert isinstance(plain, Refusal)
    assert plain.reason == f"The node takes only pods that ask for {names.compute} too"
    (hint,) = explain(Ledger(), [Place("n1")], Wish(asked({names.memory: "4"}))).hints
    assert hint.endswith(f"see that it offers {names.memory}.")
    both = api_container(**{names.memory: "4", "nvidia.com/gpu": "1"})
    assert f"must be left out beside {names.memory} in a pod" in denial(api_pod(containers=[both]))


def test_a_node_holds_no_pod_that_asks_in_other_names_and_says_so() -> None:
    node = make_node(names=NEUTRAL_NAMES)
    answer = place(NodeState(node, (15,), (100,)), make_request(4))
    assert isinstance(answer, Refusal)
    assert answer.never
    assert answer.reason == "The node offers gpuslice.io/memory, not aliyun.com/gpu-mem"
    ledger = Ledger()
    ledger.apply_node(node)
    (hint,) = explain(ledger, [Place("n1")], Wish(make_request(4))).hints
    assert hint.startswith("It asks for aliyun.com/gpu-mem, and the nodes offer gpuslice.io/memory")


def doctored(**by_node: dict[str, str]) -> Facts:
    nodes = [
        objects.Node(
            metadata=objects.Metadata(name=name, labels={"cgpu": "true"}),
            status=objects.NodeStatus(capacity=given, allocatable=given),
        )
        for name, given in by_node.items()
    ]
    return Facts(nodes=nodes)


def test_doctor_finds_cards_that_are_counted_twice_and_nodes_that_differ() -> None:
    twice = doctored(n1=amounts(VENDOR_NAMES) | amounts(NEUTRAL_NAMES))
    (error,) = (each for each in one_set_of_names(twice) if each.level is Level.ERROR)
    assert "offers its cards under two names" in error.what
    (warning,) = one_set_of_names(doctored(n1=amounts(VENDOR_NAMES), n2=amounts(NEUTRAL_NAMES)))
    assert "n1 aliyun.com/gpu-mem and n2 gpuslice.io/memory" in warning.what
    assert not list(one_set_of_names(doctored(n1=amounts(NEUTRAL_NAMES), n2=amounts(NEUTRAL_NAMES))))


@BOTH
def test_a_container_is_charged_for_its_part_under_either_name(names: ResourceNames) -> None:
    held = DeviceAssignment("default", "p", "main", frozenset({"GPU-1-_-0", "GPU-1-_-1"}))
    (grant,) = grants_of({names.memory: [held]}).by_device["GPU-1"].values()
    assert grant.units == 2


def test_a_misspelt_neutral_name_is_recognised() -> None:
    assert resource_hint("gpuslice.io/memroy").endswith("did you mean gpuslice.io/memory?")
    assert resource_hint("gpuslice.io/memory") == resource_hint("gpuslice.io/compute") == ""
    assert "is a label of the pod" in resource_hint("gpuslice.io/cards")
