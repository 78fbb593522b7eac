"""The controller of claim templates: one per namespace and shape, created when a pod refers to it.

Kubernetes retries until a pod's template exists, and an existing claim does not depend on it. So several of
these processes may run at the same time, and none needs to be first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

import gpuslice
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.errors import AlreadyExistsError, ConflictError, KubeError, NotFoundError
from gpuslice.adapters.kube.events import EventRecorder, pod_reference
from gpuslice.adapters.kube.objects import Metadata, PodClaim, PodStatus
from gpuslice.adapters.kube.resources import RESOURCE_CLAIM_TEMPLATES, Resource
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.kube.watch import Change, Reflector
from gpuslice.adapters.web.app import Probes, make_app
from gpuslice.adapters.web.exposition import Family, MetricKind, page_of
from gpuslice.adapters.web.logs import configure_logs
from gpuslice.adapters.web.serve import Listen, run, serving, until_stopped, work_until
from gpuslice.apps.claims.settings import ClaimsSettings
from gpuslice.core.claim_shape import TEMPLATE_PREFIX, claim_shape, template_spec
from gpuslice.core.contract import LABEL_CLAIMED
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.views import FINISHED_PHASES

_log = logging.getLogger(__name__)

LOOK_S = 5.0
RETRY_S = 1.0
MANAGED = {"app.kubernetes.io/managed-by": "gpuslice"}


class ClaimingSpec(msgspec.Struct, rename="camel"):
    resource_claims: list[PodClaim] | None = None


class ClaimingPod(msgspec.Struct):
    """What tells which templates a pod rewritten by the policy needs."""

    metadata: Metadata
    spec: ClaimingSpec
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    def templates(self) -> list[str]:
        if self.status.phase in FINISHED_PHASES:
            return []
        names = (each.resource_claim_template_name or "" for each in self.spec.resource_claims or ())
        return [name for name in names if name.startswith(TEMPLATE_PREFIX)]


CLAIMING_PODS = Resource("v1", "pods", "Pod", ClaimingPod)


class TemplateController:
    """Keeps the templates as pods need them."""

    def __init__(
        self, settings: ClaimsSettings, client: KubeClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.problem = "starting"
        self.made = 0
        self._settings = settings
        self._client = client
        self._clock = clock
        self._events = EventRecorder(client, "gpuslice-claims")
        self._woken = asyncio.Event()
        self._pods: Reflector[ClaimingPod] = Reflector(
            client, CLAIMING_PODS, self._changed, labels=f"{LABEL_CLAIMED}=true"
        )
        labels = ",".join(f"{name}={value}" for name, value in MANAGED.items())
        self._templates = Reflector(client, RESOURCE_CLAIM_TEMPLATES, self._changed, labels=labels)
        self._unused_since: dict[tuple[str, str], float] = {}
        self._told: set[str] = set()  # uids of pods whose owners were told what is wrong

    def _changed(self, _: Change[Any]) -> None:
        self._woken.set()

    async def run(
        self, stopped: Awaitable[object], listening: Callable[[int], None] = lambda _: None
    ) -> None:
        """Run until `stopped`; `listening` is called with the port of health."""

        def families() -> list[Family]:
            made = Family("gpuslice_claims_templates_made_total", MetricKind.COUNTER, "Templates made.")
            made.add(float(self.made))
            there = Family("gpuslice_claims_templates", MetricKind.GAUGE, "Templates that are there.")
            there.add(float(len(self._templates.objects)))
            return [made, there]

        probes = Probes(gpuslice.__version__, lambda: self.problem, page_of(families))
        listen = Listen(self._settings.port, self._settings.host)
        async with probes.process.measured(), serving(make_app(probes), listen) as port:
            listening(port)
            tasks = {"pods": self._pods.run(), "templates": self._templates.run(), "controller": self._keep()}
            await work_until(stopped, tasks)

    async def _keep(self) -> None:
        await self._pods.synced.wait()
        await self._templates.synced.wait()
        while True:
            self._woken.clear()
            try:
                await self.step()
                self.problem = ""
            except KubeError as error:
                self.problem = str(error)
                _log.warning("templates not kept, will try again", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._woken.wait()

    async def step(self) -> None:
        """Create what is missing, and remove what nobody has needed for long.

        Raises `KubeError` for what could not be created, after everything else was: a terminating namespace
        refuses new content, perhaps for ever.
        """
        needed: dict[tuple[str, str], ClaimingPod] = {}
        for pod in self._pods.objects.values():
            for name in pod.templates():
                needed.setdefault((pod.metadata.namespace, name), pod)
        self._told &= {pod.metadata.uid for pod in self._pods.objects.values()}
        failure: KubeError | None = None
        for key in needed.keys() - self._templates.objects.keys():
            try:
                await self._make(*key, needed[key])
            except KubeError as error:
                failure = error
        now_s = self._clock()
        unused = self._templates.objects.keys() - needed.keys()
        self._unused_since = {key: self._unused_since.get(key, now_s) for key in unused}
        for (namespace, name), since_s in self._unused_since.items():
            if now_s - since_s < self._settings.keep_s:
                continue
            meta = self._templates.objects[namespace, name]["metadata"]
            with contextlib.suppress(NotFoundError, ConflictError):
                await self._client.delete(RESOURCE_CLAIM_TEMPLATES, name, namespace, uid=meta["uid"])
                _log.info("template removed", extra={"template": f"{namespace}/{name}"})
        if failure is not None:
            raise failure

    async def _make(self, namespace: str, name: str, pod: ClaimingPod) -> None:
        try:
            shape = claim_shape(name)
        except InvalidRequestError as error:
            if pod.metadata.uid not in self._told:
                self._told.add(pod.metadata.uid)
                about = pod_reference(namespace, pod.metadata.name, pod.metadata.uid)
                await self._events.create_event(about, "GPUClaimImpossible", str(error), type="Warning")
            return
        if shape is None:
            return
        document = {
            "metadata": {"name": name, "namespace": namespace, "labels": MANAGED},
            "spec": template_spec(shape, self._settings.memory_unit),
        }
        try:
            await self._client.create(RESOURCE_CLAIM_TEMPLATES, document)
        except AlreadyExistsError:
            return
        except NotFoundError:  # its namespace is terminating
            return
        self.made += 1
        _log.info("template made", extra={"template": f"{namespace}/{name}"})


def start(settings: ClaimsSettings) -> None:
    """Run the process until it is told to end."""

    async def main() -> None:
        connection = connect(os.environ, kubeconfig=settings.kubeconfig)
        async with HttpTransport(connection) as transport:
            client = KubeClient(transport, manager="gpuslice-claims")
            await TemplateController(settings, client).run(until_stopped())

    configure_logs(settings.log_level)
    run(main())
