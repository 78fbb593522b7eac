"""The Kubernetes client against the simulated API server, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from gpuslice.adapters.kube.events import EventRecorder, pod_reference
from gpuslice.adapters.kube.lease import LeaseElector, LeaseSettings
from gpuslice.adapters.kube.resources import CONFIG_MAPS, EVENTS, LEASES, NODES, PODS
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.kube.watch import Change, ChangeKind, Pace, Reflector
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.faults import Fault
from tests import HANG_S


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer(Cluster()) as running:
        yield running


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[KubeClient]:
    async with HttpTransport(Connection(server=server.url)) as transport:
        yield KubeClient(transport)


def pod(name: str, **labels: str) -> dict[str, Any]:
    container = {"name": "app", "image": "x", "resources": {"limits": {"aliyun.com/gpu-mem": "4"}}}
    return {
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {"containers": [container]},
    }


def node(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}}


async def test_what_is_created_can_be_read(client: KubeClient) -> None:
    created = await client.create(PODS, pod("a"))
    assert created.metadata.uid
    assert await client.get(PODS, "a", "default") == created
    assert created.spec.containers[0].resources is not None
    assert created.spec.containers[0].resources.limits == {"aliyun.com/gpu-mem": "4"}


async def test_a_name_taken_and_a_name_missing_are_told_apart(client: KubeClient) -> None:
    await client.create(PODS, pod("a"))
    with pytest.raises(AlreadyExistsError):
        await client.create(PODS, pod("a"))
    with pytest.raises(NotFoundError, match='"b" not found'):
        await client.get(PODS, "b", "default")


async def test_a_long_list_comes_whole_in_pages(client: KubeClient) -> None:
    for number in range(25):
        await client.create(PODS, pod(f"p{number:02}", kind="even" if number % 2 == 0 else "odd"))
    whole = await client.list(PODS, page=7)
    assert [item.metadata.name for item in whole.items or []] == [f"p{number:02}" for number in range(25)]
    assert whole.metadata.resource_version
    odd = await client.list(PODS, "default", labels="kind=odd", page=5)
    assert len(odd.items or []) == 12


async def test_a_patch_for_another_uid_changes_nothing(client: KubeClient) -> None:
    created = await client.create(PODS, pod("a"))
    patch = {"metadata": {"annotations": {"x": "1"}}}
    with pytest.raises(ConflictError):
        await client.merge_patch(PODS, "a", patch, "default", uid="another")
    operation = {"op": "add", "path": "/metadata/annotations", "value": {"x": "1"}}
    with pytest.raises(ConflictError):
        await client.json_patch(PODS, "a", [operation], "default", uid="another")
    assert (await client.get(PODS, "a", "default")).metadata.annotations is None
    patched = await client.merge_patch(PODS, "a", patch, "default", uid=created.metadata.uid)
    assert patched.metadata.annotations == {"x": "1"}


async def test_a_patch_for_an_older_version_is_a_conflict(client: KubeClient) -> None:
    created = await client.create(PODS, pod("a"))
    version = created.metadata.resource_version
    patch = {"metadata": {"annotations": {"x": "1"}}}
    await client.merge_patch(PODS, "a", patch, "default", resource_version=version)
    with pytest.raises(ConflictError):
        await client.merge_patch(
            PODS, "a", {"metadata": {"labels": {"y": "2"}}}, "default", resource_version=version
        )


async def test_replace_needs_the_current_version(client: KubeClient) -> None:
    made = await client.create(
        CONFIG_MAPS, {"metadata": {"name": "c", "namespace": "default"}, "data": {"a": "1"}}
    )
    await client.replace(CONFIG_MAPS, msgspec.structs.replace(made, data={"a": "2"}))
    with pytest.raises(ConflictError):
        await client.replace(CONFIG_MAPS, msgspec.structs.replace(made, data={"a": "3"}))
    assert (await client.get(CONFIG_MAPS, "c", "default")).data == {"a": "2"}


async def test_apply_creates_and_removes_what_is_no_longer_said(client: KubeClient) -> None:
    document: dict[str, Any] = {
        "metadata": {"name": "c", "namespace": "default"},
        "data": {"a": "1", "b": "2"},
    }
    await client.apply(CONFIG_MAPS, document)
    document["data"] = {"a": "1"}
    assert (await client.apply(CONFIG_MAPS, document)).data == {"a": "1"}


async def test_apply_respects_another_owner_unless_forced(server: ApiServer, client: KubeClient) -> None:
    document = {"metadata": {"name": "c", "namespace": "default"}, "data": {"a": "1"}}
    await client.apply(CONFIG_MAPS, document)
    async with HttpTransport(Connection(server=server.url)) as transport:
        other = KubeClient(transport, manager="other")
        with pytest.raises(ConflictError):
            await other.apply(CONFIG_MAPS, {**document, "data": {"a": "2"}})
        assert (await other.apply(CONFIG_MAPS, {**document, "data": {"a": "2"}}, force=True)).data == {
            "a": "2"
        }


async def test_node_status_takes_an_extended_resource(client: KubeClient) -> None:
    await client.create(NODES, node("n"))
    patched = await client.patch_status(NODES, "n", {"capacity": {"aliyun.com/gpu-count": "1"}})
    assert patched.status.capacity is not None
    assert patched.status.capacity["aliyun.com/gpu-count"] == "1"


async def test_a_pod_is_bound_once(client: KubeClient) -> None:
    await client.create(NODES, node("n"))
    created = await client.create(PODS, pod("a"))
    with pytest.raises(ConflictError):
        await client.bind("default", "a", "n", uid="another")
    await client.bind("default", "a", "n", uid=created.metadata.uid)
    assert (await client.get(PODS, "a", "default")).spec.node_name == "n"
    with pytest.raises(AlreadyExistsError):
        await client.bind("default", "a", "n", uid=created.metadata.uid)


async def test_delete_minds_the_uid(client: KubeClient) -> None:
    created = await client.create(PODS, pod("a"))
    with pytest.raises(ConflictError):
        await client.delete(PODS, "a", "default", uid="another", grace_s=0)
    await client.delete(PODS, "a", "default", uid=created.metadata.uid, grace_s=0)
    with pytest.raises(NotFoundError):
        await client.get(PODS, "a", "default")


async def test_what_the_server_refuses_is_told_in_its_words(client: KubeClient) -> None:
    with pytest.raises(InvalidError, match=r"metadata.name"):
        await client.create(PODS, pod("Not_A_Name"))


async def test_a_lost_answer_is_not_a_no(server: ApiServer, client: KubeClient) -> None:
    server.cluster.add_fault(Fault(method="POST", path=".*/pods", code=504, after=True, times=1))
    with pytest.raises(UnavailableError) as caught:
        await client.create(PODS, pod("a"))
    assert caught.value.outcome_unknown
    assert (await client.get(PODS, "a", "default")).metadata.name == "a"


async def test_the_same_event_is_counted(client: KubeClient) -> None:
    made = await client.create(PODS, pod("a"))
    about = pod_reference(made.metadata.namespace, made.metadata.name, made.metadata.uid)
    recorder = EventRecorder(client, "gpuslice-agent")
    for _ in range(3):
        await recorder.create_event(about, "FailedShare", "no card", type="Warning")
    (event,) = (await client.list(EVENTS, "default")).items or []
    assert (event.count, event.reason, event.involved_object.name) == (3, "FailedShare", "a")


async def test_a_lease_is_held_by_one_and_handed_over(client: KubeClient) -> None:
    def elector(identity: str) -> LeaseElector:
        return LeaseElector(client, LeaseSettings("lead", "kube-system", identity, retry_s=0.05))

    one, two = elector("one"), elector("two")
    first = asyncio.create_task(one.run())
    await until(lambda: one.leading)
    second = asyncio.create_task(two.run())
    await until(lambda: two.holder == "one")
    assert not two.leading
    first.cancel()
    await until(lambda: two.leading)
    assert (await client.get(LEASES, "lead", "kube-system")).spec.lease_transitions == 1
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)


async def until(condition: Any, timeout_s: float = HANG_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is awaited happens in the server
            await asyncio.sleep(0.01)


class Following:
    """A reflector in the background, and what it told."""

    def __init__(self, client: KubeClient) -> None:
        self.told: list[str] = []
        pace = Pace(first_delay_s=0.02, longest_delay_s=0.05)
        self.reflector = Reflector(client, PODS, self._note, pace=pace)

    def _note(self, change: Change[Any]) -> None:
        name = change.object.metadata.name if change.object is not None else ""
        self.told.append(f"{change.kind} {name}".strip())

    async def __aenter__(self) -> Following:
        self._task = asyncio.create_task(self.reflector.run())
        await asyncio.wait_for(self.reflector.synced.wait(), HANG_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def hears(self, *told: str) -> None:
        await until(lambda: self.told[-len(told) :] == list(told))


async def test_the_reflector_hears_of_every_change(client: KubeClient) -> None:
    await client.create(PODS, pod("a"))
    async with Following(client) as following:
        assert following.told == ["added a", ChangeKind.SYNCED]
        await client.create(PODS, pod("b"))
        await client.merge_patch(PODS, "b", {"metadata": {"labels": {"x": "y"}}}, "default")
        await client.delete(PODS, "a", "default", grace_s=0)
        await following.hears("added b", "modified b", "deleted a")


async def test_the_reflector_survives_dropped_watches(server: ApiServer, client: KubeClient) -> None:
    async with Following(client) as following:
        for number in range(5):
            server.cluster.drop_watches()
            await client.create(PODS, pod(f"p{number}"))
        await following.hears(*[f"added p{number}" for number in range(5)])


async def test_the_reflector_misses_no_delete_while_the_server_forgets(
    server: ApiServer, client: KubeClient
) -> None:
    await client.create(PODS, pod("gone"))
    await client.create(PODS, pod("again"))
    async with Following(client) as following:
        server.cluster.add_fault(Fault(method="GET", path="/api/v1/pods", code=503))
        server.cluster.drop_watches()
        await client.delete(PODS, "gone", "default", grace_s=0)
        await client.delete(PODS, "again", "default", grace_s=0)
        await client.create(PODS, pod("again"))
        server.cluster.compact()
        server.cluster.faults.clear()
        await until(lambda: len(following.told) >= 6)
        assert sorted(following.told[3:]) == ["added again", "deleted again", "deleted gone", "synced"]
        assert following.told.index("deleted again") < following.told.index("added again", 3)


async def test_a_server_that_is_too_busy_for_now_is_asked_again_when_it_says(
    server: ApiServer, client: KubeClient
) -> None:
    server.cluster.add_fault(Fault(method="POST", path=".*/pods", code=429, times=1, retry_after_s=1))
    await client.create(PODS, pod("p1"))
    server.cluster.add_fault(Fault(method="GET", code=429, times=1, retry_after_s=1))

    assert (await client.get(PODS, "p1", "default")).metadata.name == "p1"


async def test_a_429_that_names_no_time_is_an_answer(server: ApiServer, client: KubeClient) -> None:
    server.cluster.add_fault(Fault(method="POST", path=".*/pods", code=429, times=1))
    with pytest.raises(UnavailableError) as refused:
        await client.create(PODS, pod("p1"))
    assert not refused.value.outcome_unknown


@pytest.mark.parametrize("way", ["requests", "watches"])
async def test_an_outage_and_its_end_are_logged_once(way: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gpuslice.adapters.kube.transport")
    server = ApiServer(Cluster())
    await server.start()
    async with HttpTransport(Connection(server=server.url)) as transport:
        client = KubeClient(transport)

        async def ask() -> bool:
            try:
                if way == "requests":
                    await client.list(NODES)
                else:
                    async with contextlib.aclosing(client.watch(NODES, "", timeout_s=1)) as lines:
                        async for _ in lines:
                            break
            except UnavailableError:
                return False
            return True

        assert await ask()
        await server.stop()
        async with asyncio.timeout(HANG_S):
            while not caplog.records:
                assert not await ask()
                await asyncio.sleep(0.1)
        for _ in range(5):
            assert not await ask()
        await server.start()
        assert await ask()
        assert await ask()
        await server.stop()
    away, again = caplog.records
    assert (away.message, again.message) == (
        "the API server does not answer",
        "the API server answers again",
    )
    assert vars(again)["after_s"] >= 3
