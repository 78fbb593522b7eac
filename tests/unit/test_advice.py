"""What is advised fits: nobody is sent to a card without room, and sizes hold the peak."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.advice import SETTLED_S, Advice, EmptyCard, Move, Peak, Resize, advise, emptied_cards
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Tier
from gpuslice.core.units import limit_mib
from gpuslice.diagnosis.advise.words import text
from tests.builders import make_node, make_pod


def cluster(held: list[tuple[str, int, int]], nodes: int = 2, cards: int = 2) -> Ledger:
    ledger = Ledger()
    for number in range(nodes):
        ledger.apply_node(make_node(f"n{number}", [15] * cards))
    for number, (name, card, units) in enumerate(held):
        ledger.apply_pod(make_pod(f"p{number}", units, node=name, card=card))
    return ledger


def test_who_used_little_is_told_how_much_would_do_and_the_namespace_what_it_could_give_back() -> None:
    ledger = cluster([("n0", 0, 10), ("n0", 1, 4)])
    found = advise(ledger, {"uid-p0": Peak(2000), "uid-p1": Peak(4200)})
    (resize,) = found.resizes
    assert (resize.pod.name, resize.units, resize.suggested_units, resize.more) == ("p0", 10, 3, False)
    assert found.given_back == {"default": resize.mib - resize.suggested_mib}


def test_who_never_touched_its_card_is_told_to_give_all_of_it_back() -> None:
    (resize,) = advise(cluster([("n0", 0, 15)]), {"uid-p0": Peak(0)}).resizes
    assert (resize.units, resize.suggested_units, resize.suggested_mib) == (15, 0, 0)


def test_who_is_on_several_cards_is_told_multiples_of_them() -> None:
    ledger = Ledger()
    ledger.apply_node(make_node("n0", [15, 15, 15, 15]))
    ledger.apply_pod(make_pod("p0", 8, node="n0", cards=[0, 1, 2, 3]))
    (resize,) = advise(ledger, {"uid-p0": Peak(2000, refused=True)}).resizes
    assert (resize.units, resize.suggested_units, resize.cards) == (8, 12, 4)


def test_a_pod_is_moved_only_where_its_own_constraints_let_it_run() -> None:
    ledger = cluster([("n0", 0, 10), ("n1", 1, 4)])
    assert list(emptied_cards(ledger))
    assert not list(emptied_cards(ledger, lambda pod, node: node == pod.node))


def test_a_pod_is_not_moved_to_a_node_that_enforces_its_limit_less() -> None:
    ledger = cluster([("n0", 0, 10), ("n1", 1, 4)])
    ledger.apply_node(make_node("n1", [15, 15], tier=Tier.LIBRARY))
    ledger.apply_node(make_node("n0", [15, 15], tier=Tier.NONE))
    assert not [each for each in emptied_cards(ledger) if each.node == "n1"]


def test_who_has_just_started_is_not_told_to_ask_for_less() -> None:
    """It may still be loading; who was refused memory is told at once."""
    started_s = 1_000_000.0
    ledger = cluster([])
    for number, card in enumerate((0, 1)):
        pod = make_pod(f"p{number}", 4, node="n0", card=card)
        ledger.apply_pod(replace(pod, assume_time_ns=int(started_s * 1e9)))
    peaks = {"uid-p0": Peak(100), "uid-p1": Peak(100, refused=True)}
    found = advise(ledger, peaks, now_s=started_s + SETTLED_S - 1)
    assert ([each.pod.name for each in found.resizes], found.young, found.given_back) == (["p1"], 1, {})
    found = advise(ledger, peaks, now_s=started_s + SETTLED_S)
    assert ([each.pod.name for each in found.resizes], found.young) == (["p1", "p0"], 0)


def test_who_was_refused_memory_comes_first_and_gives_nothing_back() -> None:
    found = advise(cluster([("n0", 0, 10), ("n0", 1, 4)]), {"uid-p0": Peak(2000), "uid-p1": Peak(4300, True)})
    assert [(each.pod.name, each.suggested_units, each.more) for each in found.resizes] == [
        ("p1", 5, True),
        ("p0", 3, False),
    ]
    assert found.given_back == {"default": found.resizes[1].mib - found.resizes[1].suggested_mib}


def test_what_claims_hold_is_sized_and_no_card_of_theirs_is_emptied() -> None:
    held = [("n0", 0, 10), ("n0", 1, 4)]
    found = advise(cluster([]), {"uid-p0": Peak(2000)}, claims=cluster(held))
    assert [(each.pod.name, each.suggested_units) for each in found.resizes] == [("p0", 3)]
    assert advise(cluster(held), {}).cards
    assert not found.cards


def test_a_card_with_little_on_it_is_emptied_onto_one_that_is_in_use() -> None:
    (found,) = emptied_cards(cluster([("n0", 0, 10), ("n1", 1, 4)]))
    assert (found.node, found.card) == ("n1", 1)
    assert [(move.pod.name, move.node, move.card) for move in found.moves] == [("p1", "n0", 0)]


def test_a_card_out_of_use_takes_nobody_and_pods_on_several_cards_stay() -> None:
    ledger = Ledger()
    ledger.apply_node(make_node("n0", [15, 15, 15], unhealthy=frozenset({0})))
    ledger.apply_pod(make_pod("a", 4, node="n0", card=0))
    ledger.apply_pod(make_pod("b", 8, node="n0", cards=[1, 2]))
    assert list(emptied_cards(ledger)) == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["n0", "n1", "n2"]), st.integers(0, 1), st.integers(1, 15)), max_size=14
    )
)
def test_after_all_moves_no_card_is_overfull_and_the_emptied_are_empty(
    held: list[tuple[str, int, int]],
) -> None:
    kept: list[tuple[str, int, int]] = []
    for name, card, units in held:
        if sum(each[2] for each in kept if each[:2] == (name, card)) + units <= 15:
            kept.append((name, card, units))
    ledger = cluster(kept, nodes=3)
    used: dict[tuple[str, int], int] = {}
    for name, card, units in kept:
        used[name, card] = used.get((name, card), 0) + units
    emptied = list(emptied_cards(ledger))
    for each in emptied:
        for move in each.moves:
            used[each.node, each.card] -= move.units
            used[move.node, move.card] = used.get((move.node, move.card), 0) + move.units
    assert all(0 <= units <= 15 for units in used.values())
    for each in emptied:
        assert used[each.node, each.card] == 0
        assert all((move.node, move.card) != (each.node, each.card) for move in each.moves)


@given(st.integers(1, 15), st.floats(1, 16000))
def test_a_smaller_size_holds_the_peak(units: int, peak_mib: float) -> None:
    for resize in advise(cluster([("n0", 0, units)]), {"uid-p0": Peak(peak_mib)}).resizes:
        assert resize.suggested_units < units
        assert limit_mib(16130, resize.suggested_units, 15) >= peak_mib


LONG = "llama-3-70b-instruct-continued-pretraining-learning-rate-sweep-000017"


@pytest.mark.parametrize("width", [80, 200])
def test_advice_about_long_names_fits_the_terminal(width: int) -> None:
    pod, other = make_pod(LONG, namespace=f"team-{LONG}"), f"gpu-pool-in-europe-west-4-{LONG}"
    sizes = (
        Resize(pod, 10, 10753, 1, 1075, 125, more=False),
        Resize(pod, 10, 10753, 12, 12904, 10753, more=True, cards=4),
    )
    emptied = EmptyCard(other, 0, (Move(pod, 4, 4301, other, 1),))
    told = text(Advice(sizes, {pod.namespace: 9678}, (emptied,)), width)
    tables = [line for line in told.splitlines() if not line.endswith(".")]
    assert max(map(len, tables)) <= width
    assert all(words in told for words in ("1 unit (1075 MiB)", "at least 12 units (12904 MiB)"))
    assert ("memory was refused" in told) == (width == 200)
