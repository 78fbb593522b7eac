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
from dataclasses import dataclass, field

import gpuslice
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.events import EventRecorder
from gpuslice.adapters.kube.lease import LeaseElector, LeaseSettings
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.web.app import Probes, Route, for_known_clients, get, make_app
from gpuslice.adapters.web.exposition import Family, page_of
from gpuslice.adapters.web.logs import configure_logs
from gpuslice.adapters.web.messages import Request, Response, text_answer
from gpuslice.adapters.web.serve import Listen, run, serving, until_stopped
from gpuslice.adapters.wire.extender import BindingArgs
from gpuslice.apps.extender.asked import Asked
from gpuslice.apps.extender.binding import Binder
from gpuslice.apps.extender.decisions import Decisions
from gpuslice.apps.extender.fences import Fences
from gpuslice.apps.extender.guiding import LIMITS, Guide, GuideLimits
from gpuslice.apps.extender.inspect import Metrics
from gpuslice.apps.extender.leadership import LeaderLabel, OwnPod
from gpuslice.apps.extender.preemptor import Preemptor
from gpuslice.apps.extender.refusals import Refused
from gpuslice.apps.extender.routes import Verbs
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.apps.extender.telling import Teller
from gpuslice.apps.extender.timing import ApiTimes, TimedTransport
from gpuslice.apps.extender.warmth import Arrivals
from gpuslice.apps.extender.world import World
from gpuslice.apps.settings import shown
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement, Pod
from gpuslice.core.policy import make_policy

_log = logging.getLogger(__name__)

LARGEST_QUESTION_BYTES = 128 << 20
"""Whole nodes of a large cluster, from a kube-scheduler that was not told ``nodeCacheCapable``."""

COMPONENT = "gpushare-schd-extender"
FIRST_LEASE_S = 1.0  # how long the start waits for the lease, so that the first list is already the leader's
SETTLE_EVERY_S = 15.0
TEND_EVERY_S = 0.05
CONNECTIONS = 40  # to the API server: a burst of binds beside the nominations that must not wait for them


@dataclass(slots=True)
class Leadership:
    """Whether this replica may bind. Without an elector it always may."""

    elector: LeaseElector | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    cleared: bool = False  # nothing of an earlier leader can happen any more

    @property
    def leading(self) -> bool:
        return self.elector is None or self.elector.leading

    @property
    def may_bind(self) -> bool:
        return self.leading and self.cleared

    def why_not(self) -> str:
        if self.elector is not None and not self.leading:
            if self.elector.lapsed:
                return "not the leader any more: the API server did not renew the lease in time"
            return f"not the leader, that is {self.elector.holder or 'nobody yet'}"
        return "" if self.cleared else "taking over: earlier placements are being settled"


class Extender:
    """Everything of one extender around a Kubernetes client."""

    def __init__(
        self,
        settings: ExtenderSettings,
        client: KubeClient,
        api_times: ApiTimes | None = None,
        *,
        guide_limits: GuideLimits = LIMITS,
    ) -> None:
        self.settings = settings
        self.ledger = Ledger()
        self.policy = make_policy(settings.policy, self.ledger.fleet, renew_when_asked=False)
        self.arrivals = Arrivals(self.policy, self.ledger.fleet)
        self.ledger.listener = self.arrivals
        self.teller = Teller(EventRecorder(client, COMPONENT))
        self.world = World(client, self.ledger, problem=self._tell_problem)
        self.decisions = Decisions(
            self.ledger,
            self.policy,
            filter_best=settings.filter_best,
            explain=settings.explain_refusals,
            on_refused=self._tell_refused,
            on_asked=self._note_asked,
            on_victims=self._leave_to_scheduler,
            hold=self._hold,
        )
        self.leadership = Leadership()
        if settings.leader_elect:
            self.leadership.elector = LeaseElector(client, lease_of(settings), changed=self._lease_changed)
        self.binder = Binder(
            client,
            self.decisions,
            leading=lambda: self.leadership.may_bind,
            written=self._nominated,
            wrote=self.world.own_writes.note,
            timeout_s=settings.bind_timeout_s,
        )
        self.preemptor = Preemptor(
            client,
            self.ledger,
            leading=lambda: self.leadership.may_bind,
            tell=self._tell_preempted,
            enabled=settings.preemption,
        )
        self.guide = Guide(
            client,
            self.decisions,
            self.preemptor.keeping,
            leading=lambda: self.leadership.may_bind,
            enabled=settings.guide,
            limits=guide_limits,
        )
        self.world.onlooker = self.guide
        self.fences = Fences(client, leading=lambda: self.leadership.may_bind)
        self.world.fences = self.fences
        self.preemptor.keeping.on_lapse = lambda placement: self.fences.free_again(
            placement.node, (part.card for part in placement.slices)
        )
        self.metrics = Metrics(self.ledger, api_times or ApiTimes())
        pod = OwnPod(settings.lease_namespace, settings.lease_identity)
        self._label = LeaderLabel(client, pod, leads=lambda: not self.not_ready())

    def not_ready(self) -> str:
        """Why nothing may be decided yet, "" when it may."""
        return self.not_prepared() or self.leadership.why_not()

    def not_prepared(self) -> str:
        """Why this replica could not even stand in for the leader, "" when it could."""
        return "" if self.world.synced else "the cluster has not been read yet"

    async def run(self, stopped: Awaitable[None], listening: Callable[[int], None] = lambda _: None) -> None:
        """Serve until `stopped`; `listening` hears the port."""
        verbs = Verbs(
            ledger=self.ledger,
            decisions=self.decisions,
            binder=self.binder,
            metrics=self.metrics,
            not_ready=self.not_ready,
            on_bind_failed=self._tell_bind_failed,
            settings=lambda: shown(self.settings),
            keep_pace=self.guide.keep_pace,
            bind_errors_as_500=self.settings.bind_errors_as_500,
        )
        probes = Probes(gpuslice.__version__, self.not_ready, page_of(self._families))
        app = make_app(probes, [*self._guarded(verbs.routes()), get("/prepared", self._prepared)])
        async with asyncio.TaskGroup() as tasks:
            background = tasks.create_task(self.work(), name="extender")
            async with serving(app, listen_of(self.settings)) as port:
                _log.info("extender started", extra={"port": port, "policy": self.policy.name})
                listening(port)
                await stopped
            background.cancel()

    def _guarded(self, routes: list[Route]) -> list[Route]:
        """What changes or decides something, for kube-scheduler alone where that can be told."""
        if not self.settings.tls_client_ca:
            return routes
        return [for_known_clients(each) if each.method == "POST" else each for each in routes]

    def _prepared(self, _: Request) -> Response:
        reason = self.not_prepared()
        return text_answer(reason or "ok", 503 if reason else 200)

    async def work(self) -> None:
        """All that goes on beside the requests."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.teller.run(), name="tell")
            if self.leadership.elector is not None:
                tasks.create_task(self.leadership.elector.run(), name="lease")
                await self._wait_for_lease()
            led_at_start = self.leadership.leading
            tasks.create_task(self.world.run(), name="world")
            tasks.create_task(self._take_over(fresh=led_at_start), name="take over")
            tasks.create_task(self._settle(), name="settle")
            tasks.create_task(self._tend(), name="tend policy")
            tasks.create_task(self.preemptor.run(), name="preempt")
            tasks.create_task(self.guide.run(), name="guide")
            tasks.create_task(self.fences.run(), name="fences")
            if self.settings.label_leader:
                tasks.create_task(self._label.run(), name="label of the leader")

    async def _wait_for_lease(self) -> None:
        try:
            async with asyncio.timeout(FIRST_LEASE_S):
                await self.leadership.changed.wait()
        except TimeoutError:
            _log.info("standing by", extra={"lease": self.settings.lease_name})

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
                    self.fences.look()
                    _log.info("ready", extra={"nodes": len(self.ledger.node_names())})
            fresh = False
            await self.leadership.changed.wait()

    async def _settle(self) -> None:
        """Placements that no watch event confirmed are asked about; only an answer ends them."""
        waiting: set[str] = set()
        while True:
            await asyncio.sleep(SETTLE_EVERY_S)
            waiting = await self.binder.settle_waiting(waiting)

    async def _tend(self) -> None:
        """Do between the requests, in small pieces, what would else be done in one."""
        await self.world.until_synced()
        while True:
            shape = self.arrivals.next_unranked()
            self.decisions.warm(shape)
            more = self.policy.tend() or shape is not None
            await asyncio.sleep(0 if more else TEND_EVERY_S)

    def _lease_changed(self, leading: bool) -> None:
        if not leading:
            self.leadership.cleared = False
            self.guide.retire()
        self.leadership.changed.set()

    def _note_asked(self, uid: str, asked: Asked) -> None:
        self.guide.asked(uid, asked)

    def _leave_to_scheduler(self, uid: str) -> None:
        self.preemptor.left_to_scheduler(uid)

    def _hold(self, uid: str, asked: Asked) -> Placement | None:
        return self.guide.hold(uid, asked)

    async def _nominated(self, uid: str) -> None:
        await self.guide.written(uid)

    def _families(self) -> list[Family]:
        return self.metrics.families(
            ready=not self.not_ready(),
            leading=self.leadership.leading,
            sampled=self.decisions.refusals.sampled,
            preemptions=self.preemptor.results,
            preempted=self.preemptor.evictor.evicted,
            guided=self.guide.results,
        )

    # -- what owners are told ------------------------------------------------------------------------------

    def _tell_refused(self, refused: Refused) -> None:
        meta = refused.pod.metadata
        self.teller.warn(meta.namespace, meta.name, meta.uid, "InsufficientGPU", refused.explanation)
        self.preemptor.refused(refused)

    def _tell_bind_failed(self, args: BindingArgs, error: str) -> None:
        self.teller.warn(args.pod_namespace, args.pod_name, args.pod_uid, "GPUBindFailed", error)

    def _tell_preempted(self, pod: Pod, reason: str, message: str) -> None:
        self.teller.note(pod.namespace, pod.name, pod.uid, reason, message)

    def _tell_problem(self, pod: Pod) -> None:
        self.teller.warn(pod.namespace, pod.name, pod.uid, "GPURequestUnreadable", pod.problem)


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
    run(_serve(settings))


async def _serve(settings: ExtenderSettings) -> None:
    """Run the extender against the cluster that the settings name."""
    connection = connect(os.environ, kubeconfig=settings.kubeconfig)
    async with HttpTransport(
        connection, timeout_s=settings.api_timeout_s, connections=CONNECTIONS
    ) as transport:
        times = ApiTimes()
        client = KubeClient(TimedTransport(transport, times), manager=COMPONENT)
        await Extender(settings, client, times).run(until_stopped())
