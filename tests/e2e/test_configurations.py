"""kube-scheduler as others configure it: several profiles, other extenders, ours asked in other ways.

The nodes have names as clouds give them and cards of unequal sizes, also on one node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from gpuslice.core.contract import NODE_GPUS
from tests import HANG_S
from tests.builders import api_node, make_card
from tests.e2e import control_plane
from tests.e2e.cluster import cluster, extender, pod, scheduler_arguments, shipped_configuration
from tests.e2e.control_plane import api_server
from tests.e2e.marks import ON_A_CONTROL_PLANE

pytestmark = ON_A_CONTROL_PLANE

DOMAIN = "gpu-fleet-seventeen.eu-somewhere-2.compute.internal.datacenter-of-somebody.example.com"
SIZES = ((15,), (15,) * 8, (79, 79), (11, 15, 23, 47))  # units of a node's cards, one shape after the other
PODS = 90
Object = dict[str, Any]


def node(name: str, sizes: tuple[int, ...]) -> Object:
    cards = [make_card(index, units, node=name) for index, units in enumerate(sizes)]
    told = [{key: getattr(each, key) for key in ("index", "uuid", "memory_mib", "units")} for each in cards]
    made = api_node(name, sum(sizes), len(sizes), annotations={NODE_GPUS: json.dumps(told)})
    made["metadata"]["labels"] = {"kubernetes.io/hostname": name.partition(".")[0]}  # at most 63 characters
    made["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    return made


@contextlib.asynccontextmanager
async def another_extender() -> AsyncIterator[str]:
    """One that everything suits and that prefers the last node; it is asked by names or by whole nodes."""

    async def filter_nodes(request: web.Request) -> web.Response:
        question = msgspec.json.decode(await request.read())
        return web.json_response({key: question.get(key) for key in ("Nodes", "NodeNames")})

    async def prioritize(request: web.Request) -> web.Response:
        question = msgspec.json.decode(await request.read())
        whole = [each["metadata"]["name"] for each in (question.get("Nodes") or {}).get("items") or ()]
        names = question.get("NodeNames") or whole
        return web.json_response([{"Host": name, "Score": 10 * (name == names[-1])} for name in names])

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/filter", filter_nodes)
    app.router.add_post("/prioritize", prioritize)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def configured(name: str, ours: Object, other_url: str) -> Object:
    """What of the chart's configuration is otherwise."""
    other = {"urlPrefix": other_url, "filterVerb": "filter", "prioritizeVerb": "prioritize", "weight": 3}
    scored = [{"name": "aliyun.com/gpu-mem", "weight": 5}, {"name": "cpu", "weight": 1}]
    fullest = {"scoringStrategy": {"type": "MostAllocated", "resources": scored}}
    none = {"disabled": [{"name": "*"}]}
    profiles = [
        {"schedulerName": "gpuslice-scheduler", "percentageOfNodesToScore": 5},
        {
            "schedulerName": "default-scheduler",
            "pluginConfig": [{"name": "NodeResourcesFit", "args": fullest}],
        },
        {"schedulerName": "without-scores", "plugins": {"preScore": none, "score": none}},
    ]
    made: dict[str, Object] = {
        "profiles": {"profiles": profiles, "percentageOfNodesToScore": 100},
        "another first, ours ignorable": {
            "extenders": [{**other, "nodeCacheCapable": True}, {**ours, "ignorable": True}]
        },
        "another of whole nodes after ours": {"extenders": [ours, other], "profiles": profiles},
        "ours of whole nodes, one at a time": {
            "extenders": [{**ours, "nodeCacheCapable": False}],
            "parallelism": 1,
        },
    }
    return made[name]


@pytest.mark.parametrize(
    "name",
    [
        "profiles",
        "another first, ours ignorable",
        "another of whole nodes after ours",
        "ours of whole nodes, one at a time",
    ],
)
async def test_every_pod_is_bound_once_and_to_a_card_that_holds_it(tmp_path: Path, name: str) -> None:
    sizes = {f"ip-10-0-0-{number}.{DOMAIN}": SIZES[number % len(SIZES)] for number in range(20)}
    with contextlib.ExitStack() as stack:
        context = api_server(tmp_path, without=("TaintNodesByCondition",))
        plane = await asyncio.to_thread(stack.enter_context, context)
        async with another_extender() as other_url, cluster(plane, max(map(max, SIZES))) as made:
            await made.add_nodes([node(each, units) for each, units in sizes.items()])
            running = await asyncio.to_thread(stack.enter_context, extender(plane))
            configuration = shipped_configuration(running.url)
            (ours,) = configuration["extenders"]
            configuration |= configured(name, ours, other_url)
            arguments = scheduler_arguments(configuration)
            await asyncio.to_thread(stack.enter_context, control_plane.scheduler(plane, **arguments))
            schedulers = [each["schedulerName"] for each in configuration["profiles"]]
            pods = [pod(f"p{number}", 1 + number % 5) for number in range(PODS)]  # there is room for all
            for number, each in enumerate(pods):
                each["spec"]["schedulerName"] = schedulers[number % len(schedulers)]
            await made.add_pods(pods)
            await made.until(lambda: len(made.log.bound_at) == PODS, HANG_S)
            log = made.log
    assert log.wrong == []
    assert sum(log.sums.values()) == sum(1 + number % 5 for number in range(PODS))
    assert all(units <= sizes[on][int(card)] for (on, card), units in log.sums.items())
