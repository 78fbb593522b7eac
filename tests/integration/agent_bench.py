"""A node for the agent's tests: its agent, over real sockets, between a simulated API server and a kubelet.

The kubelet is the simulated device manager without pod workers: a test says when a pod is admitted and when a
container starts, so that every order can be played.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gpuslice.adapters.gpu.memory_limits import MemoryLimiter
from gpuslice.adapters.gpu.recorded import RecordedSource
from gpuslice.adapters.gpu.source import GpuSource
from gpuslice.adapters.kube import objects, views
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import CONFIG_MAPS, NODES, PODS
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.apps.agent.main import Agent
from gpuslice.apps.agent.settings import AgentSettings
from gpuslice.core.annotations import placement_annotations
from gpuslice.core.contract import GPU_MEM, NAME_SETS
from gpuslice.core.model import Card, CardSlice, Node, Placement
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster
from simcluster.kubelet import checkpoint
from simcluster.kubelet.admission import demands_of
from simcluster.kubelet.devices import DeviceAssignment, DeviceAssignments
from simcluster.kubelet.plugins import PluginEndpoints
from simcluster.kubelet.podresources import PodResources
from simcluster.kubelet.topology import TopologyManager
from tests import HANG_S
from tests.builders import api_container, api_pod

NODE = "n1"
Pod = dict[str, Any]


async def eventually(
    met: Callable[[], Any | Awaitable[Any]], what: str = "", timeout_s: float = HANG_S
) -> Any:
    """Wait until `met` answers something true, and answer that."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        answer = met()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return answer
        assert asyncio.get_running_loop().time() < deadline, f"not within {timeout_s} s: {what or met}"
        await asyncio.sleep(0.02)


class NodeKubelet:
    """kubelet's device manager with its three sockets. `stop` is a crash; `start` reads the checkpoint."""

    def __init__(self, folder: Path, seed: int = 1, resource: str = GPU_MEM) -> None:
        self.resource = resource
        self.plugin_folder = folder / "device-plugins"
        self.pod_resources = folder / "pod-resources" / "kubelet.sock"
        self.pods: dict[str, Pod] = {}
        self._rng = random.Random(seed)
        self.topology = TopologyManager()
        self.device_manager = DeviceAssignments(self._rng)

    async def start(self) -> None:
        self.plugin_folder.mkdir(parents=True, exist_ok=True)
        checkpoint.remove_sockets(self.plugin_folder)
        self.device_manager = DeviceAssignments(self._rng, self.topology)
        saved = checkpoint.read(self.plugin_folder)
        if saved is not None:
            self.device_manager.restore(saved.assignments, saved.registered, 0.0)
        self._endpoints = PluginEndpoints(self.plugin_folder, self.device_manager, lambda: None)
        self._resources = PodResources(
            self.pod_resources, self.device_manager, lambda: list(self.pods.values())
        )
        await self._resources.start()
        await self._endpoints.start()

    async def stop(self) -> None:
        await self._endpoints.stop()
        await self._resources.stop()

    async def restart(self, *, lose_checkpoint: bool = False) -> None:
        await self.stop()
        if lose_checkpoint:
            (self.plugin_folder / checkpoint.FILE_NAME).unlink(missing_ok=True)
        await self.start()

    async def close_pod_resources(self) -> None:
        await self._resources.stop()
        self.pod_resources.unlink(missing_ok=True)

    async def open_pod_resources(self) -> None:
        await self._resources.start()

    def healthy(self) -> int:
        return len(self.device_manager.healthy(self.resource))

    async def admit(self, pod: Pod) -> dict[str, dp.ContainerAllocateResponse]:
        """What each container was answered. Raises AdmissionError; the pod is then no longer active."""
        uid = pod["metadata"]["uid"]
        self.pods[uid] = pod
        try:
            demands = demands_of(pod)
            self.device_manager.align_pod(uid, demands, set(self.pods))
            for demand in demands:
                await self._endpoints.answer(self.device_manager.allocate(uid, demand, set(self.pods)))
        except BaseException:
            self.pods.pop(uid)
            raise
        raw = checkpoint.encode(self.device_manager.assignments(), self.device_manager.registered())
        checkpoint.write(self.plugin_folder, raw)
        return {
            one.container: _response(one.response)
            for one in self.device_manager.assignments()
            if one.pod_uid == uid
        }

    async def start_container(self, pod: Pod, container: str = "main") -> None:
        """PreStartContainer, as before every start and restart."""
        await self._endpoints.pre_start(self.resource, sorted(self.ids(pod, container)))

    def hold(self, pod: Pod, ids: frozenset[str], answer: dp.ContainerAllocateResponse) -> None:
        """As if it had chosen just these ids and Allocate had answered so."""
        uid = pod["metadata"]["uid"]
        self.pods[uid] = pod
        held = DeviceAssignment(uid, "main", GPU_MEM, ids, answer.SerializeToString())
        self.device_manager._assignments[uid, "main", GPU_MEM] = held

    def ids(self, pod: Pod, container: str = "main") -> frozenset[str]:
        (assignment,) = self.device_manager.assignments_of(pod["metadata"]["uid"], container)
        return assignment.ids

    def cards(self, pod: Pod, container: str = "main") -> set[str]:
        return {identifier.rpartition("-_-")[0] for identifier in self.ids(pod, container)}

    def remove(self, pod: Pod) -> None:
        self.pods.pop(pod["metadata"]["uid"], None)
        self.device_manager.forget_except(self.pods)


def _response(raw: bytes) -> dp.ContainerAllocateResponse:
    return dp.ContainerAllocateResponse.FromString(raw)


@dataclass
class Bench:
    """One node. `cards`: memory in MiB by minor number."""

    folder: Path
    cards: Mapping[int, int] = field(default_factory=lambda: {0: 16130})
    labels: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: GpuSource | None = None
    seed: int = 1
    ready: bool = True  # wait until kubelet follows the device list
    boot: str = "this"  # what tells one run of the machine from the next
    cluster: Cluster = field(default_factory=Cluster)
    driver_version: str = "418.87"
    limiter: MemoryLimiter | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # of each request of the agent

    def __post_init__(self) -> None:
        self.recording = self.folder / "cards.json"
        # Sockets have paths of at most 107 bytes, and pytest's own folders are deep.
        self._sockets = tempfile.TemporaryDirectory(prefix="kubelet-")
        self.kubelet = NodeKubelet(
            Path(self._sockets.name),
            self.seed,
            NAME_SETS[self.settings.get("resource_names", "aliyun.com")].memory,
        )
        self.record(self.cards)
        self._agent_task: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self.port = 0

    def record(self, cards: Mapping[int, int], *, divided: Collection[int] = (), **more: Any) -> None:
        """What the driver tells from now on. `divided`: the indices of cards in MIG mode."""
        model = "Tesla V100-SXM2-16GB"
        entries = [
            {"index": index, "uuid": uuid(index), "memory_mib": memory_mib, "model": model}
            | ({"divided": True} if index in divided else {})
            for index, memory_mib in cards.items()
        ]
        self.recording.write_text(
            json.dumps({"cards": entries, "driver_version": self.driver_version, **more})
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Bench]:
        async with contextlib.AsyncExitStack() as stack:
            self.server = await stack.enter_async_context(ApiServer(self.cluster))
            connection = Connection(server=self.server.url)
            transport = await stack.enter_async_context(HttpTransport(connection, timeout_s=5))
            self.client = KubeClient(transport)
            connection = Connection(server=self.server.url, headers=self.headers)
            transport = await stack.enter_async_context(HttpTransport(connection, timeout_s=5))
            self.agents_client = KubeClient(transport)
            await self._create_node()
            await self.kubelet.start()
            stack.callback(self._sockets.cleanup)
            stack.push_async_callback(self.kubelet.stop)
            stack.push_async_callback(self.stop_agent)
            await self.start_agent()
            yield self

    async def _create_node(self) -> None:
        await self.client.create(NODES.as_dict(), {"metadata": {"name": NODE, "labels": dict(self.labels)}})

    # -- the agent ------------------------------------------------------------------------------------

    def agent_settings(self) -> AgentSettings:
        library = self.folder / "libgpuslice.so"
        library.write_bytes(b"the library")
        own: dict[str, Any] = {
            "node_name": NODE,
            "device_plugin_folder": str(self.kubelet.plugin_folder),
            "pod_resources_socket": str(self.kubelet.pod_resources),
            "root": str(self.folder / "host"),
            "library": str(library),
            "port": 0,
            "host": "127.0.0.1",
            "unhealthy_file": str(self.folder / "unhealthyDevices.json"),
            "reconcile_s": 0.2,
            "inventory_s": 0.1,
            "match_wait_s": 0.3,
        }
        return AgentSettings(**{**own, **self.settings})

    async def start_agent(self) -> None:
        source = self.source or RecordedSource(self.recording, poll_s=0.05)
        self.agent = Agent(
            self.agent_settings(),
            self.agents_client,
            source,
            limiter=self.limiter,
            boot=self.boot,
            proc=self.folder / "proc",
        )
        self._stopped = asyncio.Event()
        self._agent_task = asyncio.create_task(self.agent.run(self._stopped.wait(), self._listening))
        if self.ready:
            await eventually(self.registered, "registered with kubelet")

    def registered(self) -> bool:
        assert self._agent_task is not None
        if self._agent_task.done():
            self._agent_task.result()
        return self.agent.server.registered and self.kubelet.healthy() > 0

    def _listening(self, port: int) -> None:
        self.port = port

    async def stop_agent(self) -> None:
        """SIGTERM."""
        self._stopped.set()
        if self._agent_task is not None:
            await self._agent_task
        self._agent_task = None

    async def restart_agent(self) -> None:
        await self.kill_agent()
        await self.start_agent()

    async def kill_agent(self) -> None:
        """As when the process dies: nothing is said, sockets are left lying about."""
        assert self._agent_task is not None
        self._agent_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._agent_task
        self._agent_task = None

    # -- pods -----------------------------------------------------------------------------------------

    def node(self) -> Node:
        cards = tuple(Card(index, uuid(index), mib, mib // 1024) for index, mib in self.cards.items())
        return Node(NODE, cards)

    async def place(
        self,
        name: str,
        memory: int = 4,
        *cards: int,
        containers: list[Pod] | None = None,
        assume_ns: int = 1,
        known: bool = True,
        **fields: Any,
    ) -> Pod:
        """A pod as the extender and kube-scheduler leave it; without `cards` one that nobody placed.

        `known`: wait until the agent has heard of it, as is usual when kubelet has.
        """
        pod = api_pod(name, str(memory), node=NODE, containers=containers, **fields)
        del pod["metadata"]["uid"]
        if cards:
            pod["metadata"]["annotations"] = self._annotations(pod, cards, assume_ns)
        created = await self.client.create(PODS.as_dict(), pod)
        if known:
            await eventually(lambda: self._knows(created), f"agent knows {name}")
        return created

    def _annotations(self, pod: Pod, cards: tuple[int, ...], assume_ns: int) -> dict[str, str]:
        decoded = msgspec.convert(pod, objects.Pod)
        request = views.pod_view(decoded).request
        assert request is not None
        shares = tuple(
            CardSlice(card, request.units // len(cards), request.compute_percent) for card in cards
        )
        return placement_annotations(Placement(NODE, shares), request, self.node(), assume_ns)

    def _knows(self, pod: Pod) -> bool:
        return self.agent.state.living(pod["metadata"]["uid"]) is not None

    async def annotations(self, name: str) -> dict[str, str]:
        found = await self.client.get(PODS, name, "default")
        return found.metadata.annotations or {}

    async def annotated(self, name: str, **expected: str) -> dict[str, str]:
        """Wait until the pod's annotations say so; keys without the vendor's prefix."""
        wanted = {f"ALIYUN_COM_GPU_MEM_{key}": value for key, value in expected.items()}

        async def says() -> dict[str, str] | None:
            found = await self.annotations(name)
            return found if wanted.items() <= found.items() else None

        result: dict[str, str] = await eventually(says, f"{name} annotated {wanted}")
        return result

    async def node_object(self) -> dict[str, Any]:
        return await self.client.get(NODES.as_dict(), NODE)

    async def unhealthy(self, key: str = "gpus") -> str | None:
        found = await self.client.list(CONFIG_MAPS, "kube-system")
        return next((str((one.data or {}).get(key)) for one in found.items or ()), None)


def uuid(index: int) -> str:
    return f"GPU-{index:08d}-1111-2222-3333-444455556666"


def container(memory: int | str, name: str = "main", **limits: Any) -> Pod:
    return api_container(str(memory), name, **limits)


__all__ = ["NODE", "Bench", "NodeKubelet", "container", "eventually", "uuid"]
