"""Pods that leave the queue while a node is being nominated for them."""

from __future__ import annotations

import asyncio

import pytest

from gpuslice.adapters.wire.extender import ExtenderArgs, FilterResult
from tests.integration.nomination_rig import Queue


def test_a_pod_that_leaves_before_its_nomination_is_sent_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"p{number}" for number in range(4)]
    queue = Queue()
    queue.add(*names)
    cycle, nominator = queue.extender.cycle, queue.extender.nominator
    leaver, ask = queue.api.pod("p1")["metadata"]["uid"], cycle.filter

    def leaves_at_once(args: ExtenderArgs) -> FilterResult:
        answer = ask(args)  # wakes the nominator, which chooses, and sends in the turn after that
        asyncio.get_running_loop().call_soon(nominator.pod_left, leaver)
        return answer

    monkeypatch.setattr(cycle, "filter", leaves_at_once)
    queue.search("p0")
    assert [bool(queue.nominated(name)) for name in names] == [False, False, True, True]
    assert not queue.writes("p1")
    queue.close()
