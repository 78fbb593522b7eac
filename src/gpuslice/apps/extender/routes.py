"""The extender's HTTP: kube-scheduler's verbs, the vendor's inspect, our debug state.

A refusal is an answer, never an HTTP error: kube-scheduler would hide its reason from the user.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from gpuslice.adapters.web.app import Route, get, post
from gpuslice.adapters.web.messages import JSON, Request, Response, json_answer
from gpuslice.adapters.wire.errors import MalformedError
from gpuslice.adapters.wire.extender import (
    BindingArgs,
    BindingResult,
    FilterResult,
    PreemptionResult,
    Questions,
    decode_binding,
    decode_preemption,
)
from gpuslice.apps.extender.binding import Binder
from gpuslice.apps.extender.decisions import Decisions
from gpuslice.apps.extender.inspect import Metrics, debug_nodes, inspect_all, inspect_node
from gpuslice.core.ledger import Ledger

_log = logging.getLogger(__name__)

PREFIX = "/gpushare-scheduler"


@dataclass(frozen=True, slots=True)
class Verbs:
    """What the routes call. `not_ready`: why nothing may be decided yet, "" when it may."""

    ledger: Ledger
    decisions: Decisions
    binder: Binder
    metrics: Metrics
    not_ready: Callable[[], str]
    on_bind_failed: Callable[[BindingArgs, str], None]
    settings: Callable[[], dict[str, Any]]
    keep_pace: Callable[[], Awaitable[None] | None]
    bind_errors_as_500: bool = False
    questions: Questions = field(default_factory=Questions)

    # -- kube-scheduler's verbs ----------------------------------------------------------------------------

    def filter(self, request: Request) -> Response | Awaitable[Response]:
        began = time.perf_counter()
        result = self._filter(request.body)
        answer = Response(content_type=JSON, more=result.pieces())
        self._observe("filter", result.error or ("none" if result.node_names == b"[]" else ""), began)
        waiting = self.keep_pace()
        return answer if waiting is None else _once_over(waiting, answer)

    def _filter(self, body: bytes) -> FilterResult:
        try:
            args = self.questions.decode(body)
            if reason := self.not_ready():
                return FilterResult(error=reason)
            return self.decisions.filter(args)
        except MalformedError as error:
            return FilterResult(error=str(error))

    def prioritize(self, request: Request) -> Response:
        began = time.perf_counter()
        scores = self._prioritize(request.body)
        self._observe("prioritize", "none" if scores == b"[]" else "", began)
        return Response(scores, content_type=JSON)

    def _prioritize(self, body: bytes) -> bytes:
        try:
            return self.decisions.prioritize(self.questions.decode(body))
        except MalformedError as error:
            _log.warning("prioritize not understood", extra={"error": str(error)})
            return b"[]"  # the answer has no place for an error, and the scheduler ignores one

    def preempt(self, request: Request) -> Response:
        began = time.perf_counter()
        try:
            result = self.decisions.preempt(decode_preemption(request.body))
        except MalformedError as error:
            _log.warning("preempt not understood", extra={"error": str(error)})
            result = PreemptionResult({})
        self._observe("preempt", "" if result.node_name_to_meta_victims else "none", began)
        return json_answer(result)

    async def bind(self, request: Request) -> Response:
        began = time.perf_counter()
        error = await self._bind(request.body)
        self._observe("bind", error, began)
        status = 500 if error and self.bind_errors_as_500 else 200
        return json_answer(BindingResult(error), status)

    async def _bind(self, body: bytes) -> str:
        try:
            args = decode_binding(body)
        except MalformedError as error:
            return str(error)
        if reason := self.not_ready():
            return reason
        why_not = await self.binder.bind(args)
        if why_not:
            self.on_bind_failed(args, why_not)
        return why_not

    # -- for people ----------------------------------------------------------------------------------------

    async def inspect(self, _: Request) -> Response:
        return json_answer(await inspect_all(self.ledger))

    def inspect_one(self, request: Request) -> Response:
        answer = inspect_node(self.ledger, request.part)
        return json_answer(answer, 404 if answer.error else 200)

    async def debug_state(self, request: Request) -> Response:
        """Everything known, or of one node with ``?node=``."""
        asked = request.query.get("node")
        names = [asked] if asked else self.ledger.node_names()
        nodes = await debug_nodes(self.ledger, names)
        waiting = [pod.key for pod in self.ledger.pods.values() if not pod.node]
        return json_answer(
            {
                "notReady": self.not_ready(),
                "settings": self.settings(),
                "policy": self.decisions.policy.name,
                "waiting": sorted(waiting),
                "nodes": nodes,
            }
        )

    def _observe(self, verb: str, error: str, began: float) -> None:
        self.metrics.observe(verb, "no" if error else "yes", time.perf_counter() - began)

    def routes(self) -> list[Route]:
        return [
            post(f"{PREFIX}/filter", self.filter),
            post(f"{PREFIX}/prioritize", self.prioritize),
            post(f"{PREFIX}/preempt", self.preempt),
            post(f"{PREFIX}/bind", self.bind),
            get(f"{PREFIX}/inspect", self.inspect),
            get(f"{PREFIX}/inspect/", self.inspect),
            get(f"{PREFIX}/inspect/{{}}", self.inspect_one),
            get("/debug/state", self.debug_state),
        ]


async def _once_over(waiting: Awaitable[None], answer: Response) -> Response:
    await waiting
    return answer
