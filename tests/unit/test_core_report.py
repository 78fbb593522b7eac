"""What is allocated where, read from nodes and pods."""

from __future__ import annotations

import json

import pytest

from gpuslice.core.report import percent
from tests.golden.clusters import node, pod, report_of


@pytest.mark.parametrize(
    ("part", "whole", "wanted"), [(8, 15, 53), (3, 14, 21), (3, 45, 6), (9, 30, 30), (12, 14, 85), (1, 0, 0)]
)
def test_percent_is_cut_off(part: int, whole: int, wanted: int) -> None:
    assert percent(part, whole) == wanted


@pytest.mark.parametrize(("phase", "held"), [("Running", 4), ("Pending", 4), ("Succeeded", 0), ("Failed", 0)])
def test_finished_pods_hold_nothing(phase: str, held: int) -> None:
    assert report_of([node("n", units=15, cards=1)], [pod("p", 4, "n", phase=phase)]).allocated == held


def test_terminating_pods_still_hold_their_memory() -> None:
    leaving = pod("p", 4, "n")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert report_of([node("n", units=15, cards=1)], [leaving]).allocated == 4


def test_pods_elsewhere_and_nowhere_do_not_count() -> None:
    pods = [pod("p", 4, ""), pod("q", 4, "other"), pod("r", 0, "n", card=None)]
    (found,) = report_of([node("n", units=15, cards=1)], pods).shared
    assert found.allocated == 0
    assert found.pods == ()


def test_allocatable_counts_not_capacity() -> None:
    sick = node("n", units=15, cards=1, capacity={"aliyun.com/gpu-mem": "30", "aliyun.com/gpu-count": "2"})
    (found,) = report_of([sick]).shared
    assert (found.total, found.card_count) == (15, 1)


def test_the_allocation_annotation_beats_the_index() -> None:
    table = {"scheduler.framework.gpushare.allocation": json.dumps({"0": {"1": 2}, "1": {"2": 2}})}
    (found,) = report_of([node("n", units=45, cards=3)], [pod("p", 4, "n", annotations=table)]).shared
    assert [card.allocated for card in found.cards] == [0, 2, 2]


def test_the_allocation_annotation_alone_is_enough() -> None:
    table = {"scheduler.framework.gpushare.allocation": json.dumps({"0": {"1": 4}})}
    (found,) = report_of([node("n", units=30, cards=2)], [pod("p", 4, "n", None, annotations=table)]).shared
    assert [card.allocated for card in found.cards] == [0, 4]
    assert found.pending == 0


@pytest.mark.parametrize("index", ["x", "", "-1", "0,0"])
def test_an_unreadable_index_is_pending_and_counts(index: str) -> None:
    (found,) = report_of([node("n", units=15, cards=1)], [pod("p", 4, "n", card=index)]).shared
    assert (found.pending, found.allocated) == (4, 4)


def test_true_sizes_beat_total_by_count() -> None:
    cards = [
        {"index": 0, "uuid": "GPU-a", "memory_mib": 16130, "units": 15, "model": "V100"},
        {"index": 2, "uuid": "GPU-b", "memory_mib": 15079, "units": 14, "model": "T4"},
    ]
    mixed = node("n", units=29, cards=2, annotations={"gpuslice.io/gpus": json.dumps(cards)})
    (found,) = report_of([mixed], [pod("p", 4, "n", card="2")]).shared
    assert [(card.index, card.allocated, card.total) for card in found.cards] == [(0, 0, 15), (2, 4, 14)]


def test_a_corrupt_node_annotation_is_told_and_worked_around() -> None:
    (found,) = report_of([node("n", units=30, cards=2, annotations={"gpuslice.io/gpus": "{"})]).shared
    assert [card.total for card in found.cards] == [15, 15]
    assert "gpuslice.io/gpus" in found.problem


def test_a_card_that_vanished_keeps_what_pods_say_of_it() -> None:
    (found,) = report_of([node("n", units=15, cards=1)], [pod("p", 4, "n", card="3")]).shared
    assert [(card.index, card.allocated, card.total) for card in found.cards] == [(0, 0, 15), (3, 4, 0)]
    assert found.card_count == 1


@pytest.mark.parametrize(
    ("units", "cards", "unit"),
    [(15, 1, "GiB"), (100, 1, "GiB"), (101, 1, "MiB"), (16130 * 8, 8, "MiB"), (141 * 8, 8, "MiB")],
)
def test_the_unit_is_guessed_from_the_size_as_the_original_does(units: int, cards: int, unit: str) -> None:
    assert report_of([node("n", units=units, cards=cards)]).unit == unit


def test_the_unit_is_told_by_true_sizes_where_there_are_any() -> None:
    """141 units of an H200 are GiB, whatever the original would guess."""
    card = {"index": 0, "uuid": "GPU-a", "memory_mib": 143771, "units": 140, "model": "H200"}
    told = node("n", units=140, cards=1, annotations={"gpuslice.io/gpus": json.dumps([card])})
    assert report_of([told]).unit == "GiB"


def test_nodes_are_sorted_and_nodes_without_shared_cards_apart() -> None:
    report = report_of([node("b", units=15, cards=1), node("c"), node("a", units=15, cards=1)])
    assert [each.name for each in report.shared] == ["a", "b"]
    assert [each.facts.name for each in report.others] == ["c"]


def test_an_empty_cluster_has_no_unit() -> None:
    report = report_of([])
    assert (report.unit, report.total, report.unit_bytes) == ("", 0, 0)


def test_pods_are_ordered_by_card_then_name_with_pending_last() -> None:
    pods = [pod("c", 1, "n", None), pod("b", 1, "n", "1"), pod("z", 1, "n", "0"), pod("a", 1, "n", "1")]
    (found,) = report_of([node("n", units=30, cards=2)], pods).shared
    assert [each.name for each in found.pods] == ["z", "a", "b", "c"]
