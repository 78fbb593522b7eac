"""The end-to-end benchmark in its small form: every pod is bound, no card passes its units. Never a time."""

from __future__ import annotations

from bench import end_to_end

from tests.e2e.marks import ON_A_CONTROL_PLANE

pytestmark = ON_A_CONTROL_PLANE


async def test_every_pod_of_a_queue_is_bound_once_and_no_card_is_over_committed() -> None:
    ways = [end_to_end.PLAIN, end_to_end.GPUSLICE]
    found = await end_to_end.measure(end_to_end.Size(nodes=500, pods=150, rounds=1), ways)
    assert found["violations"] == []
    assert (found["plain_unbound"], found["gpuslice_unbound"]) == (0, 0)
    assert found["gpuslice_ms_per_pod"]["extender filter"] > 0  # it was asked, for every one of them
