"""The webhook process: answers the API server about pods, and knows nothing of the cluster.

Every replica answers alike and keeps nothing, so any number of them may run and any may end.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import gpuslice
from gpuslice.adapters.web.app import Handler, Probes, make_app, post
from gpuslice.adapters.web.connection import App
from gpuslice.adapters.web.exposition import Family, MetricKind, labels, page_of
from gpuslice.adapters.web.logs import configure_logs
from gpuslice.adapters.web.messages import Request, Response, json_answer
from gpuslice.adapters.web.serve import Listen, run, serving, until_stopped
from gpuslice.adapters.wire.errors import MalformedError
from gpuslice.adapters.wire.review import AdmissionRequest, decode_review
from gpuslice.apps.webhook.reviews import Reviewer
from gpuslice.apps.webhook.settings import WebhookSettings

_log = logging.getLogger(__name__)

Decide = Callable[[AdmissionRequest], dict[str, Any]]

LARGEST_REVIEW_BYTES = 16 << 20  # two pods, the old and the new, of which the API server takes 3 MiB each


class Webhook:
    """Everything of one webhook process."""

    def __init__(self, settings: WebhookSettings) -> None:
        self.settings = settings
        self.reviewer = Reviewer(settings.rules, settings.hami)
        self._reviews: Counter[tuple[str, str]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    async def run(self, stopped: Awaitable[None], listening: Callable[[int], None] = lambda _: None) -> None:
        """Serve until `stopped`; `listening` hears the port."""
        async with serving(self._app(), self._listen()) as port:
            listening(port)
            await stopped

    def _app(self) -> App:
        probes = Probes(gpuslice.__version__, lambda: "", page_of(self._families))
        return make_app(
            probes,
            [
                post("/mutate", self._handler("mutate", self.reviewer.mutate)),
                post("/validate", self._handler("validate", self.reviewer.validate)),
            ],
        )

    def _listen(self) -> Listen:
        chosen = self.settings
        return Listen(
            chosen.port,
            chosen.host,
            certificate=chosen.tls_certificate,
            key=chosen.tls_key,
            body_limit_bytes=LARGEST_REVIEW_BYTES,
        )

    def _handler(self, verb: str, decide: Decide) -> Handler:
        def handle(request: Request) -> Response:
            began = time.perf_counter()
            try:
                review = decode_review(request.body)
                found = decide(review)
            except MalformedError as error:
                self._count(verb, "malformed", began)
                _log.warning("review not understood", extra={"verb": verb, "error": str(error)})
                return json_answer({"error": str(error)}, 400)
            self._tell(verb, review, found["response"])
            self._count(verb, _outcome(found["response"]), began)
            return json_answer(found)

        return handle

    def _tell(self, verb: str, review: AdmissionRequest, response: dict[str, Any]) -> None:
        if not response["allowed"]:
            pod = f"{review.namespace}/{review.name}"
            _log.info("denied", extra={"verb": verb, "pod": pod, "reason": response["status"]["message"]})

    def _count(self, verb: str, outcome: str, began: float) -> None:
        self._reviews[verb, outcome] += 1
        self._seconds[verb] += time.perf_counter() - began

    def _families(self) -> list[Family]:
        reviews = Family(
            "gpuslice_webhook_reviews_total", MetricKind.COUNTER, "Reviews answered, by what came of them."
        )
        for (verb, outcome), count in sorted(self._reviews.items()):
            reviews.add(count, labels({"verb": verb, "outcome": outcome}))
        seconds = Family(
            "gpuslice_webhook_review_seconds_total", MetricKind.COUNTER, "Time spent deciding reviews."
        )
        for verb, spent in sorted(self._seconds.items()):
            seconds.add(spent, labels({"verb": verb}))
        return [reviews, seconds]


def _outcome(response: dict[str, Any]) -> str:
    if not response["allowed"]:
        return "denied"
    return "changed" if "patch" in response else "allowed"


def start(settings: WebhookSettings) -> None:
    """The process, until it is told to end."""
    configure_logs(settings.log_level)
    run(Webhook(settings).run(until_stopped()))
