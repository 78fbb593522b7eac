"""Which replica a Service shows, who counts as ready, and which replica decided what."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import aiohttp
import msgspec
import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.apps.extender.leadership import POLL_EVERY_S, LeaderLabel, OwnPod
from gpuslice.apps.extender.main import Extender
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.apps.settings import SettingsError
from gpuslice.core.contract import LABEL_LEADER
from simcluster.apiserver.server import ApiServer
from tests import HANG_S
from tests.integration.extender_rig import PREFIX, Api, cluster, rig, running_extender, until
from tests.integration.virtual import HeldTransport, Network, Process, VirtualLoop


def labelled(api: Api) -> set[str]:
    """The pods that the Service would send calls to."""
    return {
        pod["metadata"]["name"] for pod in api.pods() if LABEL_LEADER in pod["metadata"].get("labels", {})
    }


@contextlib.asynccontextmanager
async def replica(url: str, name: str) -> AsyncIterator[tuple[Extender, str]]:
    own = {"lease_identity": name, "lease_namespace": "default", "lease_duration_s": 1.5}
    async with running_extender(url, leader_elect=True, label_leader=True, **own) as running:
        yield running


async def status(url: str, path: str) -> int:
    async with aiohttp.ClientSession() as web, web.get(url + path) as answer:
        return answer.status


async def test_who_stands_by_is_prepared_and_only_the_leader_is_labelled() -> None:
    api = cluster(n1=(15, 1))
    for name in ("a", "b"):
        api.add_pod(name, memory=None)
    async with ApiServer(api.cluster) as server, contextlib.AsyncExitStack() as first:
        leader, url_a = await first.enter_async_context(replica(server.url, "a"))
        await until(lambda: not leader.not_ready())
        async with replica(server.url, "b") as (follower, url_b):
            await until(lambda: not follower.not_prepared())
            await until(lambda: labelled(api) == {"a"})
            assert [await status(url, "/prepared") for url in (url_a, url_b)] == [200, 200]
            assert [await status(url, "/readyz") for url in (url_a, url_b)] == [200, 503]
            await first.aclose()  # an update or a drain ends the leader
            await until(lambda: not follower.not_ready())
            await until(lambda: labelled(api) == {"b"})


async def test_a_label_that_a_crash_left_behind_goes() -> None:
    api = cluster(n1=(15, 1))
    for name in ("a", "b", "bystander"):
        api.add_pod(name, memory=None)
    api.patch("/api/v1/namespaces/default/pods/b", {"metadata": {"labels": {LABEL_LEADER: "true"}}})
    assert labelled(api) == {"b"}
    async with ApiServer(api.cluster) as server, replica(server.url, "a") as (leader, _):
        await until(lambda: not leader.not_ready())
        await until(lambda: labelled(api) == {"a"})


def test_a_label_that_an_earlier_leader_takes_off_too_late_comes_back() -> None:
    """Else the Service would lead nowhere until the next change of leaders."""
    loop, api, leads = VirtualLoop(), Api(), {"a": True, "b": False}
    network, replicas = Network(api.cluster, loop), [Process(name, loop) for name in leads]
    for each in replicas:
        api.add_pod(each.name, memory=None)
        client, own = KubeClient(HeldTransport(network, each)), OwnPod("default", each.name)
        each.start(LeaderLabel(client, own, lambda name=each.name: leads[name]).run(), "label")  # type: ignore[misc]
    loop.settle()
    network.calm()

    leads.update(a=False, b=True)
    loop.advance(POLL_EVERY_S)
    while not (
        late := [each for each in network.messages if "b: PATCH" in str(each) and "pods/a" in str(each)]
    ):
        network.deliver(next(each for each in network.messages if each.sender is replicas[1]))
    network.messages.remove(late[0])  # b is about to take the label off a
    leads.update(a=True, b=False)
    for _ in range(3):
        loop.advance(POLL_EVERY_S)
        network.calm()
    assert labelled(api) == {"a"}
    network.messages.append(late[0])
    for _ in range(100):
        network.calm()
        loop.advance(POLL_EVERY_S)
    assert labelled(api) == {"a"}
    for each in replicas:
        each.kill()
    loop.close()


async def test_nobody_is_labelled_unless_asked_for() -> None:
    api = cluster(n1=(15, 1))
    api.add_pod("a", memory=None)
    async with ApiServer(api.cluster) as server, running_extender(server.url, lease_identity="a") as (one, _):
        await until(lambda: not one.not_ready())
        assert not labelled(api)


def test_a_label_without_a_pod_is_refused() -> None:
    with pytest.raises(SettingsError, match="POD_NAME"):
        ExtenderSettings(label_leader=True)


async def test_who_asks_a_replica_that_does_not_lead_is_sent_to_another_connection() -> None:
    """kube-scheduler keeps its connections: an old leader would be asked for ever, and nothing bound."""
    api = cluster(n1=(15, 1))
    pod = api.add_pod("p")
    args = {"PodName": "p", "PodNamespace": "default", "PodUID": pod["metadata"]["uid"], "Node": "n1"}
    bodies = {"filter": {"Pod": pod, "NodeNames": ["n1"]}, "prioritize": {"Pod": pod, "NodeNames": ["n1"]}}
    bodies |= {"bind": args, "preempt": {"Pod": pod, "NodeNameToMetaVictims": {}}}

    async def connections(url: str) -> set[str]:
        async with aiohttp.ClientSession() as web:
            found = set()
            for verb, body in bodies.items():
                async with web.post(f"{url}{PREFIX}/{verb}", json=body) as answer:
                    found.add(answer.headers["Connection"])
            return found

    async with ApiServer(api.cluster) as server, contextlib.AsyncExitStack() as stack:
        own = {"leader_elect": True, "lease_namespace": "default", "lease_duration_s": 1.5}
        start = running_extender(server.url, lease_identity="a", **own)
        leader, leads = await stack.enter_async_context(start)
        await until(lambda: not leader.not_ready())
        start = running_extender(server.url, lease_identity="b", **own)
        follower, follows = await stack.enter_async_context(start)
        await until(lambda: not follower.not_prepared())
        assert await connections(leads) == {"keep-alive"}
        assert await connections(follows) == {"close"}
        assert follower.metrics.asked_while_not_ready == len(bodies)
        assert leader.metrics.asked_while_not_ready == 0


async def test_connections_end_with_the_lease() -> None:
    """A client that kept one open finds the new leader by the Service, without hearing a refusal first."""
    api = cluster(n1=(15, 1))
    lease = "/apis/coordination.k8s.io/v1/namespaces/default/leases/gpushare-schd-extender"
    async with ApiServer(api.cluster) as server, contextlib.AsyncExitStack() as stack:
        own = {"leader_elect": True, "lease_namespace": "default", "lease_duration_s": 1.5}
        start = running_extender(server.url, lease_identity="a", **own)
        leader, url = await stack.enter_async_context(start)
        await until(lambda: not leader.not_ready())
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"Connection: keep-alive" in await reader.readuntil(b"\r\n\r\n")
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        api.patch(lease, {"spec": {"holderIdentity": "b", "leaseDurationSeconds": 60, "renewTime": now}})
        async with asyncio.timeout(HANG_S):
            await reader.read()  # until it ends
        assert leader.not_ready()
        writer.close()
        await writer.wait_closed()


async def test_each_bind_is_remembered_with_its_cards_and_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "gpuslice.apps.extender.pod_records")
    async with rig(cluster(n1=(30, 2)), lease_identity="replica-a") as extender:
        pod, other = extender.api.add_pod("p", "4"), extender.api.add_pod("other", "15")
        assert await extender.bind(pod) == ""
        assert await extender.bind(other, uid="gone")
        status, text = await extender.get("/debug/decisions")
        assert status == 200
        first, second = msgspec.json.decode(text)
        assert first.pop("seconds") >= 0
        assert first.pop("time").endswith("+00:00")
        assert first == {
            "pod": "default/p",
            "uid": pod["metadata"]["uid"],
            "node": "n1",
            "cards": {"0": 4},
            "policy": "binpack",
            "passed": 1,
            "nominated": False,
            "replica": "replica-a",
            "error": "",
        }
        assert "not equal with expected gone" in second["error"]
        assert second["cards"] == {}
        said = [vars(each) for each in caplog.records if each.getMessage() == "bind decided"]
        assert [(each["pod"], each["cards"], each["replica"]) for each in said] == [
            ("default/p", {"0": 4}, "replica-a"),
            ("default/other", {}, "replica-a"),
        ]
        assert extender.extender.decisions.latest.maxlen == 1000
