"""An extender beside a simulated API server, both on real sockets, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.transport import HttpTransport, TimedTransport
from gpuslice.apps.extender.main import CONNECTIONS, Extender
from gpuslice.apps.extender.metrics import api_times
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.core.contract import ANN_INDEX, SYSTEM_NAMESPACE, UNHEALTHY_CONFIGMAP_PREFIX
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.request import Request
from tests import HANG_S
from tests.builders import api_node, api_pod
from tests.speedups import with_speedups

PREFIX = "/gpushare-scheduler"


class Refused(Exception):
    """The API server said no to the test itself."""


@dataclass(slots=True)
class Api:
    """The simulated API server, spoken to directly."""

    cluster: Cluster = field(default_factory=lambda: Cluster(tracks_managers=False))

    def call(self, method: str, path: str, document: Any = None, **headers: str) -> dict[str, Any]:
        body = b"" if document is None else msgspec.json.encode(document)
        answer = self.cluster.handle(Request(method, path, {}, headers, body))
        found: dict[str, Any] = msgspec.json.decode(answer.body)
        if answer.status >= 300:
            raise Refused(found.get("message"))
        return found

    def add_node(self, name: str = "n1", units: int = 15, cards: int = 1, **fields: Any) -> None:
        node = api_node(name, units, cards, **fields)
        self.call("POST", "/api/v1/nodes", node)
        self.set_node(name, node["status"])

    def set_node(self, name: str, status: Mapping[str, Any]) -> None:
        self.patch(f"/api/v1/nodes/{name}/status", {"status": status})

    def add_pod(self, name: str = "p", memory: Any = "4", **fields: Any) -> dict[str, Any]:
        pod = api_pod(name, memory, **fields)
        del pod["metadata"]["uid"]
        return self.call("POST", "/api/v1/namespaces/default/pods", pod)

    def pod(self, name: str = "p") -> dict[str, Any]:
        return self.call("GET", f"/api/v1/namespaces/default/pods/{name}")

    def pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("GET", "/api/v1/pods")["items"]
        return found

    def patch(self, path: str, patch: Any) -> dict[str, Any]:
        return self.call("PATCH", path, patch, **{"content-type": "application/merge-patch+json"})

    def finish_pod(self, name: str, phase: str = "Succeeded") -> None:
        self.patch(f"/api/v1/namespaces/default/pods/{name}/status", {"status": {"phase": phase}})

    def delete_pod(self, name: str, grace_s: int = 0) -> None:
        self.call("DELETE", f"/api/v1/namespaces/default/pods/{name}", {"gracePeriodSeconds": grace_s})

    def set_unhealthy(self, node: str, cards: str) -> None:
        name = UNHEALTHY_CONFIGMAP_PREFIX + node
        path = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/configmaps"
        with contextlib.suppress(Refused):
            self.call("DELETE", f"{path}/{name}")
        self.call(
            "POST",
            path,
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"gpus": cards}},
        )

    def annotations(self, name: str = "p") -> dict[str, str]:
        found: dict[str, str] = self.pod(name)["metadata"].get("annotations") or {}
        return found

    def card(self, name: str = "p") -> str | None:
        return self.annotations(name).get(ANN_INDEX)

    def bound_to(self, name: str = "p") -> str:
        node: str = self.pod(name)["spec"].get("nodeName", "")
        return node

    def events(self, reason: str = "") -> list[dict[str, Any]]:
        events = self.call("GET", "/api/v1/events")["items"]
        return [event for event in events if not reason or event["reason"] == reason]


def cluster(**nodes: tuple[int, int]) -> Api:
    """Nodes by name: units in all, cards."""
    api = Api()
    for name, (units, cards) in nodes.items():
        api.add_node(name, units, cards)
    return api


@dataclass(slots=True)
class Rig:
    """One extender and the API server that it follows."""

    api: Api
    extender: Extender
    session: aiohttp.ClientSession
    url: str

    async def post(self, verb: str, body: Any) -> Any:
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.session.post(f"{self.url}{PREFIX}/{verb}", data=raw) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as answer:
            return answer.status, await answer.text()

    async def filter(self, pod: dict[str, Any], *names: str) -> dict[str, Any]:
        answer: dict[str, Any] = await self.post(
            "filter", {"Pod": pod, "Nodes": None, "NodeNames": list(names)}
        )
        return answer

    async def prioritize(self, pod: dict[str, Any], *names: str) -> dict[str, int]:
        hosts = await self.post("prioritize", {"Pod": pod, "Nodes": None, "NodeNames": list(names)})
        return {each["Host"]: each["Score"] for each in hosts}

    async def bind(self, pod: dict[str, Any], node: str = "n1", *, uid: str = "") -> str:
        """Filter and bind, as kube-scheduler asks; the error text of bind, "" when the pod was bound."""
        await self.filter(
            {**pod, "metadata": {**pod["metadata"], "uid": uid or pod["metadata"]["uid"]}}, node
        )
        return await self.bind_unasked(pod, node, uid=uid)

    async def bind_unasked(self, pod: dict[str, Any], node: str = "n1", *, uid: str = "") -> str:
        """Bind alone."""
        meta = pod["metadata"]
        args = {
            "PodName": meta["name"],
            "PodNamespace": meta["namespace"],
            "PodUID": uid or meta["uid"],
            "Node": node,
        }
        error: str = (await self.post("bind", args))["Error"]
        return error

    async def add_and_bind(self, name: str, memory: Any = "4", node: str = "n1", **fields: Any) -> str:
        """Create, bind, and the card that it got."""
        pod = self.api.add_pod(name, memory, **fields)
        error = await self.bind(pod, node)
        assert not error, error
        return self.api.card(name) or ""

    async def inspect(self) -> dict[str, Any]:
        status, text = await self.get(f"{PREFIX}/inspect")
        assert status == 200
        found: dict[str, Any] = msgspec.json.decode(text)
        return found

    async def used(self, node: str = "n1") -> dict[int, int]:
        """Units used per card as inspect says."""
        (found,) = (each for each in (await self.inspect())["nodes"] if each["name"] == node)
        return {device["id"]: device["usedGPU"] for device in found["devs"]}

    async def caught_up(self) -> None:
        """The extender has seen everything that happened so far."""
        marker = f"marker-{self.api.cluster.identities.new_suffix()}"
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": marker}}
        self.api.call("POST", "/api/v1/nodes", node)
        await until(lambda: self.extender.ledger.state(marker) is not None)
        self.api.call("DELETE", f"/api/v1/nodes/{marker}")

        def pods_seen() -> bool:
            """As they are by then: it changes some itself."""
            there = {pod["metadata"]["uid"]: pod["metadata"]["resourceVersion"] for pod in self.api.pods()}
            seen = self.extender.watch.pods.objects.values()
            return {each.metadata.uid: each.metadata.resource_version for each in seen} == there

        await until(pods_seen)


async def until(condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
    """Wait for something that another task brings about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.002)


async def _none(event: asyncio.Event) -> None:
    await event.wait()


@contextlib.asynccontextmanager
async def running_extender(
    url: str, *, headers: Any = None, **settings: Any
) -> AsyncIterator[tuple[Extender, str]]:
    """An extender that follows the API server at `url`; yields it and its own address.

    `headers` go with each of its requests.
    """
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stopped = asyncio.Event()
    chosen = ExtenderSettings(**{"port": 0, "host": "127.0.0.1", **settings})
    connection = Connection(server=url, headers=headers or {})
    async with HttpTransport(
        connection, timeout_s=chosen.api_timeout_s, connections=CONNECTIONS
    ) as transport:
        api = api_times()
        extender = Extender(
            chosen,
            KubeClient(TimedTransport(transport, api.observe)),
            api=api,
            with_speedups=with_speedups(),
        )
        task = asyncio.create_task(extender.run(_none(stopped), port.set_result))
        try:
            yield extender, f"http://127.0.0.1:{await port}"
        finally:
            stopped.set()
            await task


@contextlib.asynccontextmanager
async def rig(api: Api | None = None, *, wait: bool = True, **settings: Any) -> AsyncIterator[Rig]:
    """The whole arrangement, ready to be asked (unless `wait` is False)."""
    api = api or Api()
    async with (
        ApiServer(api.cluster) as server,
        running_extender(server.url, **{"policy": "binpack", **settings}) as (extender, url),
        aiohttp.ClientSession() as session,
    ):
        if wait:
            await until(lambda: not extender.not_ready())
        yield Rig(api, extender, session, url)
