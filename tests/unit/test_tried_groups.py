"""Holds of pod groups: what is remembered of them ends with them."""

from __future__ import annotations

import numpy as np

from gpuslice.apps.extender.pod_groups import LASTS_S, LONGEST_REST_S, TriedGroups
from gpuslice.core.ledger import Ledger
from tests.builders import make_pod
from tests.unit.kube_wire import VirtualTime


def test_members_that_left_between_two_attempts_are_forgotten_with_their_group() -> None:
    ledger, time = Ledger(), VirtualTime()
    holds = TriedGroups(ledger, time.clock)
    nowhere = np.empty(0, dtype=np.int64)
    for name in ("left", "stays", "stays", "stays"):
        assert holds.asked(make_pod(name, memory=4), "gang", nowhere) == ""
    time.now_s += LASTS_S + 2 * LONGEST_REST_S
    holds.sweep()
    assert (holds._groups, holds._group_of) == ({}, {})
