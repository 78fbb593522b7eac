"""How many pods are sent to a node before it is known whether its kubelet lets them start."""

from __future__ import annotations

from dataclasses import replace

from gpuslice.core.ledger import Ledger
from gpuslice.core.unconfirmed import LEAST, LOST_AFTER_S, RECENTLY_S, Unconfirmed
from tests.builders import make_node, make_placement, make_pod


def sent(count: int, *, at_s: float = 0.0) -> Unconfirmed:
    pods = Unconfirmed()
    for number in range(count):
        pods.put(f"p{number}", "n1", at_s, at_s)
    return pods


def test_a_node_of_which_nothing_is_heard_gets_a_few() -> None:
    assert not sent(LEAST - 1).crowded(0.0)
    assert set(sent(LEAST).crowded(0.0)) == {"n1"}


def test_each_pod_that_starts_makes_room_for_one_and_many_for_many() -> None:
    pods = sent(LEAST)
    pods.drop("p0", 1.0, started=True)
    assert not pods.crowded(1.0)
    for number in range(LEAST, 4 * LEAST):
        pods.put(f"p{number}", "n1", 1.0, 1.0)
    for number in range(3 * LEAST):
        pods.drop(f"p{number}", 2.0, started=True)
    assert not pods.crowded(2.0), "it has just let more start than are on their way"
    pods.put("later", "n1", 3.0 + RECENTLY_S, 3.0 + RECENTLY_S)
    assert set(pods.crowded(3.0 + RECENTLY_S)) == {"n1"}, "that was long ago"


def test_what_nobody_tells_of_counts_for_a_while_only() -> None:
    assert set(sent(LEAST).crowded(LOST_AFTER_S)) == {"n1"}
    assert not sent(LEAST).crowded(LOST_AFTER_S + 1)
    pods = sent(LEAST)
    pods.put("known since long ago", "n2", 0.0, LOST_AFTER_S + 1)
    pods.drop("known since long ago", LOST_AFTER_S + 1)
    pods.drop("never heard of", LOST_AFTER_S + 1)


def test_pods_that_fail_or_go_are_not_on_their_way_any_more() -> None:
    pods = sent(LEAST)
    pods.drop("p0", 1.0)
    assert not pods.crowded(1.0)
    pods.put("p0", "n1", 1.0, 1.0)
    pods.remove_node("n1")
    assert not pods.crowded(1.0)
    assert set(sent(LEAST).crowded(1.0)) == {"n1"}


def test_a_ledger_counts_what_is_held_until_the_agent_has_seen_it() -> None:
    ledger = Ledger(now_s=lambda: 100.0)
    described = make_node("described")
    plain = replace(described, name="plain", cards=tuple(replace(card, uuid="") for card in described.cards))
    for node in (described, plain):
        ledger.apply_node(node)
        for number in range(LEAST):
            ledger.assume(make_pod(f"{node.name}{number}", 1), make_placement(node.name, 1, 0))
    assert set(ledger.kubelets.unconfirmed.crowded(100.0)) == {"described"}, "nobody would tell of the other"
    ledger.apply_pod(make_pod("described0", 1, node="described", card=0, assigned=True))
    assert not ledger.kubelets.unconfirmed.crowded(100.0)


def test_members_of_a_group_are_not_kept_apart() -> None:
    ledger = Ledger(now_s=lambda: 100.0)
    ledger.apply_node(make_node("n1"))
    for number in range(2 * LEAST):
        assert ledger.hold_for_group(make_pod(f"p{number}", 1), make_placement("n1", 1, 0)) is None
    assert not ledger.kubelets.unconfirmed.crowded(100.0)
