"""What runs on every node asks for its node's objects from the API server's cache, never from etcd.

From etcd each of 5,000 agents would read all pods of the cluster.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.apps.agent.settings import SwitchSettings
from gpuslice.apps.agent.switch import Switch
from gpuslice.apps.exporter.collectors import CollectorHealth
from gpuslice.apps.exporter.node_pods import NodePods, follow_api
from tests.integration.agent_bench import NODE, Bench, eventually


class Recorded(HttpTransport):
    """Keeps the resourceVersion of each list of a node's objects; "" is the newest, from etcd."""

    def __init__(self, url: str) -> None:
        super().__init__(Connection(server=url), timeout_s=5)
        self.lists: list[str] = []

    async def __aenter__(self) -> Recorded:
        await super().__aenter__()
        return self

    async def request(self, request: ApiRequest) -> ApiResponse:
        if "spec.nodeName=" in request.query.get("fieldSelector", ""):
            self.lists.append(request.query.get("resourceVersion", ""))
        return await super().request(request)


async def test_an_agent_an_exporter_and_a_switch_list_from_the_cache(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        await node.stop_agent()
        async with Recorded(node.server.url) as agents:
            node.agents_client = KubeClient(agents)
            await node.start_agent()
            await node.stop_agent()
        assert set(agents.lists) == {"0"}

        async with Recorded(node.server.url) as exporters:
            pods = NodePods()
            following = asyncio.create_task(follow_api(KubeClient(exporters), NODE, pods, CollectorHealth()))
            await eventually(lambda: pods.known, "the first list")
            following.cancel()
        assert exporters.lists == ["0"]

        async with Recorded(node.server.url) as switches:
            manifest, stopped = str(tmp_path / "nvidia-device-plugin.yml"), asyncio.Event()
            settings = SwitchSettings(
                to="exclusive",
                node_name=NODE,
                manifest=manifest,
                backup_folder=str(tmp_path / "backup"),
                every_s=0.05,
                port=0,
                host="127.0.0.1",
            )
            switching = asyncio.create_task(Switch(settings, KubeClient(switches)).run(stopped.wait()))
            await eventually(lambda: len(switches.lists) > 1, "it looks again and again")
            stopped.set()
            await switching
        assert set(switches.lists) == {"0"}
