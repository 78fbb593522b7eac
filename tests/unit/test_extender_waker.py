"""What a node is made to show of its cards that are out of use, write by write."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.http import ApiResponse
from gpuslice.adapters.kube.slim import SlimMetadata, SlimNode
from gpuslice.apps.extender.waker import Waker
from gpuslice.core.contract import NODE_OUT_OF_USE
from tests.builders import make_placement
from tests.unit.kube_wire import ScriptedTransport, VirtualTime, answer, failure

NOBODY: frozenset[int] = frozenset()
WRITTEN = answer({"metadata": {"name": "n1"}})


@dataclass
class Stage:
    waker: Waker
    transport: ScriptedTransport

    def see(self, node: str, text: str) -> None:
        """The node is shown with this annotation, or without any."""
        annotations = {NODE_OUT_OF_USE: text} if text else {}
        self.waker.node_changed(SlimNode(SlimMetadata(name=node, annotations=annotations)))

    async def written(self) -> list[str | None]:
        """All that was written by the time when nothing is left to do."""
        for _ in range(50):
            await asyncio.sleep(0)
        patches = [json.loads(request.body) for request in self.transport.requests]
        return [patch["metadata"]["annotations"][NODE_OUT_OF_USE] for patch in patches]


@contextlib.asynccontextmanager
async def following(*script: ApiResponse) -> AsyncIterator[Stage]:
    transport = ScriptedTransport(*script)
    stage = Stage(Waker(KubeClient(transport)), transport)
    stage.waker.started_leading()
    task = asyncio.create_task(stage.waker.run())
    try:
        yield stage
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_each_change_is_written_once() -> None:
    async with following(WRITTEN, WRITTEN) as stage:
        stage.waker.cards_out_of_use("n1", frozenset({2, 0}))
        assert await stage.written() == ["0,2"]
        stage.see("n1", "0,2")
        stage.waker.cards_out_of_use("n1", frozenset({0, 2}))
        assert await stage.written() == ["0,2"]
        stage.waker.cards_out_of_use("n1", NOBODY)
        assert await stage.written() == ["0,2", None]
        stage.see("n1", "")
        assert await stage.written() == ["0,2", None]


async def test_a_node_that_may_not_be_changed_keeps_no_other_from_being_shown() -> None:
    async with following(failure(403, "Forbidden"), WRITTEN) as stage:
        stage.waker.cards_out_of_use("n1", frozenset({0}))
        stage.waker.cards_out_of_use("n2", frozenset({1}))
        assert await stage.written() == ["0", "1"]


async def test_a_fence_that_was_over_before_it_was_shown_is_a_change_all_the_same() -> None:
    """Pods may have been refused meanwhile, and nothing else would have them tried again."""
    async with following(WRITTEN, WRITTEN) as stage:
        stage.waker.cards_out_of_use("n1", frozenset({0}))
        stage.waker.cards_out_of_use("n1", NOBODY)
        assert await stage.written() == ["0", None]


async def test_cards_that_nobody_is_kept_from_any_more_are_a_change_beside_those_out_of_use() -> None:
    async with following(WRITTEN, WRITTEN, WRITTEN) as stage:
        stage.waker.cards_out_of_use("n1", frozenset({1}))
        assert await stage.written() == ["1"]
        stage.waker.free_again(make_placement("n1", 4, 0))
        assert await stage.written() == ["1", "0,1", "1"]


async def test_who_does_not_lead_wakes_nobody() -> None:
    async with following() as stage:
        stage.waker.stopped_leading()
        stage.waker.free_again(make_placement("n1", 4, 0))
        stage.waker.started_leading()
        assert await stage.written() == []


async def test_what_another_leader_left_is_put_right_once_we_lead() -> None:
    async with following(WRITTEN) as stage:
        stage.waker.stopped_leading()
        stage.see("n1", "1")
        assert await stage.written() == []
        stage.waker.started_leading()
        assert await stage.written() == [None]


async def test_a_write_that_is_not_allowed_is_told_once_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    no = failure(403, "Forbidden", "may not patch nodes")
    async with following(no, no, WRITTEN) as stage:
        stage.waker.cards_out_of_use("n1", frozenset({0}))
        for _ in range(2):
            await stage.written()
            stage.waker.started_leading()
        assert await stage.written() == ["0", "0", "0"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_a_node_that_is_gone_is_not_asked_for_again() -> None:
    async with following(failure(404, "NotFound"), WRITTEN) as stage:
        stage.waker.cards_out_of_use("n1", frozenset({0}))
        await stage.written()
        stage.waker.started_leading()
        assert await stage.written() == ["0"]
        stage.see("n1", "")  # it is there now
        assert await stage.written() == ["0", "0"]


async def test_before_kubernetes_1_31_a_label_comes_and_goes_on_every_node_that_is_meant() -> None:
    """kube-scheduler before 1.30 heeds no annotations, and tries who fits the very node that changed.

    In an upgrade it may be 1.29 while the API server is 1.30.
    """
    async with following(*[WRITTEN] * 8) as stage:
        stage.waker.kubernetes = 30
        stage.waker.free_again(make_placement("n1", 4, 0), make_placement("n2", 4, 1))
        await asyncio.sleep(0.01)
        patches = [
            (request.path.rpartition("/")[2], json.loads(request.body)["metadata"])
            for request in stage.transport.requests
        ]
    labels = [(node, each["labels"][NODE_OUT_OF_USE]) for node, each in patches if "labels" in each]
    assert labels == [("n1", ""), ("n1", None), ("n2", ""), ("n2", None)]


async def test_since_kubernetes_1_31_one_node_is_enough() -> None:
    async with following(WRITTEN, WRITTEN) as stage:
        stage.waker.kubernetes = 31
        stage.waker.free_again(make_placement("n1", 4, 0), make_placement("n2", 4, 1))
        assert await stage.written() == ["0", None]


async def test_a_version_that_cannot_be_read_for_long_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    version = answer({"major": "1", "minor": "36+"})
    transport = ScriptedTransport(*[failure(403, "Forbidden")] * 50, version)
    time = VirtualTime()
    waker = Waker(KubeClient(transport), sleep=time.sleep)
    await waker.learn_version()
    assert waker.kubernetes == 36
    assert [record.message for record in caplog.records] == [
        "version of the cluster not read, will try again"
    ]
