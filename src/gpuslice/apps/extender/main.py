"""The extender process: wires everything together and starts named tasks.

Ready means: the cluster has been read, this replica may bind, and nothing that an earlier leader began can
still take effect. Until then every verb answers with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import gpuslice
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.events import EventRecorder
from gpuslice.adapters.kube.lease import LeaseElector, LeaseSettings
from gpuslice.adapters.kube.reviews import PathReviews
from gpuslice.adapters.kube.transport import HttpTransport, TimedTransport
from gpuslice.adapters.limits import Limits
from gpuslice.adapters.otlp.exporter import exporter_to
from gpuslice.adapters.web.app import (
    Probes,
    Route,
    for_bearers,
    for_known_clients,
    for_operators,
    get,
    make_app,
)
from gpuslice.adapters.web.clients import App, Clients
from gpuslice.adapters.web.exposition import Family, page_of
from gpuslice.adapters.web.histogram import Histogram
from gpuslice.adapters.web.logs import configure_logs
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, json_answer, text_answer
from gpuslice.adapters.web.process import ProcessMetrics
from gpuslice.adapters.web.serve import Listen, memory_limit_bytes, run, serving, until_stopped
from gpuslice.adapters.wire.extender import Questions
from gpuslice.apps.extender.autoscaling.node_groups import NodeGroups
from gpuslice.apps.extender.autoscaling.placeholders import CapacityBuffers, PlaceholderPods
from gpuslice.apps.extender.autoscaling.scale_down import ScaleDown
from gpuslice.apps.extender.autoscaling.scale_up import ScaleUp
from gpuslice.apps.extender.binder import MOST_AT_ONCE, Binder, BindResolver
from gpuslice.apps.extender.cluster_watch import ClusterWatch
from gpuslice.apps.extender.gated_groups import GatedGroups
from gpuslice.apps.extender.kubelet_rejections import KubeletRejections
from gpuslice.apps.extender.kueue.card_fit import CardFit
from gpuslice.apps.extender.leadership import BindFence, LeaderLabel, Leadership, LeadersTransport, OwnPod
from gpuslice.apps.extender.metrics import Metrics, api_times
from gpuslice.apps.extender.placer import Placer
from gpuslice.apps.extender.pod_groups import PodGroups
from gpuslice.apps.extender.pod_records import Decisions, PodEvents, PodTraces
from gpuslice.apps.extender.preemption.evictor import Evictor, Reserver
from gpuslice.apps.extender.preemption.pending_evictions import PendingEvictions
from gpuslice.apps.extender.preemption.preemptor import Preemptor
from gpuslice.apps.extender.resizer import Resizer
from gpuslice.apps.extender.routes import PREFIX, Routes
from gpuslice.apps.extender.scheduling_cycle import SchedulingCycle
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.apps.extender.speedups.batch_preemptor import BatchPreemptor
from gpuslice.apps.extender.speedups.nominator import LIMITS, NominationLimits, Nominator
from gpuslice.apps.extender.subscriber import Shortcuts, Subscriber
from gpuslice.apps.extender.waker import StrandedPods, Waker
from gpuslice.apps.settings import shown
from gpuslice.core.hold import HoldKind
from gpuslice.core.ledger import Ledger
from gpuslice.core.policy import make_policy
from gpuslice.core.policy.prewarmer import RankPrewarmer

_log = logging.getLogger(__name__)

WEB_LIMITS = Limits(body_bytes=64 << 20, values=2_000_000)
"""Enough for whole nodes of a large cluster, from a kube-scheduler without ``nodeCacheCapable``."""

WITHOUT_CERTIFICATE = ("/version", "/healthz", "/livez", "/readyz", "/prepared")
"""kubelet's probes and the doctor have no certificate."""
ANONYMOUS = {"inspect": f"{PREFIX}/inspect", "metrics": "/metrics"}

Work = Callable[[], Coroutine[Any, Any, None]]

COMPONENT = "gpushare-schd-extender"
FIRST_LEASE_S = 1.0  # so that, if possible, the first list is already made as leader
LOOK_AGAIN_S = 1.0
RESOLVE_EVERY_S = 15.0
PREPARE_EVERY_S = 0.05
CONNECTIONS = MOST_AT_ONCE + LIMITS.at_once + 8
"""To the API server: no bind waits for another's, nor a nomination."""


class Extender:
    """Everything of one extender around a Kubernetes client, wired from the ledger upward."""

    _clients: Clients | None = None  # of the server, once it exists

    def __init__(
        self,
        settings: ExtenderSettings,
        client: KubeClient,
        *,
        api: Histogram | None = None,
        nomination_limits: NominationLimits = LIMITS,
        with_speedups: bool = True,
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.settings, self._client, self.process = settings, client, ProcessMetrics()
        self.ledger = ledger = Ledger(now_s=lambda: now_ns() / 1e9)
        self.policy = policy = make_policy(settings.policy, ledger.fleet, renew_when_asked=False)
        ledger.listener = self._prewarmer = RankPrewarmer(policy)
        self.leadership = leadership = Leadership()
        if settings.leader_elect:
            lease, changed, date = lease_of(settings), self._lease_changed, partial(_date, now_ns)
            leadership.elector = LeaseElector(client, lease, changed=changed, clock=clock, now=date)
        leaders = client.over(lambda wire: LeadersTransport(wire, leadership))

        self._events = events = EventRecorder(client, COMPONENT, clock=clock, now_ns=now_ns)
        self.pod_events = PodEvents(events, clock=clock)
        self.spans = exporter_to(settings.otlp_endpoint, settings.otlp_headers, COMPONENT)
        traces = PodTraces(self.spans, now_ns)
        self.decisions = Decisions(policy.name, settings.lease_identity or platform.node())
        self.metrics = Metrics(ledger, api or api_times())
        self.rejections = KubeletRejections(ledger, events)

        self.placer = placer = Placer(ledger, policy, settings.filter_best)
        self.waker = waker = Waker(leaders)
        self.stranded = StrandedPods(placer, waker)
        self.groups = groups = PodGroups(GatedGroups(leaders, placer, waker, events, clock=clock), placer)
        reserver = Reserver(ledger, waker.free_again)
        evictor = Evictor(leaders, ledger, reserver, events)
        self.preemptor = preemptor = Preemptor(client, ledger, reserver, evictor, enabled=settings.preemption)
        answered = preemptor.leave_to_scheduler
        self.evictions = evictions = PendingEvictions(client, ledger, evictor.victims_for, answered)
        self.fence = fence = BindFence(leadership)
        self.resizer = Resizer(leaders, ledger, self.pod_events, now_ns=now_ns)
        records = (self.pod_events, self.metrics.pods, traces, self.decisions)
        self.subscribers: list[Subscriber] = [  # in no order: the ledger is up to date for each
            *records, self.rejections, fence, waker, self.stranded,
            groups.gated, groups.tried, preemptor, evictions, self.resizer,
        ]  # fmt: skip
        self.shortcuts, self._optional = Shortcuts(), dict[str, Work]()
        if with_speedups:
            self._speed_up(leaders, nomination_limits)
        self._tell_autoscalers(leaders)
        self._answer_kueue(leaders)
        self.binder = Binder(
            leaders, placer, self.shortcuts, fence, BindResolver(client, ledger, now_ns=now_ns),
            traces=traces, timeout_s=settings.bind_timeout_s, now_ns=now_ns,
        )  # fmt: skip
        self.watch = ClusterWatch(client, ledger, self.subscribers, clock=clock)
        self.cycle = SchedulingCycle(
            placer, groups, evictions, self.binder, self.shortcuts,
            subscribers=self.subscribers, explain=settings.explain_refusals,
        )  # fmt: skip
        self._reviews = PathReviews(client, WEB_LIMITS, clock)

    def _speed_up(self, leaders: KubeClient, limits: NominationLimits) -> None:
        """Wire what only saves time. Nothing else knows of it."""
        search = self.settings.nominate_from if self.settings.nominate else 0
        self.shortcuts = nominator = Nominator(leaders, self.placer, search=search, limits=limits)
        batch = BatchPreemptor(leaders, self.placer, nominator, self.preemptor, self.evictions)
        self.evictions.ahead = batch.follow
        self.subscribers.append(nominator)
        self._optional |= {"nominate": nominator.run, "preempt ahead": batch.run}

    def _tell_autoscalers(self, leaders: KubeClient) -> None:
        """Wire what only speaks to autoscalers, or takes back what was said. Nothing else knows of it."""
        ledger, policy, how = self.ledger, self.policy.name, self.settings.autoscaling
        groups = NodeGroups(ledger)
        down = ScaleDown(leaders, ledger, groups, policy, enabled=how != "off")
        self.subscribers.append(down)
        self._optional["scale down"] = down.run
        if how != "off":
            kind = CapacityBuffers if how == "buffers" else PlaceholderPods
            up = ScaleUp(ledger, groups, kind(leaders, self.settings.lease_namespace), policy)
            self.subscribers += [groups, up]
            self._optional["scale up"] = up.run

    def _answer_kueue(self, leaders: KubeClient) -> None:
        if not self.settings.card_fit:
            return
        card_fit = CardFit(self._client, leaders, self.placer, self.ledger.kubelets.now_s)
        self.subscribers.append(card_fit)
        self._optional["card fit"] = card_fit.run

    def not_ready(self) -> str:
        """Why nothing may be decided yet, or "" if it may."""
        return self.not_prepared() or self.leadership.why_not()

    def not_prepared(self) -> str:
        """Why this replica could not take over from the leader now, or "" if it could."""
        return "" if self.watch.synced else "the cluster has not been read yet"

    async def run(self, stopped: Awaitable[None], listening: Callable[[int], None] = lambda _: None) -> None:
        """Serve until `stopped`; `listening` is called with the port."""
        # of all in flight an eighth of the container's limit: reading one takes several times its bytes
        settings, all_bytes = self.settings, WEB_LIMITS.all_bytes
        if (memory_bytes := memory_limit_bytes()) is not None:
            all_bytes = min(all_bytes, memory_bytes // 8)
        listen = Listen(
            port=settings.port,
            host=settings.host,
            certificate=settings.tls_certificate,
            key=settings.tls_key,
            client_ca=settings.tls_client_ca,
            client_names=frozenset(settings.tls_client_names),
            http2=settings.http2,
            admit=self._admit,
            limits=replace(WEB_LIMITS, all_bytes=all_bytes),
        )
        async with asyncio.TaskGroup() as tasks:
            background = tasks.create_task(self.work(), name="extender")
            self.process.certificates = (listen.certificate, listen.client_ca)
            self.process.tokens_in_clear = settings.debug_tokens and not listen.tls
            async with self.process.measured(), serving(self.app(), listen, self._met) as port:
                _log.info("extender started", extra={"port": port, "policy": self.policy.name})
                listening(port)
                await stopped
            background.cancel()

    def app(self) -> App:
        """All routes, each guarded for those whom it serves."""
        routes = Routes(
            self.cycle,
            (self.shortcuts.backpressure, self.binder.backpressure),
            self.metrics,
            self.decisions.latest,
            not_ready=self.not_ready,
            questions=Questions(WEB_LIMITS),
            debug=lambda: {"settings": shown(self.settings), "policy": self.policy.name},
            bind_errors_as_500=self.settings.bind_errors_as_500,
        ).routes()

        def prepared(_: HttpRequest) -> HttpResponse:
            reason = self.not_prepared()
            return text_answer(reason or "ok", 503 if reason else 200)

        probes = Probes(gpuslice.__version__, self.not_ready, page_of(self._families), self.process)
        app = make_app(probes, [*routes, get("/prepared", prepared)], self._guarded)
        return for_bearers(app, self._reviews.allows) if self.settings.debug_tokens else app

    def _guarded(self, route: Route) -> Route:
        """What decides is for kube-scheduler alone; what only reads, also for clients on this machine."""
        if not self.settings.tls_client_ca or route.path in WITHOUT_CERTIFICATE:
            return route
        if route.method == "POST":
            return for_known_clients(route)
        open_to_all = route.path.startswith(tuple(ANONYMOUS[each] for each in self.settings.anonymous))
        return route if open_to_all else for_operators(route)

    def _admit(self, request: HttpRequest) -> int | HttpResponse:
        """Only clients that may ask can send a body: from others not a byte is kept."""
        if request.method != "POST":
            return 0
        if self.settings.tls_client_ca and not request.known:
            return json_answer({"error": f"{request.path} needs a certificate of the CA for clients"}, 403)
        return WEB_LIMITS.object_bytes if request.path.endswith("/bind") else WEB_LIMITS.body_bytes

    def _met(self, clients: Clients) -> None:
        self._clients = clients

    async def work(self) -> None:
        """All tasks besides serving requests."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._events.run(), name="events")
            if self.leadership.elector is not None:
                tasks.create_task(self.leadership.elector.run(), name="lease")
                try:
                    async with asyncio.timeout(FIRST_LEASE_S):
                        await self.leadership.changed.wait()
                except TimeoutError:
                    _log.info("standing by", extra={"lease": self.settings.lease_name})
            led_at_start = self.leadership.leading
            tasks.create_task(self.watch.run(), name="watch the cluster")
            tasks.create_task(self._take_over(fresh=led_at_start), name="take over")
            for name, work in self._tasks().items():
                tasks.create_task(work(), name=name)

    def _tasks(self) -> dict[str, Work]:
        """What runs once the watches have begun, for ever."""
        always: dict[str, Work] = {
            "look at the lease": self.fence.run,
            "resolve binds": self._resolve,
            "prepare answers": self._prepare,
            "preempt": self.preemptor.run,
            "resize": self.resizer.run,
            "wake": self.waker.run,
            "version": self.waker.learn_version,
            "stranded pods": self.stranded.run,
            "pod groups": self.groups.run,
        }
        if self.spans is not None:
            always["spans"] = self.spans.run
        if self.settings.label_leader:
            pod = OwnPod(self.settings.lease_namespace, self.settings.lease_identity)
            label = LeaderLabel(self._client, pod, leads=lambda: not self.not_ready())
            always["label of the leader"] = label.run
        return always | self._optional

    async def _take_over(self, fresh: bool) -> None:
        """Whenever we become leader: read what the last leader did, and undo what it did not finish.

        `fresh`: the first list was made as leader, so no second one is needed.
        """
        await self.watch.until_synced()
        while True:
            self.leadership.changed.clear()
            if self.leadership.leading and not self.leadership.cleared:
                try:
                    if not fresh:
                        await self.watch.reread_pods()
                    await self.binder.fence()
                except KubeError as error:
                    _log.warning("takeover delayed", extra={"error": str(error)})
                    await asyncio.sleep(1.0)
                    self.leadership.changed.set()
                else:
                    if not self.leadership.changed.is_set():  # else another replica may have led meanwhile
                        self.leadership.cleared = True
                        for each in self.subscribers:
                            each.started_leading()
                        _log.info("ready", extra={"nodes": len(self.ledger.node_names())})
            fresh = False
            # a late renewal of the lease makes us leader again without an event
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self.leadership.cleared else LOOK_AGAIN_S):
                    await self.leadership.changed.wait()

    async def _resolve(self) -> None:
        """Ask about placements that no watch event has confirmed; only an answer ends them."""
        waiting: set[str] = set()
        while True:
            await asyncio.sleep(RESOLVE_EVERY_S)
            waiting = await self.binder.resolve_waiting(waiting)

    async def _prepare(self) -> None:
        """Do in small pieces between requests what would otherwise be done within one."""
        await self.watch.until_synced()
        while True:
            shape = self._prewarmer.next_unranked()
            self.cycle.prepare(shape)
            more = self.policy.maintain() or shape is not None
            await asyncio.sleep(0 if more else PREPARE_EVERY_S)

    def _lease_changed(self, leading: bool) -> None:
        if not leading:
            self.leadership.cleared = False
            for hold in self.ledger.holds.of_kind(HoldKind.PROMISED):
                self.ledger.forget(hold.pod.uid)
            for each in self.subscribers:
                each.stopped_leading()
            if self._clients is not None:  # clients then find the new leader through the Service
                self._clients.end_idle()
        self.leadership.changed.set()

    def _families(self) -> list[Family]:
        return [
            *self.rejections.families(),
            *self.metrics.families(
                ready=not self.not_ready(),
                leading=self.leadership.leading,
                sampled=self.cycle.refusals.sampled,
                preemptions=self.preemptor.results,
                preempted=self.preemptor.evictor.evicted,
                nominations=self.shortcuts.results,
                wakeups=self.stranded.woken,
                watch_silent_s=self.watch.silent_s(),
            ),
        ]


def _date(now_ns: Callable[[], int]) -> datetime:
    return datetime.fromtimestamp(now_ns() / 1e9, UTC)


def lease_of(settings: ExtenderSettings) -> LeaseSettings:
    """The lease's times follow from its duration, in client-go's proportions."""
    return LeaseSettings(
        name=settings.lease_name,
        namespace=settings.lease_namespace,
        identity=settings.lease_identity or f"{platform.node()}_{os.getpid()}",
        duration_s=settings.lease_duration_s,
        renew_deadline_s=settings.lease_duration_s * 2 / 3,
        retry_s=settings.lease_duration_s / 7.5,
    )


def start(settings: ExtenderSettings) -> None:
    """Run the process until it is told to end."""
    configure_logs(settings.log_level)

    async def serve() -> None:
        connection = connect(os.environ, kubeconfig=settings.kubeconfig)
        async with HttpTransport(
            connection, timeout_s=settings.api_timeout_s, connections=CONNECTIONS
        ) as transport:
            api = api_times()
            client = KubeClient(TimedTransport(transport, api.observe), manager=COMPONENT)
            await Extender(settings, client, api=api).run(until_stopped())

    run(serve())
