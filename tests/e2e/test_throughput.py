"""The end-to-end benchmarks in small: who fits is bound, no card passes its units. Never a time."""

from __future__ import annotations

import pytest
from bench import end_to_end, full_cluster

from tests.e2e.marks import ON_A_CONTROL_PLANE

pytestmark = ON_A_CONTROL_PLANE


async def test_every_pod_of_a_queue_is_bound_once_and_no_card_is_over_committed() -> None:
    ways = [end_to_end.PLAIN, end_to_end.GPUSLICE]
    found = await end_to_end.measure(end_to_end.Size(nodes=500, pods=150, rounds=1), ways)
    assert found["violations"] == []
    assert (found["plain_unbound"], found["gpuslice_unbound"]) == (0, 0)
    assert found["gpuslice_ms_per_pod"]["extender filter"] > 0  # it was asked, for every one of them


@pytest.mark.timeout(900)  # on a busy machine 500 nodes and 2,000 pods take minutes to create
async def test_of_a_long_queue_each_pod_is_bound_by_one_request_and_none_refused() -> None:
    """Were binds to pile up, the longer queue would be the slower: refused, repeated, refused again."""
    found = await end_to_end.measure(end_to_end.Size(nodes=500, pods=2000, rounds=1), [end_to_end.GPUSLICE])
    assert found["violations"] == []
    assert found["gpuslice_unbound"] == 0
    assert found["refusals"] == []
    assert found["gpuslice_ms_per_pod"]["binds refused, in all"] == 0
    requests = found["gpuslice_requests_per_pod"]
    assert requests["POST pods/binding"] <= 1
    assert requests.get("PATCH pods/status", 0) <= 1  # a nomination
    assert "PATCH pods" not in requests
    assert requests["PUT leases"] < 0.1  # the leader's


@pytest.mark.timeout(600)
async def test_on_a_full_cluster_what_is_important_is_bound_and_no_card_is_over_committed() -> None:
    """Most pods wait, some for ever; others come and go, with priorities."""
    size = full_cluster.Size(nodes=20, waiting=30, rate=10, seconds=10)
    found = await full_cluster.measure(size, full_cluster.WAYS["gpuslice"])
    assert found["violations"] == []
    assert found["came"]["high"] > 0
    assert found["unbound"]["high"] == 0
    assert found["calls"]["filter"] > 0
    assert sum(found["attempts"].values()) < 10  # else all that wait are tried at each event
