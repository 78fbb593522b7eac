"""How long cards are kept for a pod that others were evicted for, when it does not come."""

from __future__ import annotations

from gpuslice.apps.extender.preemption.evictor import KEPT_S, LONGEST_S, PACE_S, Reserver
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement
from tests.builders import make_node, make_placement, make_pod

PODS = 100


def test_cards_are_kept_while_others_come_for_theirs() -> None:
    """kube-scheduler tries each of thousands, and again when its victims are gone: that takes minutes."""
    ledger, lapsed, now_s = Ledger(), list[Placement](), 0.0
    reserver = Reserver(ledger, lapsed.append, lambda: now_s)
    for number in range(PODS):
        ledger.apply_node(make_node(f"n{number}"))
        ledger.apply_pod(pod := make_pod(f"p{number}", priority=10))
        reserver.keep(pod, make_placement(f"n{number}", 4, 0))
    for number in range(PODS - 1):
        now_s += PACE_S - 1
        ledger.assume(ledger.pods[f"uid-p{number}"], make_placement(f"n{number}", 4, 0))
        reserver.renew()
        assert bool(lapsed) == (now_s >= LONGEST_S)
    assert not ledger.holds.reserved


def test_cards_that_nobody_comes_for_are_free_again() -> None:
    ledger, lapsed, now_s = Ledger(), list[Placement](), 0.0
    reserver = Reserver(ledger, lapsed.append, lambda: now_s)
    for name in ("comes", "stays away"):
        ledger.apply_node(make_node(name))
        ledger.apply_pod(pod := make_pod(name, priority=10))
        reserver.keep(pod, make_placement(name, 4, 0))
    reserver.renew()
    ledger.assume(ledger.pods["uid-comes"], make_placement("comes", 4, 0))
    now_s = KEPT_S - 1
    reserver.renew()
    now_s = KEPT_S + 1
    reserver.renew()
    assert not lapsed
    now_s += PACE_S
    reserver.renew()
    assert [placement.node for placement in lapsed] == ["stays away"]
