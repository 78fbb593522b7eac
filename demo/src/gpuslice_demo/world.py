"""The simulated cluster of one story: API server, controllers, scheduler, and a kubelet for each node.

They run in this process, on real sockets; the product's own processes run as pods on the nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import NODES, PODS
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.core.contract import ANN_INDEX
from gpuslice_demo.images import images
from gpuslice_demo.nodes import NodePlan
from gpuslice_demo.places import MARK, Places
from simcluster import gpu
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster
from simcluster.controllers.run import Controllers
from simcluster.kubelet import exclusive
from simcluster.kubelet.kubelet import Kubelet
from simcluster.kubelet.runtime import Runtime
from simcluster.kubelet.settings import KubeletSettings
from simcluster.network import ServiceProxy
from simcluster.scheduler.loop import Scheduler
from simcluster.workload.images import Image, ImageRegistry

T = TypeVar("T")

SPEED_UP = 40.0
NODE_STATUS_S = 0.25
FATAL_XID = 95  # uncontained ECC error
CONNECTIONS = 200  # each watch keeps one open


@dataclass(slots=True)
class SimulatedNode:
    """One machine."""

    plan: NodePlan
    settings: KubeletSettings
    runtime: Runtime = field(default_factory=Runtime)
    task: asyncio.Task[None] | None = None


class World:
    """``async with World(places, plans) as world``; leaving it ends all of its processes."""

    def __init__(self, places: Places, plans: Iterable[NodePlan]) -> None:
        self.places = places
        self.behind_s = 0.0
        """By how much the API server's clock is behind: what is created meanwhile is older later."""
        self._plans = tuple(plans)
        self._stack = contextlib.AsyncExitStack()
        self._nodes: dict[str, SimulatedNode] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None
        self._url = ""
        self._network = places.folder / "network"

    async def __aenter__(self) -> Self:
        try:
            self._failed = asyncio.get_running_loop().create_future()
            self._client = KubeClient(await self._enter(await self._api_server()))
            await self._start_controllers()
            self._run(ServiceProxy(self._client, self._network).run(), "service proxy")
            await self._start_scheduler()
            registry = ImageRegistry(self.places.driver, self._images())
            for number, plan in enumerate(self._plans):
                settings = self._settings(plan, self.places.folder / f"n{number}")
                if plan.exclusive:
                    exclusive.install(settings.manifests)
                node = SimulatedNode(plan, settings)
                self._nodes[plan.name] = node
                kubelet = Kubelet(settings, self._client, node.runtime, registry)
                node.task = self._run(kubelet.run(), f"kubelet of {plan.name}")
                await self._until(kubelet.ready)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Kubelets first, then their containers, then the API server."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(node.runtime.close() for node in self._nodes.values()))
        await self._stack.aclose()

    async def failed(self) -> None:
        """Never returns; raises whatever ended a part of the simulation."""
        assert self._failed is not None
        await self._failed

    # -- nodes -----------------------------------------------------------------------------------

    def node_environment(self, name: str) -> dict[str, str]:
        """For a command typed on the node itself, which sees every card."""
        driver = str(self.places.driver)
        environ = self.places.environment()
        state = self._nodes[name].settings.gpu_state
        return {
            **environ,
            "PATH": f"{driver}:{environ['PATH']}",
            "LD_LIBRARY_PATH": driver,
            "GPUSLICE_SIM_STATE": str(state or ""),
        }

    async def switch_off(self, name: str) -> None:
        """Remove the machine with everything on it, and its node object."""
        node = self._nodes.pop(name)
        if node.task is not None:
            self._tasks.discard(node.task)
            node.task.cancel()
            await asyncio.gather(node.task, return_exceptions=True)
        await node.runtime.close()
        await self._client.delete(NODES, name)

    @property
    def cards(self) -> int:
        return sum(len(plan.cards) for plan in self._plans)

    def break_card(self) -> None:
        """The last card of the last node reports an error after which NVIDIA says to reset it."""
        node = self._nodes[self._plans[-1].name]
        assert node.settings.gpu_state is not None
        with gpu.Machine(node.settings.gpu_state) as machine:
            machine.inject_xid(len(node.plan.cards) - 1, FATAL_XID)

    async def remember_idle(self, idle_s: Mapping[str, float]) -> None:
        """Leaves on the nodes what an exporter would have kept of containers that last computed so long ago.

        By NAMESPACE/NAME of their pods, which have one container and one card.
        """
        kept: dict[str, list[dict[str, Any]]] = {}
        for name, seconds in idle_s.items():
            namespace, _, pod_name = name.partition("/")
            pod = await self._client.get(PODS.as_dict(), pod_name, namespace)
            node = self._nodes.get(pod["spec"].get("nodeName", ""))
            if node is None or node.settings.gpu_state is None:
                continue  # it waits
            with gpu.Machine(node.settings.gpu_state) as machine:
                card = machine.cards()[int(pod["metadata"]["annotations"][ANN_INDEX])]
            last = {"pod_uid": pod["metadata"]["uid"], "last_s": int(time.time() - seconds), "peak_bytes": 0}
            key = (namespace, pod_name, pod["spec"]["containers"][0]["name"])
            kept.setdefault(node.plan.name, []).append({"uuid": card.uuid, "key": key, "active": last})
        for name, entries in kept.items():
            folder = self._nodes[name].settings.host_root / "var/lib/gpuslice/exporter"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "activity.json").write_text(json.dumps(entries))

    # -- start -----------------------------------------------------------------------------------

    async def _api_server(self) -> HttpTransport:
        """An API server with its kubeconfig. The end-to-end tests use a real one instead."""
        server = await self._enter(ApiServer(Cluster(lambda: time.time() - self.behind_s)))
        self.places.kubeconfig.write_text(server.kubeconfig())
        self._url = server.url
        return HttpTransport(Connection(server.url), connections=CONNECTIONS)

    async def _start_controllers(self) -> None:
        self._run(Controllers(self._client).run(), "controllers")

    def _images(self) -> dict[str, Image]:
        """Those that only this cluster's registry has."""
        return images(self.places)

    async def _start_scheduler(self) -> None:
        """The cluster's own: the chart brings another, which calls the extender."""
        scheduler = Scheduler(self._client)
        self._run(scheduler.run(), "scheduler")
        await self._until(scheduler.synced)

    async def _enter(self, context: contextlib.AbstractAsyncContextManager[T]) -> T:
        return await self._stack.enter_async_context(context)

    def _settings(self, plan: NodePlan, folder: Path) -> KubeletSettings:
        folder.mkdir(parents=True, exist_ok=True)
        state = gpu.create(folder / "gpus", plan.cards, seed=plan.name) if plan.cards else None
        return KubeletSettings(
            name=plan.name,
            root=folder / "kubelet",
            internal_ip=plan.address,
            labels=plan.labels,
            version=plan.version,
            pod_subnet=plan.subnet,
            driver=self.places.driver if plan.cards else None,
            gpu_state=state,
            speed_up=SPEED_UP,
            node_status_s=NODE_STATUS_S,
            environ={MARK: str(self.places.root), "SIMCLUSTER_NETWORK": str(self._network)},
            api_server=self._url,
        )

    async def _until(self, event: asyncio.Event) -> None:
        """Wait for the event, or raise what failed in the meantime."""
        assert self._failed is not None
        waiting = asyncio.create_task(event.wait())
        either: set[asyncio.Future[Any]] = {waiting, self._failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            waiting.cancel()
            self._failed.result()

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A part of the simulation that ends by itself has failed: nothing after that can be trusted."""
        if task.cancelled() or self._failed is None or self._failed.done():
            return
        error = task.exception() or RuntimeError(f"{task.get_name()} ended")
        self._failed.set_exception(error)
