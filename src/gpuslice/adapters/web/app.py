"""The part of HTTP that all of our processes share: routes, version, health, readiness, metrics."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gpuslice.adapters.turns import Asker
from gpuslice.adapters.web.clients import App
from gpuslice.adapters.web.exposition import Format, Piece, end_of, gzipped, joined, pieces
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, json_answer, text_answer
from gpuslice.adapters.web.negotiation import accepts_gzip, chosen_format
from gpuslice.adapters.web.process import ProcessMetrics, stacks

_log = logging.getLogger(__name__)

Handler = Callable[[HttpRequest], HttpResponse | Awaitable[HttpResponse]]
"""A plain function answers immediately; one that waits for something is a coroutine function."""


@dataclass(frozen=True, slots=True)
class Route:
    """The path of a handler, which may end with ``/{}`` for one variable part: ``HttpRequest.part``."""

    method: str
    path: str
    handler: Handler


@dataclass(frozen=True, slots=True)
class Probes:
    """What a process reports about itself. `not_ready` returns the reason, or "" if it is ready.

    `metrics`: its own page in the requested format, without the end; `process` follows.
    """

    version: str
    not_ready: Callable[[], str]
    metrics: Callable[[Format], Sequence[Piece]]
    process: ProcessMetrics = field(default_factory=ProcessMetrics)

    def page(self, format: Format) -> list[Piece]:
        """Everything that a scrape gets, except the end."""
        with self.process.scrape.timed():
            own = self.metrics(format)
        return [*own, *pieces(self.process.families(), format)]


def get(path: str, handler: Handler) -> Route:
    """Answers GET, and HEAD without the body."""
    return Route("GET", path, handler)


def post(path: str, handler: Handler) -> Route:
    return Route("POST", path, handler)


def for_known_clients(route: Route) -> Route:
    """The same route for clients that show a certificate; others are told to."""

    def handler(request: HttpRequest) -> HttpResponse | Awaitable[HttpResponse]:
        if not request.known:
            return json_answer({"error": f"{route.path} needs a certificate of the CA for clients"}, 403)
        return route.handler(request)

    return Route(route.method, route.path, handler)


def for_operators(route: Route) -> Route:
    """The same route for clients on this machine (``kubectl exec``, ``port-forward``) or known ones."""

    def handler(request: HttpRequest) -> HttpResponse | Awaitable[HttpResponse]:
        if not (request.local or request.known):
            sentence = f"{route.path} answers on localhost alone: use kubectl port-forward, or a certificate"
            return json_answer({"error": sentence}, 403)
        return route.handler(request)

    return Route(route.method, route.path, handler)


def for_bearers(app: App, allows: Callable[[str, str, Asker], Awaitable[bool]]) -> App:
    """`app`, with paths below ``/debug`` open to clients with a bearer token that `allows` accepts."""

    async def reviewed(request: HttpRequest, token: str) -> HttpResponse:
        request.known = await allows(token, request.path, request.asker)
        answer = app(request)
        return answer if isinstance(answer, HttpResponse) else await answer

    def handle(request: HttpRequest) -> HttpResponse | Awaitable[HttpResponse]:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        asks = request.method in {"GET", "HEAD"} and request.path.startswith("/debug/")
        if asks and scheme.lower() == "bearer" and token.strip() and not (request.local or request.known):
            return reviewed(request, token.strip())
        return app(request)

    return handle


def make_app(
    probes: Probes, routes: Iterable[Route] = (), guard: Callable[[Route], Route] = lambda route: route
) -> App:
    """An application with ``/version``, ``/healthz``, ``/readyz``, ``/metrics``, ``/debug/stacks`` and
    `routes`, all guarded."""
    return Router(
        guard(route)
        for route in (
            get("/version", lambda _: text_answer(probes.version)),
            get("/healthz", lambda _: text_answer("ok")),
            get("/livez", lambda _: text_answer("ok")),
            get("/readyz", lambda _: _readiness(probes.not_ready())),
            get("/metrics", lambda request: metrics_answer(probes.page, request)),
            for_operators(get("/debug/stacks", lambda _: text_answer(stacks()))),
            *routes,
        )
    )


def metrics_answer(page: Callable[[Format], Sequence[Piece]], request: HttpRequest) -> HttpResponse:
    """The page, with its end, in the format and the encoding that the client prefers."""
    format = chosen_format(request.headers.get("accept", ""))
    headers = {"Vary": "Accept, Accept-Encoding"}
    whole = [*page(format), *end_of(format)]
    if not accepts_gzip(request.headers.get("accept-encoding", "")):
        return HttpResponse(joined(whole), content_type=format.content_type, headers=headers)
    headers["Content-Encoding"] = "gzip"
    return HttpResponse(gzipped(whole), content_type=format.content_type, headers=headers)


class Router:
    """An application made of routes; an exception in a handler is logged and answered with a sentence."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._handlers: dict[str, dict[str, Handler]] = {}
        for route in routes:
            self._handlers.setdefault(route.path, {})[route.method] = route.handler

    def __call__(self, request: HttpRequest) -> HttpResponse | Awaitable[HttpResponse]:
        handlers = self._handlers.get(request.path)
        if handlers is None:
            folder, _, request.part = request.path.rpartition("/")
            handlers = self._handlers.get(folder + "/{}", {}) if request.part else {}
        if not handlers:
            return text_answer(f"404: there is no {request.path}", 404)
        handler = handlers.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allowed = ", ".join(sorted(handlers))
            refusal = text_answer(f"405: {request.path} answers {allowed}", 405)
            refusal.headers = {"Allow": allowed}
            return refusal
        try:
            answer = handler(request)
        except Exception:
            return _failed(request)
        return answer if isinstance(answer, HttpResponse) else _guarded(request, answer)


async def _guarded(request: HttpRequest, coming: Awaitable[HttpResponse]) -> HttpResponse:
    try:
        return await coming
    except Exception:
        return _failed(request)


def _failed(request: HttpRequest) -> HttpResponse:
    """The last resort: one request fails with a sentence, the process continues."""
    _log.exception("request failed", extra={"method": request.method, "path": request.path})
    return json_answer({"error": f"{request.method} {request.path} failed, see the log"}, 500)


def _readiness(reason: str) -> HttpResponse:
    return text_answer(reason or "ok", 503 if reason else 200)
