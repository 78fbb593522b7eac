"""The exporter's HTTP: its page and the vendor's old one, each with the security of the web-config file."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import gpuslice
from gpuslice.adapters.limits import Limits
from gpuslice.adapters.web.app import Probes, Router, for_operators, get, metrics_answer
from gpuslice.adapters.web.app import make_app as make_probed_app
from gpuslice.adapters.web.clients import App
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, json_answer, text_answer
from gpuslice.adapters.web.process import ProcessMetrics
from gpuslice.adapters.web.serve import Listen, inherited_socket, serving
from gpuslice.adapters.web.server_tls import TlsFiles
from gpuslice.adapters.web.webconfig import WebConfig, WebConfigFile, guard
from gpuslice.apps.exporter.page import MetricsPage
from gpuslice.apps.exporter.settings import ExporterSettings, parse_address
from gpuslice.apps.settings import SettingsError

_INDEX = """<html><head><title>GPU exporter</title></head>
<body><h1>GPU exporter</h1><p><a href="/metrics">Metrics</a> <a href="/health">Health</a></p></body></html>
"""
WEB_LIMITS = Limits(reviews_at_once=1)
"""Comparing a password takes a core for 50 ms and more."""


def make_app(page: MetricsPage, process: ProcessMetrics) -> App:
    """Port 9400: dcgm-exporter's paths and those that all of our processes have."""

    def health(_: HttpRequest) -> HttpResponse:
        return text_answer("KO" if page.not_ready() else "OK")  # 200 all the same, as upstream

    return make_probed_app(
        Probes(gpuslice.__version__, page.not_ready, page.render, process),
        [
            get("/", lambda _: HttpResponse(_INDEX.encode(), content_type="text/html; charset=utf-8")),
            get("/health", health),
            for_operators(get("/debug/state", lambda _: json_answer(page.debug_state()))),
        ],
    )


def make_legacy_app(page: MetricsPage) -> App:
    """Port 9445: the same page with and without a path."""

    def legacy(request: HttpRequest) -> HttpResponse:
        return metrics_answer(page.render_legacy, request)

    return Router([get("/", legacy), get("/metrics", legacy)])


@contextlib.asynccontextmanager
async def serve_all(
    settings: ExporterSettings, process: ProcessMetrics, app: App, legacy: App
) -> AsyncIterator[int]:
    """Both pages; yields the port of the first. The old one is served only where it has an address.

    `process` learns which certificates the web-config file names.
    """
    file = WebConfigFile(Path(settings.web_config_file)) if settings.web_config_file else None
    config = file.current if file is not None else WebConfig

    def tls_files() -> TlsFiles:
        said = config()
        process.certificates = (said.tls.certificate, said.tls.client_ca)
        process.tokens_in_clear = bool(said.users) and not said.tls.certificate
        return said.tls

    def listen_on(address: str) -> Listen:
        host, port = parse_address(address)
        return Listen(port, host, tls_files=tls_files if file is not None else None, limits=WEB_LIMITS)

    async with contextlib.AsyncExitStack() as stack:
        listen = listen_on(settings.address)
        if settings.web_systemd_socket:
            passed = inherited_socket()
            if passed is None:
                wanted = "the service must have a .socket unit"
                raise SettingsError(f"web_systemd_socket is on and systemd passed no socket: {wanted}")
            listen = replace(listen, inherited=passed)
        port = await stack.enter_async_context(serving(guard(app, config, WEB_LIMITS), listen))
        if settings.legacy_address:
            listen = listen_on(settings.legacy_address)
            await stack.enter_async_context(serving(guard(legacy, config, WEB_LIMITS), listen))
        yield port
