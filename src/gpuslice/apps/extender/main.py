"""The extender process: wires everything and starts named tasks.

Ready means: the cluster has been read, this replica may bind, and nothing that an earlier leader began can
still happen behind our back. Until then every verb answers with the reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Awaitable, Callable

import gpuslice
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.events import EventRecorder
from gpuslice.adapters.kube.lease import LeaseElector, LeaseSettings
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.web.app import Probes, for_known_clients, get, make_app
from gpuslice.adapters.web.exposition import Family, page_of
from gpuslice.adapters.web.logs import configure_logs
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, text_answer
from gpuslice.adapters.web.serve import Listen, run, serving, until_stopped
from gpuslice.apps.extender.binder import Binder
from gpuslice.apps.extender.leadership import LeaderLabel, Leadership, OwnPod
from gpuslice.apps.extender.metrics import ApiTimes, Metrics, TimedTransport
from gpuslice.apps.extender.nomination.nominator import LIMITS, NominationLimits, Nominator
from gpuslice.apps.extender.placer import Placer
from gpuslice.apps.extender.pod_events import PodEvents
from gpuslice.apps.extender.preemption.preemptor import Preemptor
from gpuslice.apps.extender.preemption.reservations import Reservations
from gpuslice.apps.extender.rank_prewarmer import RankPrewarmer
from gpuslice.apps.extender.routes import Routes
from gpuslice.apps.extender.scheduling_cycle import SchedulingCycle
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.apps.extender.stranded_pods import StrandedPods
from gpuslice.apps.extender.waker import Waker
from gpuslice.apps.extender.world import World
from gpuslice.apps.settings import shown
from gpuslice.core.ledger import Ledger
from gpuslice.core.policy import make_policy

_log = logging.getLogger(__name__)

LARGEST_QUESTION_BYTES = 128 << 20
"""Whole nodes of a large cluster, from a kube-scheduler that was not told ``nodeCacheCapable``."""

COMPONENT = "gpushare-schd-extender"
FIRST_LEASE_S = 1.0  # how long the start waits for the lease, so that the first list is already the leader's
RESOLVE_EVERY_S = 15.0
TEND_EVERY_S = 0.05
CONNECTIONS = 40  # to the API server: a burst of binds beside the nominations that must not wait for them


class Extender:
    """Everything of one extender around a Kubernetes client: who needs whom, from the ledger upward."""

    def __init__(
        self,
        settings: ExtenderSettings,
        client: KubeClient,
        api_times: ApiTimes | None = None,
        *,
        nomination_limits: NominationLimits = LIMITS,
    ) -> None:
        self.settings = settings
        self.ledger = Ledger()
        self.policy = make_policy(settings.policy, self.ledger.fleet, renew_when_asked=False)
        self.prewarmer = RankPrewarmer(self.policy, self.ledger.fleet)
        self.ledger.listener = self.prewarmer
        self.placer = Placer(self.ledger, self.policy, settings.filter_best)
        self.leadership = Leadership()
        if settings.leader_elect:
            self.leadership.elector = LeaseElector(client, lease_of(settings), changed=self._lease_changed)
        self.events = PodEvents(EventRecorder(client, COMPONENT))
        self.waker = Waker(client, self.leadership)
        self.reservations = Reservations(self.ledger, self.waker.free_again)
        self.nominator = Nominator(
            client,
            self.placer,
            self.reservations,
            self.leadership,
            enabled=settings.nominate,
            limits=nomination_limits,
        )
        self.world = World(client, self.ledger, self.nominator, self.waker, self.events)
        self.preemptor = Preemptor(
            client,
            self.ledger,
            self.reservations,
            self.leadership,
            self.events,
            enabled=settings.preemption,
        )
        self.binder = Binder(
            client,
            self.placer,
            self.nominator,
            self.world,
            self.leadership,
            timeout_s=settings.bind_timeout_s,
        )
        self.stranded = StrandedPods(self.placer, self.waker, self.leadership)
        self.cycle = SchedulingCycle(
            self.placer,
            self.nominator,
            self.preemptor,
            self.stranded,
            self.binder,
            events=self.events,
            explain=settings.explain_refusals,
            replica=settings.lease_identity or platform.node(),
        )
        self.metrics = Metrics(self.ledger, api_times or ApiTimes())
        pod = OwnPod(settings.lease_namespace, settings.lease_identity)
        self.label = LeaderLabel(client, pod, leads=lambda: not self.not_ready())

    def not_ready(self) -> str:
        """Why nothing may be decided yet, "" when it may."""
        return self.not_prepared() or self.leadership.why_not()

    def not_prepared(self) -> str:
        """Why this replica could not even stand in for the leader, "" when it could."""
        return "" if self.world.synced else "the cluster has not been read yet"

    async def run(self, stopped: Awaitable[None], listening: Callable[[int], None] = lambda _: None) -> None:
        """Serve until `stopped`; `listening` hears the port."""
        routes = Routes(
            self.cycle,
            self.nominator,
            self.metrics,
            not_ready=self.not_ready,
            debug=lambda: {"settings": shown(self.settings), "policy": self.policy.name},
            bind_errors_as_500=self.settings.bind_errors_as_500,
        ).routes()
        if self.settings.tls_client_ca:  # what decides or changes something is for kube-scheduler alone
            routes = [for_known_clients(each) if each.method == "POST" else each for each in routes]

        def prepared(_: HttpRequest) -> HttpResponse:
            reason = self.not_prepared()
            return text_answer(reason or "ok", 503 if reason else 200)

        probes = Probes(gpuslice.__version__, self.not_ready, page_of(self._families))
        app = make_app(probes, [*routes, get("/prepared", prepared)])
        async with asyncio.TaskGroup() as tasks:
            background = tasks.create_task(self.work(), name="extender")
            async with serving(app, listen_of(self.settings)) as port:
                _log.info("extender started", extra={"port": port, "policy": self.policy.name})
                listening(port)
                await stopped
            background.cancel()

    async def work(self) -> None:
        """All that goes on beside the requests."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.events.run(), name="pod events")
            if self.leadership.elector is not None:
                tasks.create_task(self.leadership.elector.run(), name="lease")
                try:
                    async with asyncio.timeout(FIRST_LEASE_S):
                        await self.leadership.changed.wait()
                except TimeoutError:
                    _log.info("standing by", extra={"lease": self.settings.lease_name})
            led_at_start = self.leadership.leading
            tasks.create_task(self.world.run(), name="world")
            tasks.create_task(self._take_over(fresh=led_at_start), name="take over")
            tasks.create_task(self._resolve(), name="resolve binds")
            tasks.create_task(self._tend(), name="tend policy")
            tasks.create_task(self.preemptor.run(), name="preempt")
            tasks.create_task(self.nominator.run(), name="nominate")
            tasks.create_task(self.waker.run(), name="wake")
            tasks.create_task(self.stranded.run(), name="stranded pods")
            if self.settings.label_leader:
                tasks.create_task(self.label.run(), name="label of the leader")

    async def _take_over(self, fresh: bool) -> None:
        """Each time we become leader: read what the last one did, take back what it did not finish.

        `fresh`: the first list was made as leader, so it needs no second one.
        """
        await self.world.until_synced()
        while True:
            self.leadership.changed.clear()
            if self.leadership.leading and not self.leadership.cleared:
                try:
                    if not fresh:
                        await self.world.reread_pods()
                    await self.binder.withdraw_unbound()
                except KubeError as error:
                    _log.warning("take-over delayed", extra={"error": str(error)})
                    await asyncio.sleep(1.0)
                    self.leadership.changed.set()
                else:
                    self.leadership.cleared = True
                    self.waker.wake()
                    _log.info("ready", extra={"nodes": len(self.ledger.node_names())})
            fresh = False
            await self.leadership.changed.wait()

    async def _resolve(self) -> None:
        """Placements that no watch event confirmed are asked about; only an answer ends them."""
        waiting: set[str] = set()
        while True:
            await asyncio.sleep(RESOLVE_EVERY_S)
            waiting = await self.binder.resolve_waiting(waiting)

    async def _tend(self) -> None:
        """Do between the requests, in small pieces, what would else be done in one."""
        await self.world.until_synced()
        while True:
            shape = self.prewarmer.next_unranked()
            self.cycle.prewarm(shape)
            more = self.policy.tend() or shape is not None
            await asyncio.sleep(0 if more else TEND_EVERY_S)

    def _lease_changed(self, leading: bool) -> None:
        if not leading:
            self.leadership.cleared = False
            self.nominator.retire()
        self.leadership.changed.set()

    def _families(self) -> list[Family]:
        return self.metrics.families(
            ready=not self.not_ready(),
            leading=self.leadership.leading,
            sampled=self.cycle.refusals.sampled,
            preemptions=self.preemptor.results,
            preempted=self.preemptor.evictor.evicted,
            nominations=self.nominator.results,
            wakeups=self.stranded.woken,
        )


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


def listen_of(settings: ExtenderSettings) -> Listen:
    return Listen(
        port=settings.port,
        host=settings.host,
        certificate=settings.tls_certificate,
        key=settings.tls_key,
        client_ca=settings.tls_client_ca,
        body_limit_bytes=LARGEST_QUESTION_BYTES,
    )


def start(settings: ExtenderSettings) -> None:
    """The process, until it is told to end."""
    configure_logs(settings.log_level)

    async def serve() -> None:
        connection = connect(os.environ, kubeconfig=settings.kubeconfig)
        async with HttpTransport(
            connection, timeout_s=settings.api_timeout_s, connections=CONNECTIONS
        ) as transport:
            times = ApiTimes()
            client = KubeClient(TimedTransport(transport, times), manager=COMPONENT)
            await Extender(settings, client, times).run(until_stopped())

    run(serve())
