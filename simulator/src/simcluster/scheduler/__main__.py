"""The simulated kube-scheduler as a program: ``python -m simcluster.scheduler --config FILE``."""

from __future__ import annotations

import argparse
import asyncio
import os
import ssl
import sys
import tempfile
from pathlib import Path

import trustme
from aiohttp import web

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.transport import HttpTransport
from simcluster.scheduler.configuration import load
from simcluster.scheduler.loop import Scheduler

HEALTH_PORT = 10259


async def run(config: Path) -> None:
    """Forever. The files that the configuration names are those of the container, whose root is HOME."""
    client = KubeClient(HttpTransport(connect(os.environ)))
    scheduler = Scheduler(client, load(config, Path(os.environ["HOME"])))
    app = web.Application()
    app.router.add_get("/healthz", _healthy)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", HEALTH_PORT, ssl_context=_own_certificate()).start()
    await scheduler.run()


def _own_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        issued = trustme.CA().issue_cert("localhost")
        file.write(issued.private_key_and_cert_chain_pem.bytes())
        file.flush()
        context.load_cert_chain(file.name)
    return context


async def _healthy(_: web.Request) -> web.Response:
    return web.Response(text="ok")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    arguments, _ = parser.parse_known_args(sys.argv[1:])
    asyncio.run(run(arguments.config))


if __name__ == "__main__":
    main()
