"""The API server of the benchmarks, asked as our commands ask."""

from __future__ import annotations

from aiohttp import web
from bench.big_api import BigApi

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.diagnosis.exporters import EXPORTERS


async def test_it_lists_those_that_have_the_labels() -> None:
    """As `gpuslice top` looks for exporters: without them it would ask every pod for its page."""
    runner = web.AppRunner(BigApi(nodes=2, cards=8, pods=3, seed=1).app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with HttpTransport(Connection(f"http://127.0.0.1:{runner.addresses[0][1]}")) as transport:
            client = KubeClient(transport)
            assert len((await client.list(PODS)).items or ()) == 2 * 4 + 3
            assert len((await client.list(PODS, labels="app=bench")).items or ()) == 2 * 4 + 3
            assert not (await client.list(PODS, labels=EXPORTERS)).items
    finally:
        await runner.cleanup()
