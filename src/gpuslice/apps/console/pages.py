"""The routes of the console: its files, and the JSON that they request. Only GET is answered."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable, Iterable, Mapping
from importlib.resources import files
from urllib.parse import urlsplit

from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.web.app import Handler, Route, get
from gpuslice.adapters.web.clients import App
from gpuslice.adapters.web.messages import JSON, HttpRequest, HttpResponse, json_answer, text_answer
from gpuslice.adapters.web.negotiation import accepts_gzip
from gpuslice.apps.console.access import Access, Viewer
from gpuslice.apps.console.rows import Rows

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "json": JSON,
}
LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
WORTH_A_THREAD_BYTES = 256 << 10
FASTEST = 1

ViewerHandler = Callable[[HttpRequest, Viewer], Awaitable[HttpResponse]]
"""Answers a request of an identified viewer."""


class Pages:
    """Identifies the viewer first; `local`: answers only requests to this machine by its own name."""

    def __init__(self, rows: Rows, access: Access, base_path: str, *, local: bool) -> None:
        self._rows = rows
        self._access = access
        self._base = base_path
        self._local = local

    def routes(self, answers: Mapping[str, ViewerHandler]) -> list[Route]:
        """`answers`: by the path below ``api/v1/``."""
        static = {each.name: each.read_bytes() for each in files(__package__).joinpath("static").iterdir()}
        routes = [get(f"{self._base}/", self._file(static["index.html"], "html", cached=False))]
        routes += [get(self._base, self._with_slash)] if self._base else []
        routes += [
            get(f"{self._base}/static/{name}", self._file(content, name.rpartition(".")[2]))
            for name, content in static.items()
            if name != "index.html"
        ]
        routes += [
            get(f"{self._base}/api/v1/{path}", self._known(answer)) for path, answer in answers.items()
        ]
        return routes

    def guarded(self, app: App) -> App:
        """`app`; on one's own machine nothing but the secret path, and by the machine's own name."""

        def handle(request: HttpRequest) -> HttpResponse | Awaitable[HttpResponse]:
            if refusal := self._refusal(request):
                return refusal
            if request.path != self._base and not request.path.startswith(f"{self._base}/"):
                return text_answer("404: this page is served under a path that was printed", 404)
            return app(request)

        return handle if self._local else app

    def _file(self, content: bytes, kind: str, *, cached: bool = True) -> Handler:
        packed = gzip.compress(content, mtime=0)
        headers = {
            **HEADERS,
            "Vary": "Accept-Encoding",
            "Cache-Control": "no-cache" if cached else "no-store",
        }

        def handle(request: HttpRequest) -> HttpResponse:
            if not accepts_gzip(request.headers.get("accept-encoding", "")):
                return HttpResponse(content, 200, TYPES[kind], headers)
            return HttpResponse(packed, 200, TYPES[kind], {**headers, "Content-Encoding": "gzip"})

        return handle

    def _with_slash(self, request: HttpRequest) -> HttpResponse:
        """What the page requests is relative to its folder."""
        return HttpResponse(b"", 308, headers={"Location": f"{self._base}/"})

    def _known(self, answer: ViewerHandler) -> Handler:
        async def handle(request: HttpRequest) -> HttpResponse:
            try:
                viewer = await self._access.viewer(request, self._rows.namespaces())
                if viewer is None:
                    refused = json_answer({"error": "a bearer token of this cluster must be shown"}, 401)
                    refused.headers = {**HEADERS, "WWW-Authenticate": "Bearer"}
                    return refused
                found = await answer(request, viewer)
            except KubeError as error:
                found = json_answer({"error": str(error)}, 502)
            found.headers = {**HEADERS, "Cache-Control": "no-store", **found.headers}
            return found

        return handle

    @staticmethod
    def _refusal(request: HttpRequest) -> HttpResponse | None:
        """Refuses names of other hosts: a foreign page may have pointed its name at this address (DNS
        rebinding).
        """
        try:
            host = urlsplit(f"//{request.headers.get('host', '')}").hostname
        except ValueError:  # of brackets that are no address
            host = None
        if host not in LOCAL_HOSTS:
            return text_answer("421: this page is served on this machine alone", 421)
        return None


async def packed(body: bytes, request: HttpRequest) -> HttpResponse:
    """JSON in an encoding that the client accepts; large bodies are compressed outside the event loop."""
    headers = {"Vary": "Accept-Encoding"}
    if not accepts_gzip(request.headers.get("accept-encoding", "")) or len(body) < 1024:
        return HttpResponse(body, 200, JSON, headers)
    headers["Content-Encoding"] = "gzip"
    if len(body) > WORTH_A_THREAD_BYTES:
        return HttpResponse(await asyncio.to_thread(gzip.compress, body, FASTEST), 200, JSON, headers)
    return HttpResponse(gzip.compress(body, FASTEST), 200, JSON, headers)


def only(query: dict[str, str], names: Iterable[str]) -> list[str]:
    """The values of `names`; missing ones are empty."""
    return [query.get(name, "") for name in names]


def not_found(sentence: str) -> HttpResponse:
    return json_answer({"error": sentence}, 404)
