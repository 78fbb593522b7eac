"""A watch that stays open and says nothing: lines that are swallowed are found, a quiet one is left alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import UnavailableError
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.watch import PER_NODE, Change, Pace, Reflector
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.request import Request
from tests.builders import api_pod
from tests.integration.virtual import VirtualLoop

NOTICED_S = 30
TEN_MINUTES_S = 600
USUAL = Pace()


class Way:
    """What carries requests to the API server and lines back, in virtual time.

    `swallows` all lines of watches that were open when it was set, or of every watch (`also_new`).
    """

    def __init__(self, loop: VirtualLoop, *, bookmarks: bool = True) -> None:
        self.cluster = Cluster(clock=loop.time)
        self.watches: list[int] = []  # for how long each was asked
        self.lists = 0
        self.away = False
        self._loop = loop
        self._bookmarks = bookmarks
        self._epoch = 0
        self._also_new = False

    def swallow(self, *, also_new: bool = False) -> None:
        self._epoch += 1
        self._also_new = also_new

    def write(self, method: str, path: str, document: Any = None) -> None:
        answer = self.cluster.handle(Request(method, path, {}, {}, json.dumps(document).encode()))
        assert answer.status in (200, 201), answer.body

    def add_pod(self, name: str) -> None:
        self.write("POST", "/api/v1/namespaces/default/pods", api_pod(name))

    async def request(self, request: ApiRequest) -> ApiResponse:
        if self.away:
            raise UnavailableError("nobody answers")
        self.lists += request.path.endswith("/pods")
        answer = self.cluster.handle(Request(request.method, request.path, request.query, {}, request.body))
        return ApiResponse(answer.status, dict(answer.headers), answer.body)

    async def stream(self, request: ApiRequest) -> AsyncGenerator[bytes]:
        if self.away:
            raise UnavailableError("nobody answers")
        self.watches.append(int(request.query["timeoutSeconds"]))
        watch = self.cluster.handle(Request("GET", request.path, request.query, {}, b"")).watch
        assert watch is not None
        assert watch.timeout_s is not None
        mine, news = self._epoch, asyncio.Event()
        watch.on_ready = news.set
        end = self._loop.time() + watch.timeout_s
        marks = [*range(60, int(watch.timeout_s) - 2, 60), watch.timeout_s - 2]
        for at in [*(end - watch.timeout_s + each for each in marks), end]:
            while self._loop.time() < at:
                news.clear()
                for line in watch.take().splitlines():
                    if mine == self._epoch and not (self._also_new and mine):
                        yield line
                try:
                    async with asyncio.timeout_at(at):
                        await news.wait()
                except TimeoutError:
                    break
            if at < end and self._bookmarks:
                watch.bookmark()
        watch.end()


class Followed:
    def __init__(self, loop: VirtualLoop, way: Way, pace: Pace = USUAL) -> None:
        self.loop, self.way = loop, way
        self.reflector: Reflector[Any] = Reflector(
            KubeClient(way), PODS, self._changed, pace=pace, clock=loop.time, rng=random.Random(1)
        )
        self.heard: dict[str, float] = {}
        self.task = loop.create_task(self.reflector.run())
        loop.settle()

    def _changed(self, change: Change[Any]) -> None:
        if change.object is not None:
            self.heard.setdefault(change.object.metadata.name, self.loop.time())

    def noticed_after_s(self, name: str, waits_s: float = TEN_MINUTES_S) -> float:
        """How long after now the reflector has the pod that is made now."""
        began = self.loop.time()
        self.way.add_pod(name)
        self.loop.settle()
        while name not in self.heard and self.loop.time() < began + waits_s:
            self.loop.advance(1)
        return self.heard.get(name, float("inf")) - began


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    asyncio.set_event_loop(made)
    yield made
    for task in asyncio.all_tasks(made):
        task.cancel()
    made.settle()
    made.close()
    asyncio.set_event_loop(None)


@pytest.mark.parametrize("after_s", [0, 5, 17, 19, 22, 61, 140, 299])
@pytest.mark.parametrize("also_new", [False, True], ids=["what was open", "every watch"])
def test_lines_that_are_swallowed_are_missed_within_half_a_minute(
    loop: VirtualLoop, after_s: int, also_new: bool
) -> None:
    followed = Followed(loop, Way(loop))
    loop.advance(70)  # a bookmark has come
    followed.way.swallow(also_new=also_new)
    loop.advance(after_s)
    assert followed.noticed_after_s("new") <= NOTICED_S
    assert followed.noticed_after_s("newer") <= NOTICED_S


def test_a_way_that_carries_no_line_from_the_beginning_is_found_by_a_list(loop: VirtualLoop) -> None:
    way = Way(loop)
    way.swallow(also_new=True)
    followed = Followed(loop, way)
    assert followed.noticed_after_s("new") <= NOTICED_S
    loop.advance(100)
    assert followed.noticed_after_s("newer") <= NOTICED_S


def test_a_deletion_and_a_change_are_missed_as_well(loop: VirtualLoop) -> None:
    followed = Followed(loop, Way(loop))
    for name in ("gone", "changed"):
        followed.way.add_pod(name)
    loop.advance(1)
    followed.way.swallow()
    followed.way.write("DELETE", "/api/v1/namespaces/default/pods/gone", {"gracePeriodSeconds": 0})
    loop.advance(NOTICED_S)
    assert set(followed.reflector.objects) == {("default", "changed")}
    followed.way.swallow()
    path = "/api/v1/namespaces/default/pods/changed/binding"
    followed.way.write("POST", path, {"target": {"name": "n1"}, "metadata": {"name": "changed"}})
    loop.advance(NOTICED_S)
    assert followed.reflector.objects["default", "changed"].spec.node_name == "n1"


@pytest.mark.parametrize("bookmarks", [True, False])
def test_a_quiet_watch_is_asked_about_and_left_open(loop: VirtualLoop, bookmarks: bool) -> None:
    way = Way(loop, bookmarks=bookmarks)
    followed = Followed(loop, way, Pace(watch_timeout_s=TEN_MINUTES_S))
    loop.advance(TEN_MINUTES_S - 1)
    probes = [each for each in way.watches if each < 10]
    assert len(way.watches) - len(probes) == (1 if bookmarks else 2)
    assert len(probes) <= TEN_MINUTES_S / 15
    assert way.lists == (1 if bookmarks else 2), "without bookmarks silence says nothing; one list looks"
    assert followed.noticed_after_s("new") == 0


def test_a_quiet_watch_of_a_node_asks_nothing_and_its_bookmarks_are_enough(loop: VirtualLoop) -> None:
    followed = Followed(loop, Way(loop), PER_NODE)
    loop.advance(3600)
    assert not [each for each in followed.way.watches if each < 300]
    followed.way.swallow()
    assert followed.noticed_after_s("new") <= 100


def test_on_a_node_kubelets_question_finds_a_swallowed_pod_at_once(loop: VirtualLoop) -> None:
    followed = Followed(loop, Way(loop), PER_NODE)
    loop.advance(30)
    followed.way.swallow()
    followed.way.add_pod("new")
    loop.advance(2)
    assert "new" not in followed.heard
    followed.reflector.hurry()
    loop.settle()
    loop.advance(2)
    assert "new" in followed.heard


def test_a_busy_watch_is_never_asked_about(loop: VirtualLoop) -> None:
    followed = Followed(loop, Way(loop))
    for number in range(60):
        loop.advance(10)
        assert followed.noticed_after_s(f"p{number}") == 0
    assert not [each for each in followed.way.watches if each < 10]


def test_news_that_both_watches_tell_are_no_silence(loop: VirtualLoop) -> None:
    """A probe is often open when something happens."""
    way = Way(loop)
    followed = Followed(loop, way, Pace(watch_timeout_s=TEN_MINUTES_S))
    for number in range(20):
        loop.advance(20)
        assert followed.noticed_after_s(f"p{number}") == 0
    assert [each for each in way.watches if each < 10]
    assert len([each for each in way.watches if each >= 10]) == 1


def test_an_open_watch_is_kept_while_nobody_else_answers(loop: VirtualLoop) -> None:
    followed = Followed(loop, Way(loop))
    loop.advance(10)
    followed.way.away = True
    loop.advance(100)
    assert followed.noticed_after_s("new") == 0


def test_what_a_forgetful_server_cannot_tell_is_listed(loop: VirtualLoop) -> None:
    followed = Followed(loop, Way(loop))
    followed.way.swallow()
    followed.way.add_pod("old")
    followed.way.cluster.compact()
    assert followed.noticed_after_s("new") <= NOTICED_S
    assert "old" in followed.heard
