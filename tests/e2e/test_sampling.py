"""What kube-scheduler shows an extender of 5,000 nodes: all with the chart's configuration, 500 without it.

On all nodes but one the sum over the cards is enough and no card is. Nothing of kube-scheduler's own sees the
difference, so a sample that misses that one node has the pod refused although it fits.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml
from aiohttp import web

from gpuslice.adapters.kube.resources import CONFIG_MAPS, EVENTS
from tests import HANG_S
from tests.builders import api_node
from tests.e2e import control_plane
from tests.e2e.cluster import (
    Cluster,
    Running,
    cluster,
    extender,
    pod,
    release,
    scheduler_arguments,
    shipped_configuration,
)
from tests.e2e.control_plane import ControlPlane, api_server
from tests.e2e.marks import ON_A_CONTROL_PLANE

pytestmark = ON_A_CONTROL_PLANE
SETTLED_S = 10.0
NODES = 5000
SAMPLE = 500  # kube-scheduler's own choice for so many
ROOM = "zz-room"
Object = dict[str, Any]


@dataclass
class Ear:
    """Passes kube-scheduler's questions on, and remembers of how many nodes they were."""

    url: str
    asked: dict[str, list[int]] = field(default_factory=dict)  # by pod

    async def pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.path.endswith("/filter"):
            question = msgspec.json.decode(body)
            name = question["Pod"]["metadata"]["name"]
            self.asked.setdefault(name, []).append(len(question["NodeNames"]))
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + request.path, data=body, ssl=release().client) as answer,
        ):
            return web.Response(body=await answer.read(), content_type="application/json")


@contextlib.asynccontextmanager
async def listening(url: str) -> AsyncIterator[tuple[Ear, str]]:
    ear, app = Ear(url), web.Application(client_max_size=1 << 26)
    app.router.add_post("/{path:.*}", ear.pass_on)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield ear, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def scheduling(plane: ControlPlane, url: str, **changes: object) -> AsyncIterator[Object]:
    """kube-scheduler with the chart's configuration and these changes; yields the configuration."""
    configuration = {**shipped_configuration(url), **changes}
    with contextlib.ExitStack() as stack:
        context = control_plane.scheduler(plane, **scheduler_arguments(configuration))
        await asyncio.to_thread(stack.enter_context, context)
        if control_plane.minor_version("kube-scheduler") < 28:  # it begins before it knows all nodes there
            await asyncio.sleep(SETTLED_S)
        yield configuration
        await asyncio.to_thread(stack.close)


def node(name: str, units: int, cards: int) -> Object:
    made = api_node(name, units, cards)
    made["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    return made


async def told(made: Cluster, name: str) -> str:
    """What the extender's event on this pod says, once there is one."""
    async with asyncio.timeout(HANG_S):
        while True:
            listing = await made.client.list(EVENTS, "default", fields=f"involvedObject.name={name}")
            for event in listing.items or []:
                if event.reason == "InsufficientGPU":
                    return event.message or ""
            await asyncio.sleep(0.2)


def sampled(running: Running) -> float:
    """By the extender's metric: pods refused for want of the nodes that it was not shown."""
    lines = running.get("/metrics")[1].decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("gpuslice_extender_sampled_pods"))


async def doctor(plane: ControlPlane, made: Cluster, configuration: Object) -> str:
    """What `gpuslice doctor` says when this configuration lies where the chart puts it."""
    text = yaml.safe_dump(configuration)
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "gpuslice-scheduler", "namespace": "kube-system"},
        "data": {"config.yaml": text},
    }
    await made.client.create(CONFIG_MAPS, config_map)
    code = "from gpuslice.apps.cli.main import main; main()"
    command = [sys.executable, "-c", code, "doctor", "-o", "json", "--kubeconfig", str(plane.kubeconfig)]
    done = await asyncio.to_thread(subprocess.run, command, check=False, capture_output=True, text=True)
    await made.client.delete(CONFIG_MAPS, "gpuslice-scheduler", "kube-system")
    return done.stdout


async def test_the_charts_configuration_shows_every_node_and_the_default_one_is_found_out(
    tmp_path: Path,
) -> None:
    with api_server(tmp_path, without=("TaintNodesByCondition",)) as plane, contextlib.ExitStack() as stack:
        async with cluster(plane, 16) as made:
            fragments = [node(f"n{number:04d}", 32, 4) for number in range(NODES - 1)]
            await made.add_nodes([*fragments, node(ROOM, 32, 2)])
            ours = await asyncio.to_thread(stack.enter_context, extender(plane))
            async with listening(ours.url) as (ear, url):
                async with scheduling(plane, url, percentageOfNodesToScore=0) as default:
                    await made.add_pods([pod("sampled", 12)])
                    event = await told(made, "sampled")
                assert ear.asked["sampled"][0] == SAMPLE
                assert "percentageOfNodesToScore: 100" in event
                assert sampled(ours) >= 1
                assert f"sees {SAMPLE} of {NODES} nodes" in await doctor(plane, made, default)
                before = sampled(ours)
                async with scheduling(plane, url) as shipped:
                    await made.add_pods([pod("shipped", 12)])
                    await made.until(lambda: len(made.log.bound_at) == 2)  # the other one as well
                assert set(ear.asked["shipped"]) == {NODES}
                assert {each.spec.node_name for each in await made.pods()} == {ROOM}
                assert sampled(ours) == before
                assert "nodes: pods wait" not in await doctor(plane, made, shipped)
