"""A simulated API server and one node for tests, with a device plugin that can be told what to answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from grpclib import GRPCError, Status

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.errors import NotFoundError
from gpuslice.adapters.kube.resources import CONFIG_MAPS, EVENTS, NODES, PODS
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.adapters.kubelet.rpc import (
    DevicePluginService,
    RegistrationClient,
    Server,
    unix_channel,
)
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster
from simcluster.kubelet.kubelet import Kubelet
from simcluster.kubelet.runtime import Runtime
from simcluster.kubelet.settings import KubeletSettings
from simcluster.workload.images import ImageRegistry
from tests import HANG_S

MEM = "aliyun.com/gpu-mem"
ENDPOINT = "test.sock"
NATIVE = Path(__file__).parents[2] / "native" / "build" / "sim"


class Plugin(DevicePluginService):
    """Serves `count` devices of one card and remembers every call."""

    def __init__(self, folder: Path, count: int = 15) -> None:
        self.folder = folder
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.refusal = ""
        self.pre_start_failures = 0
        self.answer = dp.ContainerAllocateResponse(envs={"GRANTED": "plugin"})
        self._lists: asyncio.Queue[list[dp.Device] | None] = asyncio.Queue()
        self._server: Server | None = None
        self.send(count)

    def send(self, count: int, health: str = "Healthy") -> None:
        self._lists.put_nowait([dp.Device(ID=f"card-_-{n}", health=health) for n in range(count)])

    async def start(self) -> None:
        self._server = Server([self])
        await self._server.start(path=str(self.folder / ENDPOINT))
        request = dp.RegisterRequest(version="v1beta1", endpoint=ENDPOINT, resource_name=MEM)
        async with unix_channel(self.folder / "kubelet.sock") as channel:
            await RegistrationClient(channel).register(request, 5.0)

    async def stop(self) -> None:
        """End the stream first: closing the server alone leaves its connections open."""
        self._lists.put_nowait(None)
        await asyncio.sleep(0)
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def get_device_plugin_options(self, request: dp.Empty) -> dp.DevicePluginOptions:
        return dp.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    async def list_and_watch(self, request: dp.Empty) -> AsyncGenerator[dp.ListAndWatchResponse]:
        while (devices := await self._lists.get()) is not None:
            yield dp.ListAndWatchResponse(devices=devices)

    async def get_preferred_allocation(
        self, request: dp.PreferredAllocationRequest
    ) -> dp.PreferredAllocationResponse:
        (one,) = request.container_requests
        wish = sorted(one.available_deviceIDs)[: one.allocation_size]
        self.calls.append(("preferred", tuple(wish)))
        answer = dp.ContainerPreferredAllocationResponse(deviceIDs=wish)
        return dp.PreferredAllocationResponse(container_responses=[answer])

    async def allocate(self, request: dp.AllocateRequest) -> dp.AllocateResponse:
        (one,) = request.container_requests
        self.calls.append(("allocate", tuple(one.devices_ids)))
        if self.refusal:
            raise GRPCError(Status.FAILED_PRECONDITION, self.refusal)
        return dp.AllocateResponse(container_responses=[self.answer])

    async def pre_start_container(self, request: dp.PreStartContainerRequest) -> dp.PreStartContainerResponse:
        self.calls.append(("pre-start", tuple(sorted(request.devices_ids))))
        if self.pre_start_failures:
            self.pre_start_failures -= 1
            raise GRPCError(Status.UNAVAILABLE, "not yet")
        return dp.PreStartContainerResponse()

    def count(self, kind: str) -> int:
        return sum(call == kind for call, _ in self.calls)


@dataclass
class Node:
    """One cluster with one node; `kubelet` may be stopped and started again over the same containers."""

    server: ApiServer
    client: KubeClient
    settings: KubeletSettings
    runtime: Runtime
    registry: ImageRegistry
    kubelet: Kubelet = field(init=False)
    _task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.kubelet = Kubelet(self.settings, self.client, self.runtime, self.registry)
        self._task = asyncio.create_task(self.kubelet.run())
        await asyncio.wait_for(self.kubelet.ready.wait(), HANG_S)

    async def crash(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def create(self, pod: dict[str, Any]) -> dict[str, Any]:
        """On this node at once, as if a scheduler had bound it."""
        spec = {**pod["spec"], "nodeName": self.settings.name}
        return await self.client.create(PODS.as_dict(), {**pod, "spec": spec}, "default")

    async def pod(self, name: str) -> dict[str, Any]:
        return await self.client.get(PODS.as_dict(), name, "default")

    async def node(self) -> dict[str, Any]:
        return await self.client.get(NODES.as_dict(), self.settings.name)

    async def wait_pod(
        self, name: str, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = HANG_S
    ) -> dict[str, Any]:
        """The pod once it is as wanted; on time-out the error shows how it is."""
        found: dict[str, Any] = await self._wait(lambda: self.pod(name), wanted, timeout_s)
        return found

    async def wait_node(
        self, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = HANG_S
    ) -> dict[str, Any]:
        found: dict[str, Any] = await self._wait(self.node, wanted, timeout_s)
        return found

    async def _wait(self, read: Any, wanted: Callable[[dict[str, Any]], bool], timeout_s: float) -> Any:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            now = await read()
            if wanted(now):
                return now
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"still {now.get('status')}")
            await asyncio.sleep(0.02)

    async def events(self, name: str) -> list[tuple[str, str]]:
        listing = await self.client.list(EVENTS.as_dict(), "default")
        return [
            (one["reason"], one["message"])
            for one in listing.items or ()
            if one["involvedObject"]["name"] == name
        ]

    async def wait_gone(self, name: str, timeout_s: float = HANG_S) -> None:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    await self.pod(name)
                except NotFoundError:
                    return
                await asyncio.sleep(0.02)

    async def log(self, name: str) -> str:
        """What `kubectl logs` shows, through the API server."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.server.url}/api/v1/namespaces/default/pods/{name}/log") as answer,
        ):
            return await answer.text()

    async def patch_capacity(self, capacity: dict[str, str]) -> None:
        await self.client.patch_status(NODES.as_dict(), self.settings.name, {"capacity": capacity})

    async def label(self, labels: dict[str, str]) -> None:
        await self.client.merge_patch(NODES.as_dict(), self.settings.name, {"metadata": {"labels": labels}})

    async def create_config_map(self, name: str, data: dict[str, str]) -> None:
        await self.client.create(CONFIG_MAPS, {"metadata": {"name": name}, "data": data}, "default")


@contextlib.asynccontextmanager
async def simulated_node(folder: Path, **settings: Any) -> AsyncIterator[Node]:
    defaults: dict[str, Any] = {"speed_up": 50.0, "node_status_s": 0.05}
    kubelet_settings = KubeletSettings("n1", folder / "kubelet", **(defaults | settings))
    async with (
        ApiServer(Cluster()) as server,
        HttpTransport(Connection(server.url)) as transport,
    ):
        registry = ImageRegistry(NATIVE)
        node = Node(server, KubeClient(transport), kubelet_settings, Runtime(), registry)
        await node.start()
        try:
            yield node
        finally:
            await node.crash()
            await node.runtime.close()


def make_pod(name: str, units: int = 0, **spec: Any) -> dict[str, Any]:
    """A pod with one shell container; `command` is what the shell runs."""
    command = spec.pop("command", "sleep 60")
    container: dict[str, Any] = {"name": "main", "image": "busybox", "command": ["sh", "-c", command]}
    if units:
        container["resources"] = {"limits": {MEM: str(units)}}
    container |= spec.pop("container", {})
    whole = {"containers": [container], "terminationGracePeriodSeconds": 1, **spec}
    return {"metadata": {"name": name, "namespace": "default"}, "spec": whole}


def state_of(pod: dict[str, Any], index: int = 0) -> str:
    """The word kubectl prints for a container: its reason, or running."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    if len(statuses) <= index:
        return ""
    ((kind, detail),) = statuses[index]["state"].items()
    return str(detail.get("reason", kind))


def restarts_of(pod: dict[str, Any]) -> int:
    """Of the first container; 0 while it has no status."""
    return sum(one["restartCount"] for one in pod.get("status", {}).get("containerStatuses", [])[:1])
