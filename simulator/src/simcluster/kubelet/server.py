"""kubelet's own HTTP API, as far as the API server forwards to it: logs, exec, port-forward and proxy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import aiohttp
from aiohttp import web

from simcluster.kubelet import execution, logs, portforward
from simcluster.kubelet.records import ContainerRecord, WaitingState
from simcluster.kubelet.runtime import Runtime
from simcluster.kubelet.worker import PodWorker
from simcluster.network import loopback_of

FindWorker = Callable[[str, str], PodWorker | None]  # (namespace, name)


class KubeletServer:
    """Serves on the loopback address; `url` is known after `start`."""

    def __init__(self, find: FindWorker, runtime: Runtime, folder: Path, host: str, port: int) -> None:
        self._find = find
        self._runtime = runtime
        self._folder = folder
        self._host, self._port = host, port
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/healthz", _healthy)
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        app.router.add_get("/exec/{namespace}/{pod}/{container}", self._exec)
        app.router.add_get("/podProxy/{namespace}/{pod}/{port}/{path:.*}", self._proxy)
        app.router.add_get("/portForward/{namespace}/{pod}", self._forward)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        port = self._runner.addresses[0][1]
        self.url = f"http://{self._host}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        worker, record = self._container(request)
        # which attempt's log is requested; a container that never started has none
        previous = request.query.get("previous") == "true"
        pod = worker.pod["metadata"]["name"]
        waiting = isinstance(record.state, WaitingState)
        if previous:
            last = record.restart_count if waiting and record.last else record.restart_count - 1
            if last < 0 or record.last is None:
                raise _bad_request(f'previous terminated container "{record.name}" in pod "{pod}" not found')
            attempt = last
        else:
            if waiting and record.last is None:
                assert isinstance(record.state, WaitingState)
                why = record.state.reason
                if why in ("ErrImagePull", "ImagePullBackOff"):
                    why = "trying and failing to pull image"
                raise _bad_request(f'container "{record.name}" in pod "{pod}" is waiting to start: {why}')
            attempt = record.restart_count
        path = self._folder / worker.uid / record.name / f"{attempt}.log"
        if not path.exists():
            raise _bad_request(f"unable to retrieve container logs for {record.container_id or record.name}")
        answer = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await answer.prepare(request)
        async for text in logs.read(
            path, _query(request.query), lambda: self._alive(worker, record, attempt)
        ):
            if text:
                await answer.write(text)
        return answer

    def _alive(self, worker: PodWorker, record: ContainerRecord, attempt: int) -> bool:
        container = self._runtime.find(worker.uid, record.name)
        return container is not None and container.running and container.spec.attempt == attempt

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        worker, record = self._container(request)
        container = self._runtime.find(worker.uid, record.name)
        if container is None or not container.running:
            return _error(500, "InternalError", f'container not found ("{record.name}")')
        query = request.query
        wanted = execution.ExecRequest(
            command=tuple(query.getall("command", [])),
            stdin=_flag(query, "stdin", "input"),
            terminal=_flag(query, "tty"),
        )
        return await execution.serve(request, container, wanted)

    def _worker(self, request: web.Request) -> PodWorker:
        worker = self._find(request.match_info["namespace"], request.match_info["pod"])
        if worker is None:
            raise _not_found(f'pod "{request.match_info["pod"]}" does not exist')
        return worker

    async def _proxy(self, request: web.Request) -> web.StreamResponse:
        """A page of a program in the pod, which in a real cluster the API server would fetch itself."""
        place = f"{request.match_info['port']}/{request.match_info['path']}"
        why = ""
        for address in (loopback_of(self._worker(request).pod), "127.0.0.1"):
            try:
                async with (
                    aiohttp.ClientSession() as session,
                    session.get(f"http://{address}:{place}", params=request.query) as answer,
                ):
                    headers = {"Content-Type": answer.headers.get("Content-Type", "text/plain")}
                    return web.Response(status=answer.status, body=await answer.read(), headers=headers)
            except aiohttp.ClientError as error:
                why = str(error)
        return _error(503, "ServiceUnavailable", f"error trying to reach service: {why}")

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        worker = self._worker(request)
        return await portforward.serve(
            request, worker.pod["metadata"]["name"], (loopback_of(worker.pod), "127.0.0.1")
        )

    def _container(self, request: web.Request) -> tuple[PodWorker, ContainerRecord]:
        worker, name = self._worker(request), request.match_info["container"]
        record = worker.record(name)
        if record is None:
            pod = f"{request.match_info['pod']}_{request.match_info['namespace']}"
            raise _not_found(f"container {name} not found in pod {pod}")
        return worker, record


def _query(query: Mapping[str, str]) -> logs.LogQuery:
    def number(name: str) -> int | None:
        return int(query[name]) if query.get(name) else None

    return logs.LogQuery(
        follow=query.get("follow") == "true",
        tail_lines=number("tailLines"),
        limit_bytes=number("limitBytes"),
        since_s=number("sinceSeconds"),
        since_time=query.get("sinceTime", ""),
        timestamps=query.get("timestamps") == "true",
    )


def _flag(query: Mapping[str, str], *names: str) -> bool:
    return any(query.get(name) in ("true", "1") for name in names)


def _error(code: int, reason: str, message: str) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    return web.json_response(body, status=code)


def _bad_request(message: str) -> web.HTTPException:
    return _raised(web.HTTPBadRequest, _error(400, "BadRequest", message))


def _not_found(message: str) -> web.HTTPException:
    return _raised(web.HTTPNotFound, _error(404, "NotFound", message))


def _raised(kind: type[web.HTTPException], answer: web.Response) -> web.HTTPException:
    return kind(text=answer.text, content_type="application/json")


async def _healthy(_: web.Request) -> web.Response:
    return web.Response(text="ok")
