"""The console process: watches a cluster, and serves a page that shows it. It writes nothing anywhere."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import time
import webbrowser
from collections.abc import Awaitable, Callable

import click
import msgspec

import gpuslice
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.limits import LIMITS
from gpuslice.adapters.malloc import share_one_arena
from gpuslice.adapters.web.app import Probes, make_app
from gpuslice.adapters.web.exposition import Family, MetricKind, labels, page_of
from gpuslice.adapters.web.logs import configure_logs
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse
from gpuslice.adapters.web.process import ProcessMetrics
from gpuslice.adapters.web.serve import Listen, run, serving, until_stopped, work_until
from gpuslice.apps.console.access import Access, OnePerson, TokenAccess, Viewer
from gpuslice.apps.console.cluster_state import NEEDED, ClusterState
from gpuslice.apps.console.documents import NOTHING, ClusterDocuments, without_strangers
from gpuslice.apps.console.health import Health
from gpuslice.apps.console.observed_client import ObservedClient
from gpuslice.apps.console.pages import Pages, not_found, only, packed
from gpuslice.apps.console.pod_page import PodPages
from gpuslice.apps.console.rows import Rows
from gpuslice.apps.console.settings import ConsoleSettings
from gpuslice.apps.console.usage_reader import UsageReader
from gpuslice.apps.console.waiting import WaitingPods
from gpuslice.apps.console.what_if import WhatIf
from gpuslice.core.errors import without_login
from gpuslice.core.hosts import bracketed
from gpuslice.diagnosis.advise.facts import advice_of
from gpuslice.diagnosis.advise.words import document as advice_document
from gpuslice.diagnosis.exporters import OURS, proxied
from gpuslice.diagnosis.exporters import direct as direct_pages
from gpuslice.diagnosis.prometheus import Prometheus, PrometheusError

LONGEST_WAIT_S = 20.0
"""How long a page that is up to date waits for news; proxies cut connections that are silent for a minute."""
GATHER_S = 0.03
"""Changes within this time are sent in one answer."""
FIRST_LIST_S = 15.0
CALM_GC = (20_000, 50, 100)


class Console:
    """Everything in one console process."""

    def __init__(self, settings: ConsoleSettings, transport: HttpTransport, cluster_name: str = "") -> None:
        self.settings = settings
        self.rows = Rows()
        self._name = settings.cluster_name or cluster_name
        self._client = ObservedClient(transport, manager="gpuslice-console")
        self.state = ClusterState(self._client, self.rows, settings.namespace)
        direct = settings.exporters == "direct" or (
            settings.exporters == "auto" and settings.access == "token"
        )
        prometheus = None
        if settings.prometheus_url:
            secrets_of = settings.prometheus_token_file, settings.prometheus_ca_file
            prometheus = Prometheus(settings.prometheus_url, *secrets_of)
        self.usage = UsageReader(
            self.state,
            direct_pages if direct else proxied(self._client, OURS),
            prometheus=prometheus,
            interval_s=settings.usage_interval_s,
        )
        self._waiting = WaitingPods(self.state, lambda: self.usage.containers)
        self._documents = ClusterDocuments(self.rows)
        self._pods = PodPages(self._client, self.state, self.usage)
        self._health = Health(self.state, settings.node_label, self.usage, prometheus)
        self._what_if = WhatIf(self.state)
        self._viewers = 0
        self._answers: dict[str, int] = {}
        # on one's own machine there are other accounts, too: the secret path keeps them out
        secret = f"/{secrets.token_urlsafe(18)}" if settings.access == "kubeconfig" else ""
        self.base_path = settings.base_path + secret
        self._access: Access = (
            OnePerson(lambda: self.state.may_list_nodes)
            if settings.access == "kubeconfig"
            else TokenAccess(self._client, LIMITS)
        )

    async def run(self, stopped: Awaitable[None], listening: Callable[[str], None] = lambda _: None) -> None:
        """Serve until `stopped`; `listening` gets the address of the page."""
        settings = self.settings
        pages = Pages(self.rows, self._access, self.base_path, local=settings.access == "kubeconfig")
        answers = {
            "cluster": self._cluster, "pod": self._pod, "health": self._find, "advice": self._advise,
            "teams": self._count_hours, "simulation": self._simulate,
        }  # fmt: skip
        process = ProcessMetrics(settings.tls_certificate)
        probes = Probes(gpuslice.__version__, self._not_ready, page_of(self.families), process)
        listen = Listen(
            settings.port,
            settings.host,
            certificate=settings.tls_certificate,
            key=settings.tls_key,
            drain_s=1.0,  # pages wait for news, and reconnect by themselves
        )
        process.tokens_in_clear = settings.access == "token" and not listen.tls
        tasks = {"cluster": self.state.run(), "waiting pods": self._waiting.run(), "memory": self._settle()}
        if settings.exporters != "off":
            tasks["usage"] = self.usage.run()
        app = pages.guarded(make_app(probes, pages.routes(answers)))
        async with probes.process.measured(), serving(app, listen) as port:
            scheme = "https" if listen.tls else "http"
            listening(f"{scheme}://{bracketed(settings.host)}:{port}{self.base_path}/")
            await work_until(stopped, tasks)

    async def _settle(self) -> None:
        """The cluster's objects are permanent: later garbage collections need not traverse them."""
        while not self.state.synced:
            await self.rows.newer_than(self.rows.number)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*CALM_GC)

    def _not_ready(self) -> str:
        if self.state.synced:
            return ""
        problems = [self._client.problems.get(name, "") for name in NEEDED]
        return next(filter(None, problems), "the cluster is being read")

    # -- answers -------------------------------------------------------------------------------------------

    async def _cluster(self, request: HttpRequest, viewer: Viewer) -> HttpResponse:
        """Answers at once if there is news, or if the page knows nothing; otherwise waits for news."""
        since, figures = only(request.query, ["since", "figures"])
        known, problems = self._documents.known(since, viewer), self._client.problems
        self._viewers += 1
        try:
            if known.figures and viewer.complete:
                await self._news(known.rows, problems)
            elif known == NOTHING and not self.state.synced:
                await self._first_list()
        finally:
            self._viewers -= 1
        cluster = {
            "name": self._name,
            "viewer": viewer.name,
            "mayListNodes": viewer.nodes,
            "everything": viewer.everything,
            "synced": self.state.synced,
            "problems": {name: why for name, why in self._client.problems.items() if why},
            "forbidden": sorted(self._client.forbidden),
            "usage": {"readAt": self.usage.read_at_s, "problem": self.usage.problem},
            "history": "prometheus" if self.usage.prometheus is not None else "memory",
            "namespace": self.settings.namespace,
            "now": time.time(),
            "release": gpuslice.__version__,
        }
        kind = "whole" if known == NOTHING else "changes"
        self._answers[kind] = self._answers.get(kind, 0) + 1
        document = self._documents.changes(known, viewer, cluster, figures=figures != "later")
        return await packed(document, request)

    async def _news(self, number: int, problems: object) -> None:
        """Wait until something is newer than `number`, becomes unreadable, or becomes readable again."""
        ends_s = asyncio.get_running_loop().time() + LONGEST_WAIT_S
        while asyncio.get_running_loop().time() < ends_s and self._client.problems is problems:
            try:
                await asyncio.wait_for(self.rows.newer_than(number), 1.0)
            except TimeoutError:
                continue
            await asyncio.sleep(GATHER_S)
            return

    async def _first_list(self) -> None:
        """Wait for the first list: a page opened earlier would show a part of the cluster as if it were all
        of it.
        """
        ends_s = asyncio.get_running_loop().time() + FIRST_LIST_S
        while not self.state.synced and asyncio.get_running_loop().time() < ends_s:
            if any(self._client.problems.get(name) for name in NEEDED):
                return
            await asyncio.sleep(0.05)

    async def _pod(self, request: HttpRequest, viewer: Viewer) -> HttpResponse:
        namespace, name = only(request.query, ["namespace", "name"])
        document = await self._pods.document(namespace, name) if viewer.sees(namespace) else None
        if document is None:
            return not_found(f"there is no pod {namespace}/{name} that shares cards, or you may not list it")
        if not viewer.nodes:
            for key in ("classes", "hints"):  # reasons for waiting name nodes
                document.pop(key, None)
        if not viewer.everything:
            document = without_strangers(document, viewer, self.rows.namespaces())
        return await packed(msgspec.json.encode(document), request)

    async def _find(self, request: HttpRequest, viewer: Viewer) -> HttpResponse:
        return await packed(msgspec.json.encode(await self._health.document(viewer)), request)

    async def _advise(self, request: HttpRequest, viewer: Viewer) -> HttpResponse:
        """Covers the viewer's own pods; cards to empty are only for viewers who see all of them."""
        usage = self.usage.containers
        seen = {key: each for key, each in usage.items() if viewer.sees(key.partition("/")[0])}
        document = advice_document(advice_of(self.state.cluster(usage), seen))
        if not (viewer.everything and viewer.nodes):
            document["cards"] = []
        return await packed(msgspec.json.encode({**document, "problem": self.usage.problem}), request)

    async def _count_hours(self, request: HttpRequest, viewer: Viewer) -> HttpResponse:
        """GiB-hours and SM-hours of the namespaces that the viewer may see."""
        try:
            (span_s, teams), problem = await self.usage.team_hours(), ""
        except PrometheusError as error:
            span_s, teams, problem = 0.0, {}, str(error)
        hours = [
            {"namespace": name, "held": each.held_gib, "used": each.used_gib, "sm": each.sm}
            for name, each in teams.items()
            if viewer.sees(name)
        ]
        document = {"span": round(span_s), "hours": hours, "problem": problem}
        return await packed(msgspec.json.encode(document), request)

    async def _simulate(self, request: HttpRequest, viewer: Viewer) -> HttpResponse:
        """Only for viewers who may see the whole cluster, as it counts everybody's pods."""
        whole = viewer.everything and viewer.nodes
        return await packed(msgspec.json.encode(await self._what_if.document() if whole else {}), request)

    # -- metrics -------------------------------------------------------------------------------------------

    def families(self) -> list[Family]:
        gauges = (
            ("pods", "Pods that share cards, as the console knows them.", len(self.state.pods)),
            ("nodes", "Nodes that the console knows.", len(self.state.nodes)),
            ("viewers", "Pages that wait for news just now.", self._viewers),
            ("explaining_seconds", "How long the last pass over waiting pods took.", self._waiting.pass_s),
        )
        found = []
        for name, words, value in gauges:
            found.append(Family(f"gpuslice_console_{name}", MetricKind.GAUGE, words))
            found[-1].add(value)
        waiting = Family("gpuslice_console_waiting_pods", MetricKind.GAUGE, "Pods that wait, by why.")
        for why, count in sorted(self._waiting.counts().items()):
            waiting.add(count, labels({"why": why}))
        found.append(waiting)
        answers = Family(
            "gpuslice_console_answers_total",
            MetricKind.COUNTER,
            "Documents of the cluster sent: whole, or changes.",
        )
        for kind, count in sorted(self._answers.items()):
            answers.add(count, labels({"kind": kind}))
        return [*found, answers]


async def serve(settings: ConsoleSettings) -> None:
    connection = connect(
        os.environ,
        kubeconfig=settings.kubeconfig,
        context=settings.context,
        namespace=settings.namespace,
        interactive=settings.access == "kubeconfig",
    )

    def listening(address: str) -> None:
        if settings.access == "kubeconfig":
            click.echo(f"The console is at {address}\nIt changes nothing. Ctrl-C ends it.")
            if settings.open_browser:
                webbrowser.open(address)

    async with HttpTransport(connection, connections=40) as transport:
        await Console(settings, transport, without_login(connection.server).partition("://")[2]).run(
            until_stopped(), listening
        )


def start(settings: ConsoleSettings) -> None:
    """Run the process until it is told to end."""
    configure_logs(settings.log_level)
    share_one_arena()
    run(serve(settings))
