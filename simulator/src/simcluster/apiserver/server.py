"""Serves a ``Cluster`` over plain HTTP on a loopback address."""

from __future__ import annotations

import asyncio
import secrets
from typing import Self

import aiohttp
from aiohttp import web

from simcluster.apiserver.proxy import proxy_stream, proxy_websocket
from simcluster.apiserver.watching import stream_watch
from simcluster.apiserver.webhooks import ask_webhook
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.faults import Fault
from simcluster.cluster.request import Request, Response

_BODY_LIMIT_BYTES = 32 * 1024 * 1024


class ApiServer:
    """``async with ApiServer(Cluster()) as server: server.url``; port 0 takes a free one."""

    def __init__(self, cluster: Cluster, port: int = 0, host: str = "127.0.0.1") -> None:
        self.cluster = cluster
        self.host = host
        self.port = port
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def kubeconfig(self) -> str:
        """What to write to the file that KUBECONFIG names."""
        return _KUBECONFIG.format(url=self.url)

    async def start(self) -> None:
        app = web.Application(client_max_size=_BODY_LIMIT_BYTES)
        app.router.add_post("/sim/{action}", self._simulate)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=10))
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Ends watches, then connections."""
        self.cluster.drop_watches()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _answer(self, incoming: web.Request) -> web.StreamResponse:
        request = Request(
            method=incoming.method,
            path=incoming.path,
            query=dict(incoming.query),
            headers={name.lower(): value for name, value in incoming.headers.items()},
            body=await incoming.read() if incoming.can_read_body else b"",
        )
        fault = next((item for item in self.cluster.faults.active if item.matches(request)), None)
        if fault is not None and fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault is not None and fault.held is not None:
            await fault.held.wait()
        response = await self._handle(request)
        if response.watch is not None:
            return await stream_watch(incoming, response)
        if response.proxy is not None:
            assert response.proxy is not None
            if response.proxy.websocket:
                return await proxy_websocket(self._client(), incoming, response.proxy.url)
            return await proxy_stream(self._client(), incoming, response.proxy.url)
        headers = {"Audit-Id": secrets.token_hex(8), "Cache-Control": "no-cache, private"}
        return web.Response(
            status=response.status, body=response.body, headers=headers | dict(response.headers)
        )

    async def _handle(self, request: Request) -> Response:
        """Runs the request's steps, and calls webhooks over HTTP in between."""
        steps = self.cluster.steps(request)
        try:
            call = next(steps)
            while True:
                call = steps.send(await ask_webhook(self._client(), self.cluster, call))
        except StopIteration as stop:
            answer: Response = stop.value
            return answer

    def _client(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the server has not been started"
        return self._session

    async def _simulate(self, incoming: web.Request) -> web.Response:
        """Faults on demand: ``POST /sim/compact``, ``drop-watches``, ``fault`` and ``clear-faults``."""
        match incoming.match_info["action"]:
            case "compact":
                self.cluster.compact()
            case "drop-watches":
                self.cluster.drop_watches(incoming.query.get("shelf"))
            case "fault":
                self.cluster.add_fault(Fault(**await incoming.json()))
            case "clear-faults":
                self.cluster.faults.clear()
            case unknown:
                return web.Response(
                    status=404, text=f"{unknown}: must be compact, drop-watches, fault or clear-faults"
                )
        return web.Response(text="ok")


_KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: gpuslice-sim
clusters:
- name: gpuslice-sim
  cluster:
    server: {url}
contexts:
- name: gpuslice-sim
  context:
    cluster: gpuslice-sim
    user: admin
users:
- name: admin
  user: {{}}
"""
