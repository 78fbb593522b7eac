"""The extender's HTTP: kube-scheduler's verbs, the vendor's inspect, our debug state.

A refusal is an answer, never an HTTP error: kube-scheduler would hide its reason from the user.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpuslice.adapters.web.app import Route, for_operators, get, post
from gpuslice.adapters.web.messages import JSON, HttpRequest, HttpResponse, json_answer
from gpuslice.adapters.wire.errors import MalformedError
from gpuslice.adapters.wire.extender import (
    BindingResult,
    ExtenderArgs,
    FilterResult,
    PreemptionResult,
    Questions,
    decode_binding,
)
from gpuslice.adapters.wire.inspection import Inspection, debug_node, inspected
from gpuslice.apps.extender.metrics import Metrics
from gpuslice.apps.extender.scheduling_cycle import SchedulingCycle
from gpuslice.core.holds import NodeHolds
from gpuslice.core.ledger import Ledger

_log = logging.getLogger(__name__)

PREFIX = "/gpushare-scheduler"


@dataclass(frozen=True, slots=True)
class Routes:
    """Bodies to questions, answers to bodies. `not_ready` returns why nothing may be decided yet, or "".

    `backpressure`: what filter's answers wait for, if anything.
    """

    cycle: SchedulingCycle
    backpressure: Sequence[Callable[[], Awaitable[None] | None]]
    metrics: Metrics
    decisions: Iterable[dict[str, Any]]  # the latest binds
    not_ready: Callable[[], str]
    debug: Callable[[], dict[str, Any]]
    questions: Questions
    bind_errors_as_500: bool = False

    # -- kube-scheduler's verbs ----------------------------------------------------------------------------

    def filter(self, request: HttpRequest) -> HttpResponse | Awaitable[HttpResponse]:
        began = time.perf_counter()
        try:
            args = self.questions.decode(request.body)
            if (news := None if self.not_ready() else self.cycle.awaits_news(args)) is None:
                return self._filter(args, began)
        except MalformedError as error:
            return self._filtered(FilterResult(error=str(error)), began)

        async def once_known() -> HttpResponse:
            await news
            answer = self._filter(args, time.perf_counter())
            return answer if isinstance(answer, HttpResponse) else await answer

        return once_known()

    def _filter(self, args: ExtenderArgs, began: float) -> HttpResponse | Awaitable[HttpResponse]:
        return self._filtered(self.cycle.filter(args, self.not_ready()), began)

    def _filtered(self, result: FilterResult, began: float) -> HttpResponse | Awaitable[HttpResponse]:
        answer = HttpResponse(content_type=JSON, more=result.pieces())
        self._observe("filter", bool(result.error) or result.node_names == b"[]", began, answer)
        waits = [wait for each in self.backpressure if (wait := each()) is not None]
        if not waits:
            return answer

        async def answer_then() -> HttpResponse:
            with self.metrics.pauses.timed():
                for wait in waits:
                    await wait
            return answer

        return answer_then()

    def prioritize(self, request: HttpRequest) -> HttpResponse:
        began = time.perf_counter()
        try:
            scores = self.cycle.prioritize(self.questions.decode(request.body))
        except MalformedError as error:
            _log.warning("prioritize not understood", extra={"error": str(error)})
            scores = b"[]"  # this answer cannot carry an error, and the scheduler ignores one
        answer = HttpResponse(scores, content_type=JSON)
        self._observe("prioritize", scores == b"[]", began, answer)
        return answer

    async def preempt(self, request: HttpRequest) -> HttpResponse:
        began = time.perf_counter()
        try:
            args = self.questions.decode_preemption(request.body)
            result = PreemptionResult(dict(await self.cycle.preempt(args.pod, args.victims())))
        except MalformedError as error:
            _log.warning("preempt not understood", extra={"error": str(error)})
            result = PreemptionResult({})
        answer = json_answer(result)
        self._observe("preempt", not result.node_name_to_meta_victims, began, answer)
        return answer

    async def bind(self, request: HttpRequest) -> HttpResponse:
        began = time.perf_counter()
        try:
            args = decode_binding(request.body)
            error = self.not_ready() or await self.cycle.bind(args)
        except MalformedError as malformed:
            error = str(malformed)
        answer = json_answer(BindingResult(error), 500 if error and self.bind_errors_as_500 else 200)
        self._observe("bind", bool(error), began, answer)
        return answer

    def _observe(self, verb: str, no: bool, began: float, answer: HttpResponse) -> None:
        """Count it, and close the connection if we do not lead, so that the Service leads the client on."""
        self.metrics.observe(verb, "no" if no else "yes", time.perf_counter() - began)
        if self.not_ready():
            self.metrics.asked_while_not_ready += 1
            answer.last = True

    # -- for people ----------------------------------------------------------------------------------------

    async def inspect(self, _: HttpRequest) -> HttpResponse:
        return json_answer(await inspect_all(self.cycle.ledger))

    def inspect_one(self, request: HttpRequest) -> HttpResponse:
        answer = inspect_node(self.cycle.ledger, request.part)
        return json_answer(answer, 404 if answer.error else 200)

    async def debug_state(self, request: HttpRequest) -> HttpResponse:
        """Everything known, or of one node with ``?node=``."""
        ledger, asked = self.cycle.ledger, request.query.get("node")
        nodes = await debug_nodes(ledger, [asked] if asked else ledger.node_names())
        waiting = sorted(pod.key for pod in ledger.pods.values() if not pod.node)
        return json_answer({"notReady": self.not_ready(), **self.debug(), "waiting": waiting, "nodes": nodes})

    def routes(self) -> list[Route]:
        return [
            post(f"{PREFIX}/filter", self.filter),
            post(f"{PREFIX}/prioritize", self.prioritize),
            post(f"{PREFIX}/preempt", self.preempt),
            post(f"{PREFIX}/bind", self.bind),
            get(f"{PREFIX}/inspect", self.inspect),
            get(f"{PREFIX}/inspect/", self.inspect),
            get(f"{PREFIX}/inspect/{{}}", self.inspect_one),
            for_operators(get("/debug/state", self.debug_state)),
            for_operators(get("/debug/decisions", lambda _: json_answer(list(self.decisions)))),
        ]


SLICE = 200  # nodes described before other requests get their turn


async def inspect_all(ledger: Ledger) -> Inspection:
    """Every node with shared cards, sorted by name; each is consistent in itself."""
    known = _known(ledger, ledger.node_names())
    return Inspection([inspected(each) async for each in known if each.node is not None and each.node.cards])


async def _known(ledger: Ledger, names: Iterable[str]) -> AsyncIterator[NodeHolds]:
    for number, name in enumerate(names):
        if number % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        if (holds := ledger.holds.on(name)) is not None:
            yield holds


def inspect_node(ledger: Ledger, name: str) -> Inspection:
    """One node, or an error if it is unknown."""
    holds = ledger.holds.on(name)
    if holds is None or holds.node is None:
        return Inspection(None, f"node {name} is not known; /gpushare-scheduler/inspect lists those that are")
    return Inspection([inspected(holds)])


async def debug_nodes(ledger: Ledger, names: Iterable[str]) -> list[dict[str, Any]]:
    """Those of the nodes that are known, in full."""
    return [debug_node(each) async for each in _known(ledger, names)]
