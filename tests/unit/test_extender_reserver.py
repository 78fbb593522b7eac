"""How long cards are kept for a pod that others were evicted for, when it does not come."""

from __future__ import annotations

import pytest

from gpuslice.apps.extender.preemption.reserver import KEPT_S, TURN_S, Reserver
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement
from tests.builders import make_placement, make_pod


@pytest.mark.parametrize("pods", [1, 2000])
def test_cards_are_kept_until_kube_scheduler_has_tried_all_that_preempted_at_once(pods: int) -> None:
    """It tries each once, and again when its victims are gone: 2,000 took it three minutes."""
    ledger, lapsed, now_s = Ledger(), list[Placement](), 0.0
    reserver = Reserver(ledger, lapsed.append, lambda: now_s)
    for number in range(pods):
        ledger.apply_pod(make_pod(f"p{number}"))
        reserver.keep(f"uid-p{number}", 10, make_placement(f"n{number}", 4, 0))
    reserver.renew()
    for number in range(pods - 1):  # all but one have come meanwhile
        ledger.remove_pod(f"uid-p{number}")
    now_s = KEPT_S + TURN_S * pods - 1
    reserver.renew()
    assert not lapsed
    now_s += 1
    reserver.renew()
    assert not len(ledger.reservations)
    assert len(lapsed) == 1
