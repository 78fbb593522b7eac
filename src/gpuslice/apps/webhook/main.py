"""The webhook process: answers the API server about pods. Of the cluster it knows at most where agents run.

Every replica gives the same answers and keeps no state, so any number of them may run and any may end.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import gpuslice
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.limits import Limits
from gpuslice.adapters.web.app import Handler, Probes, make_app, post
from gpuslice.adapters.web.exposition import Family, MetricKind, labels, page_of
from gpuslice.adapters.web.histogram import WORK_S, Histogram
from gpuslice.adapters.web.logs import configure_logs
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, json_answer
from gpuslice.adapters.web.process import ProcessMetrics
from gpuslice.adapters.web.serve import Listen, run, serving, until_stopped, work_until
from gpuslice.adapters.wire.errors import MalformedError
from gpuslice.adapters.wire.review import AdmissionRequest, decode_review
from gpuslice.apps.webhook.agents import Agents
from gpuslice.apps.webhook.reviews import Reviewer
from gpuslice.apps.webhook.settings import WebhookSettings

_log = logging.getLogger(__name__)

Decide = Callable[[AdmissionRequest], dict[str, Any]]

WEB_LIMITS = Limits(body_bytes=24 << 20)
"""Two pods, the old and the new one: etcd keeps up to 1.5 MiB of each, and a byte may be six in JSON.

A larger review would fail, and be ignored if the failure policy says so.
"""


class Webhook:
    """Everything of one webhook process."""

    def __init__(self, settings: WebhookSettings, agents: Agents | None = None) -> None:
        self.settings = settings
        self.agents = agents
        self.reviewer = Reviewer(settings.rules, settings.hami, settings.kai, WEB_LIMITS, agents)
        self._reviews: Counter[tuple[str, str]] = Counter()
        self._times = Histogram(
            "gpuslice_webhook_review_seconds", "Time to decide a review.", ("verb",), WORK_S
        )

    async def run(self, stopped: Awaitable[None], listening: Callable[[int], None] = lambda _: None) -> None:
        """Serve until `stopped`; `listening` is called with the port."""
        routes = [
            post("/mutate", self._handler("mutate", self.reviewer.mutate)),
            post("/claim", self._handler("claim", self.reviewer.claim)),
            post("/validate", self._handler("validate", self.reviewer.validate)),
        ]
        listen = Listen(
            self.settings.port,
            self.settings.host,
            certificate=self.settings.tls_certificate,
            key=self.settings.tls_key,
            limits=WEB_LIMITS,
        )
        process = ProcessMetrics(listen.certificate)
        not_ready = self.agents.not_ready if self.agents is not None else lambda: ""
        probes = Probes(gpuslice.__version__, not_ready, page_of(self.families), process)
        async with probes.process.measured(), serving(make_app(probes, routes), listen) as port:
            listening(port)
            await work_until(stopped, {"agents": self.agents.run()} if self.agents is not None else {})

    def _handler(self, verb: str, decide: Decide) -> Handler:
        def handle(request: HttpRequest) -> HttpResponse:
            began = time.perf_counter()
            try:
                review = decode_review(request.body, WEB_LIMITS)
                found = decide(review)
            except MalformedError as error:
                self._count(verb, "malformed", began)
                _log.warning("review not understood", extra={"verb": verb, "error": str(error)})
                return json_answer({"error": str(error)}, 400)
            response = found["response"]
            if not response["allowed"]:
                pod, reason = f"{review.namespace}/{review.name}", response["status"]["message"]
                _log.info("denied", extra={"verb": verb, "pod": pod, "reason": reason})
                self._count(verb, "denied", began)
            else:
                self._count(verb, "changed" if "patch" in response else "allowed", began)
            return json_answer(found)

        return handle

    def _count(self, verb: str, outcome: str, began: float) -> None:
        self._reviews[verb, outcome] += 1
        self._times.observe(time.perf_counter() - began, verb)

    def families(self) -> list[Family]:
        reviews = Family("gpuslice_webhook_reviews_total", MetricKind.COUNTER, "Reviews answered, by result.")
        for (verb, outcome), count in sorted(self._reviews.items()):
            reviews.add(count, labels({"verb": verb, "outcome": outcome}))
        return [reviews, self._times.family()]


def start(settings: WebhookSettings) -> None:
    """Run the process until it is told to end."""

    async def main() -> None:
        if not settings.agent_account:
            await Webhook(settings).run(until_stopped())
            return
        async with HttpTransport(connect(os.environ, kubeconfig=settings.kubeconfig)) as transport:
            agents = Agents(KubeClient(transport), settings.agent_account)
            await Webhook(settings, agents).run(until_stopped())

    configure_logs(settings.log_level)
    run(main())
