"""The part of HTTP that all of our processes share: version, health, readiness, metrics, JSON answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from gpuslice.adapters.web.exposition import CONTENT_TYPE, accepts_gzip

_log = logging.getLogger(__name__)

BODY_LIMIT_BYTES = 128 << 20  # whole nodes of a large cluster, from a caller that is not nodeCacheCapable
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Probes:
    """What a process tells about itself. `not_ready` is the reason in words, "" when it is ready."""

    version: str
    not_ready: Callable[[], str]
    metrics: Callable[[], bytes]
    metrics_gzip: Callable[[], bytes] | None = None  # for a large page; Prometheus asks for it always


def make_app(probes: Probes, routes: Iterable[web.RouteDef] = ()) -> web.Application:
    """An application with ``/version``, ``/healthz``, ``/readyz``, ``/metrics`` and `routes`."""
    app = web.Application(client_max_size=BODY_LIMIT_BYTES, middlewares=[_log_errors])
    app.add_routes(
        [
            web.get("/version", _text(lambda: probes.version)),
            web.get("/healthz", _text(lambda: "ok")),
            web.get("/livez", _text(lambda: "ok")),
            web.get("/readyz", _ready(probes.not_ready)),
            web.get("/metrics", _metrics(probes.metrics, probes.metrics_gzip)),
            *routes,
        ]
    )
    return app


def json_answer(value: Any, status: int = 200) -> web.Response:
    """`value` as JSON; a msgspec struct keeps its own key names."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _text(say: Callable[[], str]) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=say())

    return answer


def _ready(not_ready: Callable[[], str]) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        reason = not_ready()
        return web.Response(text=reason or "ok", status=503 if reason else 200)

    return answer


def _metrics(render: Callable[[], bytes], compressed: Callable[[], bytes] | None) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE}
        if compressed is None:
            return web.Response(body=render(), headers=headers)
        headers["Vary"] = "Accept-Encoding"
        if not accepts_gzip(request.headers.get("Accept-Encoding", "")):
            return web.Response(body=render(), headers=headers)
        return web.Response(body=compressed(), headers={**headers, "Content-Encoding": "gzip"})

    return answer


@web.middleware
async def _log_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The last resort: one request fails with a sentence, the process goes on."""
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except Exception:
        _log.exception("request failed", extra={"method": request.method, "path": request.path})
        return json_answer({"error": f"{request.method} {request.path} failed, see the log"}, status=500)
