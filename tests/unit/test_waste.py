"""Who wastes: zero is a figure, unknown is none, and what is held is used, wasted or beyond the request."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.ledger import Ledger
from gpuslice.core.units import MIB
from gpuslice.diagnosis.usage import ContainerUsage, UsageByPod
from gpuslice.diagnosis.waste import document, sums, usage_by_pod
from tests.builders import make_node, make_pod


def cluster(*units: int) -> Ledger:
    ledger = Ledger()
    ledger.apply_node(make_node("n0", [15] * max(1, len(units))))
    for number, each in enumerate(units):
        ledger.apply_pod(make_pod(f"p{number}", each, node="n0", card=number))
    return ledger


def used(number: int, mib: float | None, allocated_bytes: float | None = None) -> ContainerUsage:
    figures = None if mib is None else mib * MIB, None, allocated_bytes
    return ContainerUsage("n0", str(number), "default", f"p{number}", "main", "", *figures)


def test_what_is_not_known_comes_last_and_is_not_0() -> None:
    found = usage_by_pod([cluster(15, 4, 8)], UsageByPod([used(1, 0.0), used(2, None)]))
    assert [(each.pod, each.wasted_mib) for each in found] == [("p1", 4301), ("p0", None), ("p2", None)]
    assert "usedMiB" not in document(found[1])
    assert document(found[0])["usedMiB"] == 0


def test_a_pod_on_several_cards_or_with_several_containers_is_one_row() -> None:
    ledger = Ledger()
    ledger.apply_node(make_node("n0", [15, 15]))
    ledger.apply_pod(make_pod("p0", 8, node="n0", cards=[0, 1]))
    parts = [ContainerUsage("n0", card, "default", "p0", "main", used_bytes=MIB) for card in ("0", "1")]
    (found,) = usage_by_pod([ledger], UsageByPod(parts))
    assert (found.gpus, found.held_mib, found.used_mib) == ("0,1", 2 * 4301, 2)


def test_who_holds_a_whole_card_or_none_is_known_by_the_exporter_alone() -> None:
    whole = used(7, 10.0, allocated_bytes=16130 * MIB)
    stranger = used(8, 600.0)
    found = {each.pod: each for each in usage_by_pod([Ledger()], UsageByPod([whole, stranger]))}
    assert (found["p7"].wasted_mib, found["p8"].excess_mib) == (16120, 600)


def test_who_is_refused_memory_is_not_told_to_give_it_back() -> None:
    fails = ContainerUsage("n0", "0", "default", "p0", "main", used_bytes=0, peak_bytes=0, refused=3)
    (found,) = usage_by_pod([cluster(15)], UsageByPod([fails]))
    assert not found.is_spare
    (found,) = usage_by_pod([cluster(15)], UsageByPod([replace(fails, refused=0)]))
    assert found.is_spare


@pytest.mark.parametrize(("units", "held_mib"), [(15, 4 * 1024), (16130, 4)])
def test_on_a_card_whose_size_nobody_tells_units_are_what_they_count(units: int, held_mib: int) -> None:
    """As on a node of the vendor's, whose annotation has no sizes."""
    ledger = Ledger()
    node = make_node("n0", [units])
    ledger.apply_node(replace(node, cards=tuple(replace(card, memory_mib=0) for card in node.cards)))
    ledger.apply_pod(make_pod("p0", 4, node="n0", card=0))
    (found,) = usage_by_pod([ledger], {})
    assert (found.held_mib, found.used_mib) == (held_mib, None)


def test_of_a_namespace_only_its_pods_are_shown() -> None:
    assert usage_by_pod([cluster(15)], {}, "other") == []


@given(st.lists(st.tuples(st.integers(1, 15), st.none() | st.integers(0, 40_000)), min_size=1, max_size=8))
def test_held_is_used_and_wasted_less_what_is_beyond_it(pods: list[tuple[int, int | None]]) -> None:
    ledger = cluster(*(units for units, _ in pods))
    usage = UsageByPod([used(number, mib) for number, (_, mib) in enumerate(pods)])
    found = usage_by_pod([ledger], usage)
    of = sums(found)
    assert of["heldMiB"] - of["usedMiB"] == of["wastedMiB"] - of["excessMiB"]
    shown = [document(each) for each in found]
    assert sum(each.get("wastedMiB", 0) for each in shown) == of["wastedMiB"]
