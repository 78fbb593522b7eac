"""Pods that leave the queue while a node is being nominated for them."""

from __future__ import annotations

import asyncio

import msgspec

from gpuslice.adapters.wire.extender import Questions
from gpuslice.apps.extender.main import WEB_LIMITS
from tests.integration.nomination_rig import Queue


def test_a_pod_that_leaves_before_its_nomination_is_sent_ends_nobody() -> None:
    queue = Queue()
    names = [f"p{number}" for number in range(4)]
    queue.add(*names)
    leaver = queue.api.pod("p1")["metadata"]["uid"]
    body = msgspec.json.encode({"Pod": queue.api.pod("p0"), "NodeNames": queue.nodes})

    async def ask_while_one_leaves() -> None:
        queue.extender.cycle.filter(Questions(WEB_LIMITS).decode(body))
        # that wakes the nominator, which chooses in its next turn, and sends in the one after that
        asyncio.get_running_loop().call_soon(queue.extender.shortcuts.pod_gone, leaver, None)

    queue.process.start(ask_while_one_leaves(), "filter call")
    queue.loop.settle()
    queue.calm()
    assert [bool(queue.nominated(name)) for name in names] == [False, False, True, True]
    assert not queue.writes("p1")
    queue.close()
