"""At most one leader at any instant, whatever the network does to each of the candidates."""

from __future__ import annotations

import asyncio
import json
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import UnavailableError
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.lease import LeaseElector, LeaseSettings
from gpuslice.adapters.kube.resources import LEASES
from gpuslice.adapters.kube.transport import Transport
from tests import HANG_S
from tests.unit.kube_wire import ScriptedTransport, VirtualTime, answer, failure


class OneLease:
    """The part of an API server that keeps one Lease, with optimistic locking."""

    def __init__(self) -> None:
        self.document: dict[str, Any] | None = None
        self.version = 0

    def handle(self, method: str, document: dict[str, Any]) -> ApiResponse:
        if method == "GET":
            return answer(self.document) if self.document else failure(404, "NotFound")
        if method == "POST" and self.document:
            return failure(409, "AlreadyExists")
        if method == "PUT" and document["metadata"].get("resourceVersion") != str(self.version):
            return failure(409, "Conflict")
        self.version += 1
        document["metadata"]["resourceVersion"] = str(self.version)
        self.document = document
        return answer(document)


class Link(ScriptedTransport):
    """One candidate's connection to it, which can be cut."""

    def __init__(self, server: OneLease) -> None:
        super().__init__()
        self.server = server
        self.cut = False

    async def request(self, request: ApiRequest) -> ApiResponse:
        assert request.path.startswith("/apis/coordination.k8s.io/v1/namespaces/kube-system/leases")
        if self.cut:
            raise UnavailableError("cut")
        return self.server.handle(request.method, json.loads(request.body) if request.body else {})


class Candidate:
    def __init__(self, server: OneLease, identity: str, time: VirtualTime) -> None:
        self.link = Link(server)
        self.told: list[bool] = []
        transport: Transport = self.link
        self.elector = LeaseElector(
            KubeClient(transport),
            LeaseSettings("gpuslice-extender", "kube-system", identity),
            changed=self.told.append,
            sleep=time.sleep,
            clock=time.clock,
            now=lambda: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=time.now_s),
            rng=random.Random(1),
        )

    async def step(self) -> None:
        """One round of its loop."""
        await self.elector._attempt()
        self.elector._report()


@pytest.fixture
def time() -> VirtualTime:
    return VirtualTime()


@pytest.fixture
def pair(time: VirtualTime) -> tuple[Candidate, Candidate]:
    server = OneLease()
    return Candidate(server, "one", time), Candidate(server, "two", time)


async def test_the_first_to_come_leads(pair: tuple[Candidate, Candidate]) -> None:
    one, two = pair
    await one.step()
    await two.step()
    assert (one.elector.leading, two.elector.leading) == (True, False)
    assert two.elector.holder == "one"
    assert one.told == [True]


async def test_a_leader_that_renews_is_never_replaced(
    pair: tuple[Candidate, Candidate], time: VirtualTime
) -> None:
    one, two = pair
    for _ in range(100):
        await one.step()
        await two.step()
        assert not two.elector.leading
        time.now_s += 2


async def test_a_cut_off_leader_stops_before_another_starts(
    pair: tuple[Candidate, Candidate], time: VirtualTime
) -> None:
    one, two = pair
    await one.step()
    await two.step()
    one.link.cut = True
    changed_hands_s = None
    for second in range(30):
        time.now_s += 1
        await one.step()
        await two.step()
        assert not (one.elector.leading and two.elector.leading)
        if two.elector.leading:
            changed_hands_s = changed_hands_s or second + 1
    assert changed_hands_s == 15
    assert one.told == [True, False]


async def test_leading_ends_by_the_clock_alone(pair: tuple[Candidate, Candidate], time: VirtualTime) -> None:
    one, _ = pair
    await one.step()
    time.now_s += 10
    assert not one.elector.leading


async def test_a_lease_that_ran_out_is_told_from_one_that_another_holds(
    pair: tuple[Candidate, Candidate], time: VirtualTime
) -> None:
    one, two = pair
    await one.step()
    await two.step()
    assert (one.elector.lapsed, two.elector.lapsed) == (False, False)
    one.link.cut = True
    time.now_s += 10
    await one.step()
    assert (one.elector.lapsed, two.elector.lapsed) == (True, False)


async def test_one_failed_renewal_is_survived(pair: tuple[Candidate, Candidate], time: VirtualTime) -> None:
    one, _ = pair
    await one.step()
    one.link.cut = True
    time.now_s += 4
    await one.step()
    assert one.elector.leading
    assert one.told == [True]


async def test_an_api_server_that_is_away_for_long_is_told_of_once(
    pair: tuple[Candidate, Candidate], time: VirtualTime, caplog: pytest.LogCaptureFixture
) -> None:
    """A line at each attempt is thousands an hour, from each replica."""
    one, _ = pair
    caplog.set_level("INFO", "gpuslice.adapters.kube.lease")
    await one.step()
    one.link.cut = True
    for _ in range(100):
        await one.step()
        await time.sleep(2.0)
    one.link.cut = False
    await one.step()
    said = [record.message for record in caplog.records]
    lost = ["lease not renewed, will retry", "not leading"]
    assert said == ["leading", *lost, "lease can be renewed again", "leading"]


async def test_an_answer_that_never_comes_is_given_up(time: VirtualTime) -> None:
    class Silent(Link):
        async def request(self, request: ApiRequest) -> ApiResponse:
            await asyncio.Event().wait()
            raise AssertionError

    settings = LeaseSettings("name", "kube-system", "one", 0.03, 0.02, 0.01)
    silent: Transport = Silent(OneLease())
    elector = LeaseElector(KubeClient(silent), settings, clock=time.clock)
    await asyncio.wait_for(elector._attempt(), HANG_S)
    assert not elector.leading


async def test_the_lease_reads_like_one_of_client_go(
    pair: tuple[Candidate, Candidate], time: VirtualTime
) -> None:
    one, two = pair
    await one.step()
    await two.step()
    time.now_s += 16
    await two.step()
    assert two.link.server.document is not None
    spec = two.link.server.document["spec"]
    assert spec == {
        "holderIdentity": "two",
        "leaseDurationSeconds": 15,
        "acquireTime": "2026-01-01T00:16:56.000000Z",
        "renewTime": "2026-01-01T00:16:56.000000Z",
        "leaseTransitions": 1,
    }


async def test_a_leader_that_stops_hands_over_at_once(
    pair: tuple[Candidate, Candidate], time: VirtualTime
) -> None:
    one, two = pair
    leads = asyncio.Event()
    one.elector._changed = lambda leading: leads.set() if leading else None
    one.elector._sleep = asyncio.sleep
    task = asyncio.create_task(one.elector.run())
    await leads.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not one.elector.leading
    await two.step()
    assert two.elector.leading


async def test_a_stale_answer_does_not_win(pair: tuple[Candidate, Candidate], time: VirtualTime) -> None:
    """Between reading the lease and writing it another candidate took it."""
    one, two = pair
    await one.step()
    await two.step()
    time.now_s += 20
    lease = await two.elector._client.get(
        LEASES,
        "gpuslice-extender",
        "kube-system",
    )
    await one.step()
    assert not await two.elector._take(lease)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"identity": ""}, "identity is empty"),
        ({"identity": "x", "renew_deadline_s": 20}, "each be longer than the next"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LeaseSettings("name", "kube-system", **settings)
