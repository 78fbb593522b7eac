"""Controllers, a scheduler, kubelets and agents at work, and one kubelet that rejects what is sent to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.gpu.recorded import RecordedSource
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import DICT, EVENTS, NODES, PODS, Resource
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.apps.agent.main import Agent
from gpuslice.apps.agent.settings import AgentSettings
from gpuslice.core.contract import GPU_MEM, NODE_ORPHANS
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster
from simcluster.controllers.run import Controllers
from simcluster.kubelet.kubelet import Kubelet
from simcluster.kubelet.runtime import Runtime
from simcluster.kubelet.settings import KubeletSettings
from simcluster.kubelet.troubles import Rejection
from simcluster.scheduler.configuration import Configuration, ExtenderConfig
from simcluster.scheduler.loop import Scheduler
from simcluster.workload.images import ImageRegistry
from tests.integration.agent_bench import eventually
from tests.integration.extender_rig import PREFIX, running_extender
from tests.integration.sim_node import NATIVE

UNITS = 15
KINDS = {
    "ReplicaSet": Resource("apps/v1", "replicasets", "ReplicaSet", DICT),
    "StatefulSet": Resource("apps/v1", "statefulsets", "StatefulSet", DICT),
    "Job": Resource("batch/v1", "jobs", "Job", DICT),
}


@dataclass
class Machine:
    kubelet: Kubelet
    runtime: Runtime
    agent: Agent


@dataclass
class Site:
    """`machines` by name. Each has one card of 15 units."""

    client: KubeClient
    machines: dict[str, Machine] = field(default_factory=dict)

    async def pods(self) -> list[dict[str, Any]]:
        return (await self.client.list(PODS.as_dict(), "default")).items or []

    async def failed_on(self, name: str) -> int:
        return sum(
            pod["status"].get("phase") == "Failed" and pod["spec"].get("nodeName") == name
            for pod in await self.pods()
        )

    async def running(self, count: int = 1) -> list[str]:
        """The nodes on which so many pods run, once they do."""

        async def found() -> list[str]:
            pods = await self.pods()
            names = [pod["spec"]["nodeName"] for pod in pods if pod["status"].get("phase") == "Running"]
            return names if len(names) == count else []

        result: list[str] = await eventually(found, f"{count} pods run")
        return result

    async def node(self, name: str) -> dict[str, Any]:
        return await self.client.get(NODES.as_dict(), name)

    async def create(self, kind: str, replicas: int = 1, units: int = UNITS) -> None:
        await self.client.create(KINDS[kind], controller(kind, replicas, units), "default")


def pod_spec(units: int = UNITS, **more: Any) -> dict[str, Any]:
    limits = {"limits": {GPU_MEM: str(units)}}
    container = {"name": "main", "image": "busybox", "command": ["sleep", "9999"], "resources": limits}
    return {"containers": [container], **more}


def controller(kind: str, replicas: int, units: int) -> dict[str, Any]:
    labels = {"app": "any"}
    template = {"metadata": {"labels": labels}, "spec": pod_spec(units)}
    spec: dict[str, Any] = {"template": template}
    if kind == "Job":
        template["spec"]["restartPolicy"] = "Never"
        spec |= {"backoffLimit": 6, "parallelism": replicas, "completions": replicas}
    else:
        spec |= {"replicas": replicas, "selector": {"matchLabels": labels}}
    if kind == "StatefulSet":
        spec["serviceName"] = "any"
    return {"metadata": {"name": "any"}, "spec": spec}


@contextlib.asynccontextmanager
async def site(folder: Path, *names: str) -> AsyncIterator[Site]:
    async with contextlib.AsyncExitStack() as stack:
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="site-")))
        server = await stack.enter_async_context(ApiServer(Cluster()))
        client = KubeClient(
            await stack.enter_async_context(HttpTransport(Connection(server.url), connections=100))
        )
        made = Site(client)
        tasks: list[asyncio.Task[None]] = []

        async def end() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(each.runtime.close() for each in made.machines.values()))

        stack.push_async_callback(end)
        tasks.append(asyncio.create_task(Controllers(client).run()))
        for name in names:
            settings = KubeletSettings(name, sockets / name / "kubelet", speed_up=50.0, node_status_s=0.1)
            runtime = Runtime()
            kubelet = Kubelet(settings, client, runtime, ImageRegistry(NATIVE))
            tasks.append(asyncio.create_task(kubelet.run()))
            await kubelet.ready.wait()
            agent = agent_of(folder / name, settings, client)
            tasks.append(asyncio.create_task(agent.run(asyncio.Event().wait())))
            await eventually(lambda agent=agent: agent.server.registered)  # type: ignore[misc]
            made.machines[name] = Machine(kubelet, runtime, agent)
        extender, url = await stack.enter_async_context(running_extender(server.url, policy="binpack"))
        await eventually(lambda: not extender.not_ready())
        await eventually(lambda: sum(extender.ledger.flush().left.sum(axis=1)) == UNITS * len(names))
        config = ExtenderConfig(
            url + PREFIX, "filter", "prioritize", "bind",
            weight=100, node_cache_capable=True,
            managed=frozenset({GPU_MEM}), ignored_by_scheduler=frozenset({GPU_MEM}),
        )  # fmt: skip
        settings_of_scheduler = Configuration(extenders=(config,), initial_backoff_s=0.05, max_backoff_s=0.2)
        scheduler = Scheduler(client, settings_of_scheduler)
        tasks.append(asyncio.create_task(scheduler.run()))
        await scheduler.synced.wait()
        yield made


def agent_of(folder: Path, kubelet: KubeletSettings, client: KubeClient) -> Agent:
    folder.mkdir()
    (folder / "libgpuslice.so").write_bytes(b"the library")
    card = {"index": 0, "uuid": f"GPU-{kubelet.name}", "memory_mib": 16130, "model": "Tesla V100-SXM2-16GB"}
    (folder / "cards.json").write_text(json.dumps({"cards": [card], "driver_version": "418.87"}))
    settings = AgentSettings(
        node_name=kubelet.name,
        device_plugin_folder=str(kubelet.plugin_folder),
        pod_resources_socket=str(kubelet.pod_resources_socket),
        root=str(folder / "host"),
        library=str(folder / "libgpuslice.so"),
        port=0,
        host="127.0.0.1",
        unhealthy_file=str(folder / "none"),
        reconcile_s=0.2,
        match_wait_s=0.3,
        watchdog="off",
    )
    source = RecordedSource(folder / "cards.json", poll_s=0.05)
    return Agent(settings, client, source, boot="this", proc=folder / "proc")


def under_pressure(kubelet: Kubelet) -> None:
    """Before anybody has heard of it: kubelet reports its conditions every ten seconds."""
    kubelet.troubles.handler = Rejection("Evicted", "The node had condition: [DiskPressure]. ")


def in_shutdown(kubelet: Kubelet) -> None:
    kubelet.troubles.handler = Rejection("NodeShutdown", "Pod was rejected as the node is shutting down.")


def foreign_plugin(kubelet: Kubelet) -> None:
    words = "Allocate failed due to rpc error: code = Unknown desc = odd, which is unexpected"
    kubelet.troubles.handler = Rejection("UnexpectedAdmissionError", words)


def topology(kubelet: Kubelet) -> None:
    words = "Resources cannot be allocated with Topology locality"
    kubelet.troubles.handler = Rejection("TopologyAffinityError", words)


def unheard_of(kubelet: Kubelet) -> None:
    kubelet.troubles.handler = Rejection("SomethingNew", "an admit handler that nobody knows")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trouble", [under_pressure, in_shutdown, foreign_plugin, topology, unheard_of])
async def test_one_failed_pod_tells_the_controllers_next_one_to_go_elsewhere(
    tmp_path: Path, kind: str, trouble: Callable[[Kubelet], None]
) -> None:
    async with site(tmp_path, "n1", "n2") as there:
        trouble(there.machines["n1"].kubelet)  # the first choice of two equal nodes
        await there.create(kind)
        assert await there.running() == ["n2"]
        assert await there.failed_on("n1") == (kind != "StatefulSet")  # which deletes it
        if kind == "Job":
            job = await there.client.get(KINDS["Job"], "any", "default")
            assert not job["status"].get("conditions")


async def test_a_daemon_sets_pod_waits_for_its_node(tmp_path: Path) -> None:
    """Its controller deletes what has failed and makes another at once, for the same node."""
    async with site(tmp_path, "n1", "n2") as there:
        unheard_of(there.machines["n1"].kubelet)
        labels = {"app": "each"}
        spec = {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod_spec()},
        }
        kind = Resource("apps/v1", "daemonsets", "DaemonSet", DICT)
        await there.client.create(kind, {"metadata": {"name": "each"}, "spec": spec}, "default")
        assert await there.running() == ["n2"]

        async def told() -> bool:
            events = (await there.client.list(EVENTS.as_dict(), "default")).items or []
            return any("is in back-off until" in each["message"] for each in events)

        await eventually(told)
        rejected = await there.client.list(EVENTS.as_dict(), "default")
        count = sum(each["reason"] == "SomethingNew" for each in rejected.items or ())
        assert 1 <= count <= 2


async def test_a_container_that_cannot_be_killed_costs_nobody_a_pod_once_it_is_reported(
    tmp_path: Path,
) -> None:
    async with site(tmp_path, "n1", "n2") as there:
        metadata = {"name": "stuck"}
        await there.client.create(PODS.as_dict(), {"metadata": metadata, "spec": pod_spec()}, "default")
        (sick,) = await there.running()
        other = "n2" if sick == "n1" else "n1"
        (container,) = there.machines[sick].runtime.running()
        container.stuck = True
        await there.client.delete(PODS, "stuck", "default", grace_s=0)

        async def reported() -> bool:
            return NODE_ORPHANS in (await there.node(sick))["metadata"]["annotations"]

        await eventually(reported)
        await there.create("ReplicaSet")
        assert await there.running() == [other]
        assert not await there.failed_on(sick)
        container.stuck = False  # the driver answers again
        await there.client.merge_patch(KINDS["ReplicaSet"], "any", {"spec": {"replicas": 2}}, "default")
        assert Counter(await there.running(2)) == Counter((sick, other))


async def test_of_a_container_that_is_not_reported_one_pod_tells(tmp_path: Path) -> None:
    async with site(tmp_path, "n1", "n2") as there:
        metadata = {"name": "stuck"}
        await there.client.create(PODS.as_dict(), {"metadata": metadata, "spec": pod_spec()}, "default")
        (sick,) = await there.running()
        (container,) = there.machines[sick].runtime.running()
        container.stuck = True
        await there.client.delete(PODS, "stuck", "default", grace_s=0)
        await there.create("ReplicaSet")
        assert await there.running() == ["n2" if sick == "n1" else "n1"]
        assert await there.failed_on(sick) <= 1


async def test_where_no_other_node_has_room_the_pod_waits_and_starts_when_the_trouble_ends(
    tmp_path: Path,
) -> None:
    async with site(tmp_path, "n1") as there:
        troubles = there.machines["n1"].kubelet.troubles
        foreign_plugin(there.machines["n1"].kubelet)
        await there.create("ReplicaSet")
        await eventually(lambda: there.failed_on("n1"))
        troubles.handler = None
        troubles.pressure.add("PIDPressure")  # and its end: a report of kubelet's

        async def pressed() -> bool:
            conditions = (await there.node("n1"))["status"]["conditions"]
            return any((each["type"], each["status"]) == ("PIDPressure", "True") for each in conditions)

        await eventually(pressed)
        troubles.pressure.clear()
        assert await there.running() == ["n1"]
        assert await there.failed_on("n1") <= 2
