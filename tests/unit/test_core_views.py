"""From API objects to values: what is read, what is worked round, and what is named as unreadable."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.slim import SlimPod
from gpuslice.adapters.kube.views import node_view, pod_view
from gpuslice.core.host_resources import HostResources
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Card, ContainerKind, Node, Pod, Tier
from gpuslice.core.views import version_number, with_unhealthy
from tests.builders import api_container, api_node, api_pod, make_placement

GPU_COUNT, CARDS, MIN_TIER = "aliyun.com/gpu-count", "gpuslice.io/cards", "gpuslice.io/min-tier"
IDX, UNITS = "ALIYUN_COM_GPU_MEM_IDX", "ALIYUN_COM_GPU_MEM_POD"
PLACED = {IDX: "1", UNITS: "4", "ALIYUN_COM_GPU_MEM_ASSIGNED": "true", "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "7"}


def pod(**spec: Any) -> Pod:
    return pod_view(msgspec.convert(api_pod(**spec), objects.Pod))


def node(raw: dict[str, Any]) -> Node:
    return node_view(msgspec.convert(raw, objects.Node))


def test_a_placed_pod_is_read_whole() -> None:
    found = pod(node="n1", annotations=PLACED, version="12", priority=5, phase="Running")
    assert (found.key, found.uid, found.node, found.version, found.priority) == (
        "default/p",
        "uid-p",
        "n1",
        12,
        5,
    )
    assert (found.placement, found.assigned, found.assume_time_ns) == (make_placement("n1", 4, 1), True, 7)
    assert (found.finished, found.terminating, found.problem) == (False, False, "")
    assert found.request is not None
    assert (found.request.units, found.request.card_count) == (4, 1)


def test_what_a_pod_does_not_say_is_nothing() -> None:
    found = pod()
    assert (found.placement, found.assigned, found.assume_time_ns, found.priority) == (None, False, 0, 0)
    assert (found.nominated, found.version, found.problem) == ("", 0, "")


@pytest.mark.parametrize(
    ("phase", "finished"),
    [("Pending", False), ("Running", False), ("Unknown", False), ("Succeeded", True), ("Failed", True)],
)
def test_a_pod_has_finished_when_its_phase_says_so(phase: str, finished: bool) -> None:
    assert pod(phase=phase).finished is finished


def test_containers_keep_their_place_and_kind() -> None:
    inits = [api_container("9", "init"), {**api_container("1", "proxy"), "restartPolicy": "Always"}]
    found = pod(initContainers=inits, containers=[{"name": "bare", "image": "x"}, api_container("4", "a")])
    assert found.request is not None
    assert [(each.name, each.index, each.kind) for each in found.request.containers] == [
        ("init", 0, ContainerKind.INIT),
        ("proxy", 1, ContainerKind.SIDECAR),
        ("a", 1, ContainerKind.APP),
    ]
    assert (found.request.units, found.request.app_containers) == (9, 2)


def test_a_pod_that_asks_for_none_of_ours_wants_only_cpu_and_memory() -> None:
    plain = {"name": "web", "image": "x", "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2"}}}
    found = pod(containers=[plain])
    assert (found.request, found.host, found.problem) == (None, HostResources(1000, 0), "")


def test_a_pod_that_asks_for_nothing_holds_no_card_whatever_its_annotations_say() -> None:
    """Its owner writes them: a whole node could be closed with a pod that no quota counts."""
    plain = {"name": "web", "image": "x", "resources": {"limits": {"cpu": "2"}}}
    for said in (PLACED, {"scheduler.framework.gpushare.allocation": '{"0":{"0":8,"1":8}}'}, {IDX: "abc"}):
        found = pod(containers=[plain], node="n1", annotations=said)
        assert (found.request, found.placement, found.problem) == (None, None, "")


def test_a_wrong_request_is_a_problem_and_of_a_bound_pod_the_memory_is_gone_all_the_same() -> None:
    many = {"aliyun.com/gpu-count": "many"}
    waiting, bound = pod(labels=many), pod(labels=many, node="n1")
    assert waiting.request is None
    assert bound.request is not None
    assert bound.request.units == 4
    assert 'label "aliyun.com/gpu-count" is "many"' in waiting.problem
    assert bound.problem == waiting.problem
    assert pod(memory="4.5", node="n1").request is None


@pytest.mark.parametrize(
    ("labels", "cards", "tier"),
    [
        ({GPU_COUNT: "2", MIN_TIER: "foo"}, 2, Tier.NONE),
        ({GPU_COUNT: "2", MIN_TIER: ""}, 2, Tier.NONE),
        ({GPU_COUNT: "2", CARDS: "4"}, 2, Tier.NONE),
        ({GPU_COUNT: "3", CARDS: "4"}, 4, Tier.NONE),
        ({GPU_COUNT: "many", MIN_TIER: "library"}, 1, Tier.LIBRARY),
        ({GPU_COUNT: "2", CARDS: "two", MIN_TIER: "driver"}, 2, Tier.DRIVER),
        ({GPU_COUNT: "0", CARDS: "-1", MIN_TIER: "Library"}, 1, Tier.NONE),
    ],
)
def test_of_a_bound_pod_only_the_wrong_label_counts_for_nothing(
    labels: dict[str, str], cards: int, tier: Tier
) -> None:
    waiting, bound = pod(memory="8", labels=labels), pod(memory="8", labels=labels, node="n1")
    assert waiting.request is None
    assert bound.request is not None
    assert (bound.request.units, bound.request.card_count, bound.request.min_tier) == (8, cards, tier)
    assert bound.problem == waiting.problem != ""


def test_labels_that_contradict_each_other_are_of_the_names_in_which_a_bound_pod_asks() -> None:
    neutral = api_container(**{"gpuslice.io/memory": "8"})
    found = pod(containers=[neutral], labels={GPU_COUNT: "2", CARDS: "4"}, node="n1")
    assert found.request is not None
    assert found.request.card_count == 4


def test_a_corrupt_annotation_is_a_problem_and_no_placement() -> None:
    found = pod(node="n1", annotations={IDX: "abc", UNITS: "4"})
    assert found.placement is None
    assert f'annotation "{IDX}" is "abc"' in found.problem


@pytest.mark.parametrize(("text", "number"), [("12", 12), ("", 0), ("v1", 0), ("-1", 0), ("٤", 0)])
def test_a_version_that_is_no_number_is_none(text: str, number: int) -> None:
    assert version_number(text) == number


# -- nodes -------------------------------------------------------------------------------------------------


def test_cards_of_node_status_are_equal_and_of_unknown_size() -> None:
    assert node(api_node(units=31, cards=2)).cards == (Card(0, "", 0, 15), Card(1, "", 0, 15))


@pytest.mark.parametrize(
    ("amounts", "cards"),
    [
        ({"aliyun.com/gpu-mem": "15"}, 0),
        ({"aliyun.com/gpu-count": "1"}, 0),
        ({"aliyun.com/gpu-mem": "0", "aliyun.com/gpu-count": "1"}, 0),
        ({"aliyun.com/gpu-mem": "-4", "aliyun.com/gpu-count": "1"}, 0),
        ({"aliyun.com/gpu-mem": "15", "aliyun.com/gpu-count": "0"}, 0),
        ({"aliyun.com/gpu-mem": "1024", "aliyun.com/gpu-count": "128"}, 128),
        ({"aliyun.com/gpu-mem": "1024", "aliyun.com/gpu-count": "129"}, 0),
        ({}, 0),
    ],
)
def test_node_status_that_makes_no_sense_has_no_cards(amounts: dict[str, str], cards: int) -> None:
    raw = api_node(units=0)
    raw["status"]["capacity"] |= amounts
    assert len(node(raw).cards) == cards


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("amounts", "cards"),
    [
        ({"aliyun.com/gpu-mem": str(HUGE), "aliyun.com/gpu-count": "1"}, None),
        ({"aliyun.com/gpu-mem": "1000000", "aliyun.com/gpu-count": "1000000"}, None),
        ({"aliyun.com/gpu-mem": "1290", "aliyun.com/gpu-count": "129"}, None),
        (
            {"aliyun.com/gpu-mem": "1290", "aliyun.com/gpu-count": "129"},
            [(f"GPU-{n}", 1) for n in range(129)],
        ),
        ({"aliyun.com/gpu-mem": "15", "aliyun.com/gpu-count": "1"}, [("GPU-0", HUGE)]),
        ({"aliyun.com/gpu-mem": str(HUGE), "aliyun.com/gpu-count": "1"}, [("GPU-0", HUGE)]),
    ],
)
def test_no_node_is_so_large_that_the_book_of_all_nodes_cannot_be_kept(
    amounts: dict[str, str], cards: list[tuple[str, int]] | None
) -> None:
    """A status is as good as those who may write it: pods must find the other nodes' cards all the same."""
    raw = api_node("huge", 0, 0)
    raw["status"]["capacity"] |= amounts
    if cards is not None:
        records = [
            {"index": place, "uuid": uuid, "memory_mib": 1, "units": units}
            for place, (uuid, units) in enumerate(cards)
        ]
        raw["metadata"]["annotations"] = {"gpuslice.io/gpus": json.dumps(records)}
    found = node(raw)
    assert "must be" in found.problem
    ledger = Ledger()
    ledger.apply_node(found)
    ledger.apply_node(node(api_node("n1", 15, 1)))
    assert ledger.flush().size.max() == 15
    assert ledger.fleet.size.shape[1] == 1, "every node's row is as wide as the widest"


def test_true_sizes_win_where_the_node_shares_and_can_be_read() -> None:
    cards = [{"index": 2, "uuid": "GPU-b", "memory_mib": 15079, "units": 14, "model": "T4"}]
    told = {"gpuslice.io/gpus": json.dumps(cards)}
    assert node(api_node(units=14, annotations=told)).cards == (Card(2, "GPU-b", 15079, 14, "T4"),)
    assert node(api_node(units=0, annotations=told)).cards == (), "its cards are not shared now"
    corrupt = node(api_node(units=14, annotations={"gpuslice.io/gpus": "[1]"}))
    assert corrupt.cards == (Card(0, "", 0, 14),)
    assert 'annotation "gpuslice.io/gpus" is "[1]"' in corrupt.problem


def test_labels_and_amounts_say_how_cards_are_chosen_and_divided() -> None:
    plain = node(api_node())
    assert (plain.packing, plain.compute_percent, plain.compute_required) == ("", 0, False)
    raw = api_node(labels={"ack.node.gpu.placement": "spread", "ack.node.gpu.schedule": "core_mem"})
    raw["status"]["capacity"]["aliyun.com/gpu-core.percentage"] = "100"
    divided = node(raw)
    assert (divided.packing, divided.compute_percent, divided.compute_required) == ("spread", 100, True)
    assert plain.host == HostResources(64_000, 262_144)


@pytest.mark.parametrize(
    "labels", [{"gpuslice.io/mode": "exclusive"}, {"ack.node.gpu.schedule": "default"}, {"cgpu": "false"}]
)
def test_no_card_is_to_be_used_where_labels_say_that_they_are_given_out_whole(labels: dict[str, str]) -> None:
    """kubelet goes on telling of what pods hold there until they end."""
    whole = node(api_node("n1", 15, 1, labels=labels))
    assert not whole.shared
    assert [card.index for card in whole.cards] == [0]
    assert whole.unhealthy == with_unhealthy(whole, frozenset()).unhealthy == {0}
    shared = node(api_node("n1", 15, 1))
    assert shared.shared
    assert not shared.unhealthy
    assert with_unhealthy(shared, frozenset({0})).unhealthy == {0}


@pytest.mark.parametrize(("kind", "comes"), [("DaemonSet", True), ("Node", True), ("ReplicaSet", False)])
def test_pods_that_come_with_each_node_are_known_by_their_owner(kind: str, comes: bool) -> None:
    made = api_pod()
    made["metadata"]["ownerReferences"] = [{"kind": kind, "name": "o", "uid": "u", "controller": True}]
    assert pod_view(msgspec.convert(made, SlimPod)).comes_with_node is comes


def test_a_pod_whose_annotations_leave_no_room_is_refused_until_it_is_bound() -> None:
    """A Binding could pass the API server's limit, and kubelet could write no status any more."""
    waiting = pod(annotations={"theirs": "x" * 262_000})
    assert waiting.request is None
    assert "metadata.annotations: size in bytes" in waiting.problem
    assert pod(annotations={"theirs": "x" * 262_000}, node="n1").request is not None
    assert pod(annotations={"theirs": "x" * 250_000, IDX: "x" * 12_000}).request is not None, (
        "what a Binding replaces"
    )
