"""A cluster with pods of every fate, exporters that tell what they use, and a console in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.resources import CONFIG_MAPS, NAMESPACES, NODES, PODS, QUOTAS
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.web.app import Router, get
from gpuslice.adapters.web.messages import text_answer
from gpuslice.adapters.web.serve import Listen, serving
from gpuslice.apps.console.main import Console
from gpuslice.apps.console.settings import ConsoleSettings
from gpuslice.core.annotations import encode_cards
from gpuslice.core.contract import GPU_MEM, NODE_GPUS, SYSTEM_NAMESPACE
from gpuslice.core.model import Card
from gpuslice.core.units import limit_bytes
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster
from tests.builders import api_node, api_pod

V100, A10 = ("Tesla V100-SXM2-16GB", 16130, 15), ("NVIDIA A10", 23028, 22)
AGE_S = 1260.0
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>'


@dataclass(frozen=True)
class Holder:
    """A pod on a card, with what it uses of its limit, now and at its peak (0…1)."""

    name: str
    namespace: str
    node: str
    card: int
    units: int
    used: float = 0.6
    peak: float = 0.7
    sm: float = 0.3
    refused: int = 0


HOLDERS = (
    Holder("serve-7c9d-x2kq", "nlp", "gpu-a1", 0, 8, 0.84, 0.92, 0.61),
    Holder("serve-7c9d-l81p", "nlp", "gpu-a1", 0, 6, 0.79, 0.9, 0.55),
    Holder("embed-0", "nlp", "gpu-a1", 1, 4, 0.31, 0.4, 0.12),
    Holder("detector-59f-2n8xz", "vision", "gpu-a1", 1, 6, 0.7, 0.85, 0.44),
    Holder("detector-59f-9q4rs", "vision", "gpu-a1", 2, 12, 0.66, 0.8, 0.38),
    Holder("asr-train-0", "speech", "gpu-a2", 0, 15, 0.95, 0.99, 0.97),
    Holder("asr-train-1", "speech", "gpu-a2", 1, 15, 0.94, 0.99, 0.96),
    Holder("notebook-anna", "notebooks", "gpu-a2", 2, 7, 0.04, 0.12, 0.0),
    Holder("notebook-wei", "notebooks", "gpu-a2", 2, 7, 0.02, 0.08, 0.0),
    Holder("notebook-omar", "notebooks", "gpu-a2", 3, 10, 0.18, 0.22, 0.0),
    Holder("segment-6b4-aa1", "vision", "gpu-a3", 0, 5, 0.5, 0.62, 0.2),
    Holder("over-its-limit", "vision", "gpu-a3", 0, 4, 0.74, 1.0, 0.1, refused=14),
    Holder("rank-0", "search", "gpu-a3", 1, 9, 0.73, 0.8, 0.5),
    Holder("sweep-17", "research", "gpu-b1", 0, 11, 0.35, 0.41, 0.9),
    Holder("sweep-18", "research", "gpu-b1", 0, 11, 0.36, 0.4, 0.92),
    Holder("sweep-19", "research", "gpu-b1", 1, 11, 0.33, 0.39, 0.88),
    Holder("llm-serve-0", "nlp", "gpu-b1", 2, 22, 0.9, 0.96, 0.7),
    Holder("notebook-lena", "notebooks", "gpu-b1", 3, 3, 0.3, 0.5, 0.02),
)
_UIDS = {holder.name: f"uid-{holder.name}" for holder in HOLDERS}


def sample_nodes() -> list[dict[str, Any]]:
    return [
        *(node(f"gpu-a{number}", 4, V100) for number in (1, 2, 3)),
        node("gpu-b1", 4, A10),
        node("gpu-b2", 4, A10, unschedulable=True),
        api_node("cpu-1", 0, 0),
    ]


def node(name: str, cards: int, kind: tuple[str, int, int], **spec: Any) -> dict[str, Any]:
    model, memory_mib, units = kind
    described = tuple(Card(index, f"GPU-{name}-{index}", memory_mib, units, model) for index in range(cards))
    made = api_node(
        name, units * cards, cards, annotations={NODE_GPUS: encode_cards(described)}, labels={"cgpu": "true"}
    )
    made["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    made["spec"] |= spec
    return made


def held(holder: Holder, at: datetime) -> dict[str, Any]:
    where = {
        "ALIYUN_COM_GPU_MEM_IDX": str(holder.card),
        "ALIYUN_COM_GPU_MEM_POD": str(holder.units),
        "ALIYUN_COM_GPU_MEM_ASSIGNED": "true",
        "ALIYUN_COM_GPU_MEM_ASSUME_TIME": str(int(at.timestamp() * 1e9)),
    }
    pod = api_pod(
        holder.name,
        str(holder.units),
        namespace=holder.namespace,
        node=holder.node,
        annotations=where,
        phase="Running",
    )
    stamp, admitted, started = (
        (at + timedelta(seconds=later)).strftime("%Y-%m-%dT%H:%M:%SZ") for later in (0, 1, 5)
    )
    state: dict[str, Any] = {"running": {"startedAt": started}}
    status: dict[str, Any] = {"name": "main", "ready": True, "restartCount": 0, "state": state}
    if holder.refused:
        ended = {"exitCode": 1, "reason": "Error", "startedAt": started, "finishedAt": started}
        status |= {"ready": False, "restartCount": 14, "lastState": {"terminated": ended}}
        status["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp}
    pod["status"] |= {"containerStatuses": [status], "conditions": [scheduled]}
    pod["status"]["startTime"] = admitted
    return pod


def sample_pods(now: datetime) -> list[dict[str, Any]]:
    pods = [held(holder, now + timedelta(seconds=1)) for holder in HOLDERS]
    pods += [api_pod(f"train-{number}", "20", namespace="research") for number in range(9)]
    pods.append(api_pod("train-huge", "40", namespace="speech"))
    pods.append(api_pod("misspelt", None, namespace="search", containers=[_asks("aliyun.com/gpu-mm")]))
    pods.append(api_pod("for-team-b", "4", namespace="vision", nodeSelector={"team": "b"}))
    return pods


def _asks(name: str) -> dict[str, Any]:
    return {"name": "main", "image": "app", "resources": {"limits": {name: "4"}, "requests": {name: "4"}}}


def exporter_page(name: str, kind: tuple[str, int, int], holders: Sequence[Holder], cards: int = 4) -> str:
    """What the exporter of a node says, in the families that are read back."""
    model, memory_mib, units = kind
    lines = []
    for card in range(cards):
        labels = f'node="{name}",gpu="{card}",gpu_uuid="GPU-{name}-{card}"'
        on = [holder for holder in holders if (holder.node, holder.card) == (name, card)]
        used = sum(limit_bytes(memory_mib, each.units, units) * each.used for each in on)
        lines.append(f'gpuslice_gpu_info{{{labels},model="{model}"}} 1')
        lines.append(f"gpuslice_gpu_up{{{labels}}} 1")
        lines.append(f"gpuslice_gpu_memory_used_bytes{{{labels}}} {used:.0f}")
        lines.append(f"gpuslice_gpu_memory_total_bytes{{{labels}}} {memory_mib << 20}")
        lines.append(f"gpuslice_gpu_utilization_ratio{{{labels}}} {min(1, sum(each.sm for each in on)):.2f}")
        for each in on:
            whose = f'{labels},namespace="{each.namespace}",pod="{each.name}",container="main"'
            limit = limit_bytes(memory_mib, each.units, units)
            lines.append(f"gpuslice_container_info{{{whose}}} 1")
            for metric, value in (
                ("memory_used_bytes", limit * each.used),
                ("memory_limit_bytes", limit),
                ("memory_allocated_bytes", limit),
                ("sm_seconds_total", each.sm * 100),
                ("memory_peak_bytes", limit * each.peak),
                ("sm_utilization_ratio", each.sm),
                ("memory_refused_total", each.refused),
            ):
                lines.append(f"gpuslice_container_{metric}{{{whose}}} {value:g}")
    return "\n".join(lines) + "\n"


@contextlib.asynccontextmanager
async def exporters(pages: dict[str, str]) -> AsyncIterator[list[dict[str, Any]]]:
    """Servers of these pages by node; yields the pods that they are to be found by."""
    async with contextlib.AsyncExitStack() as stack:
        pods = []
        for name, page in pages.items():
            app = Router([get("/metrics", lambda _, page=page: text_answer(page))])  # type: ignore[misc]
            port = await stack.enter_async_context(serving(app, Listen(0, "127.0.0.1", drain_s=0.1)))
            pod = api_pod(
                f"gpuslice-exporter-{zlib.crc32(name.encode()):x}",
                None,
                namespace=SYSTEM_NAMESPACE,
                node=name,
                labels={"component": "gpuslice-exporter"},
                annotations={"prometheus.io/port": str(port)},
                phase="Running",
            )
            pod["status"]["podIP"] = "127.0.0.1"
            pods.append(pod)
        yield pods


async def put(client: KubeClient, nodes: Sequence[dict[str, Any]], pods: Sequence[dict[str, Any]]) -> None:
    """Create them with the status that they are described with."""
    for each in nodes:
        await client.create(NODES, each)
        await client.patch_status(NODES, each["metadata"]["name"], each["status"])
    there = {each["metadata"]["name"] for each in (await client.list(NAMESPACES)).items or ()}
    for namespace in sorted({each["metadata"]["namespace"] for each in pods} - there):
        await client.create(NAMESPACES, {"metadata": {"name": namespace}})
    for each in pods:
        name, namespace = each["metadata"]["name"], each["metadata"]["namespace"]
        await client.create(PODS, each)
        await client.patch_status(PODS, name, each["status"], namespace)


async def take_out_of_use(client: KubeClient, name: str, card: int, reason: str) -> None:
    data = {"gpus": str(card), "agent": str(card), "reasons": reason}
    metadata = {"name": f"unhealthy-gpu-{name}", "namespace": SYSTEM_NAMESPACE}
    await client.create(CONFIG_MAPS, {"metadata": metadata, "data": data})


async def limit_namespace(client: KubeClient, namespace: str, units: int) -> None:
    metadata, name = {"name": "gpus", "namespace": namespace}, f"requests.{GPU_MEM}"
    await client.create(QUOTAS, {"metadata": metadata, "spec": {"hard": {name: str(units)}}})
    status = {"hard": {name: str(units)}, "used": {name: str(units - 3)}}
    await client.patch_status(QUOTAS, "gpus", status, namespace)


class RecordingTransport(HttpTransport):
    """Remembers what was asked, watches aside."""

    def __init__(self, connection: Connection, *, connections: int) -> None:
        super().__init__(connection, connections=connections)
        self.asked: list[str] = []

    async def request(self, request: ApiRequest) -> ApiResponse:
        self.asked.append(str(request))
        return await super().request(request)


@dataclass
class Rig:
    """A running console: its address, the process's parts, the cluster behind it, and a client of that.

    `asked`: what it asked the API server, watches aside.
    """

    url: str
    console: Console
    server: ApiServer
    client: KubeClient
    asked: list[str]


@contextlib.asynccontextmanager
async def console(
    nodes: Sequence[dict[str, Any]] = (),
    pods: Sequence[dict[str, Any]] = (),
    *,
    cluster: Cluster | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """A console of a cluster with `nodes` and `pods`."""
    chosen = ConsoleSettings(
        **{"host": "127.0.0.1", "exporters": "direct", "cluster_name": "sample", **settings}
    )
    async with ApiServer(cluster or Cluster()) as server, HttpTransport(Connection(server.url)) as transport:
        client = KubeClient(transport)
        await put(client, nodes, pods)
        own = RecordingTransport(Connection(server.url), connections=40)
        async with own:
            made, stopped = Console(chosen, own), asyncio.Event()
            url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(made.run(_set(stopped), url.set_result))
            try:
                yield Rig(await url, made, server, client, own.asked)
            finally:
                stopped.set()
                await task


async def _set(event: asyncio.Event) -> None:
    await event.wait()


@contextlib.asynccontextmanager
async def sample(**settings: Any) -> AsyncIterator[Rig]:
    """The cluster of the pictures: all its pods were created some time ago."""
    behind_s = AGE_S
    kinds = {
        each["metadata"]["name"]: V100 if "-a" in each["metadata"]["name"] else A10 for each in sample_nodes()
    }
    pages = {name: exporter_page(name, kind, HOLDERS) for name, kind in kinds.items() if name != "cpu-1"}
    async with exporters(pages) as found:
        pods = [*sample_pods(datetime.now(UTC) - timedelta(seconds=AGE_S)), *found]
        cluster = Cluster(lambda: time.time() - behind_s)
        async with console(sample_nodes(), pods, cluster=cluster, **settings) as rig:
            behind_s = 0.0
            reason = "card 3: XID 79, the GPU has fallen off the bus"
            await take_out_of_use(rig.client, "gpu-a3", 3, reason)
            await limit_namespace(rig.client, "research", 60)
            yield rig
