"""Scheduling one pod, from kube-scheduler's first question to its binding, verb by verb.

    filter      which of these nodes can hold the pod, and why the others cannot
    prioritize  how well it would fit on each of them
    preempt     whom to evict if it fits nowhere
    bind        hold cards on the node that kube-scheduler picked, annotate and bind the pod

filter and prioritize are synchronous, and preempt decides after it has read what it needs: each sees the
ledger as it is now, and no decision is based on a copy.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from gpuslice.adapters.wire.extender import BindingArgs, ExtenderArgs, FilterResult, MetaVictims, NodeList
from gpuslice.adapters.wire.extender import Pod as WirePod
from gpuslice.adapters.wire.names import UNKNOWN, Json, Pieces
from gpuslice.apps.extender.binder import Binder
from gpuslice.apps.extender.gated_groups import GatedGroups
from gpuslice.apps.extender.group_holds import RESTS, GroupHolds
from gpuslice.apps.extender.node_query import (
    NodeNames,
    NodeQuery,
    PassedNodes,
    Positions,
    Ranked,
)
from gpuslice.apps.extender.nomination.nominator import Nominator
from gpuslice.apps.extender.placer import Placer
from gpuslice.apps.extender.pod_events import PodEvents
from gpuslice.apps.extender.pod_times import PodTimes
from gpuslice.apps.extender.pod_traces import PodTraces
from gpuslice.apps.extender.preemption.batch_preemptor import BatchPreemptor
from gpuslice.apps.extender.preemption.preemptor import Preemptor
from gpuslice.apps.extender.ranking import best_of, scores
from gpuslice.apps.extender.refusals import Refusals
from gpuslice.apps.extender.stranded_pods import StrandedPods
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.model import Pod, Request
from gpuslice.core.pod_group import pod_group
from gpuslice.core.policy import NEVER
from gpuslice.core.policy.fleet import Ints, Shape
from gpuslice.core.preemption import LOWEST
from gpuslice.core.views import pod_requests

_log = logging.getLogger(__name__)

KEPT_DECISIONS = 1000
POD_MISSING = "arg or pod is nil"
NO_ROW = -2  # the row of no node, and not that of an unknown one either
NAMES_MISSING = "cannot get node names"
NOT_SHOWN = "the API server has not shown this pod yet, whose group gets its cards together; ask again"

_EMPTY_LIST = b"[]"
_EMPTY_OBJECT: Pieces = (b"{}",)


class SchedulingCycle:
    """kube-scheduler's verbs for one cluster."""

    def __init__(
        self,
        placer: Placer,
        nominator: Nominator,
        preemptor: Preemptor,
        stranded: StrandedPods,
        binder: Binder,
        *,
        batch_preemptor: BatchPreemptor,
        groups: GroupHolds,
        gated: GatedGroups,
        events: PodEvents,
        times: PodTimes,
        traces: PodTraces,
        explain: bool = False,
        replica: str = "",
    ) -> None:
        self.ledger = placer.ledger
        self.refusals = Refusals(placer.ledger, placer.policy, placer.rejections, in_full=explain)
        self._placer = placer
        self._nominator = nominator
        self._preemptor = preemptor
        self._batch_preemptor = batch_preemptor
        self._stranded = stranded
        self._binder = binder
        self._groups = groups
        self._gated = gated
        self._events = events
        self._times = times
        self._traces = traces
        self._names = NodeNames(placer.ledger.fleet)
        self._passed = PassedNodes()
        self._replica = replica
        self.decisions: deque[dict[str, Any]] = deque(maxlen=KEPT_DECISIONS)  # of binds, the latest last

    def filter(self, args: ExtenderArgs) -> FilterResult:
        """Which nodes in the question can hold the pod, and why the others cannot.

        Raises `MalformedError` if the names are not a list of strings.
        """
        raw = args.names_json()
        if args.pod is None or raw is None:
            return FilterResult(error=POD_MISSING if args.pod is None else NAMES_MISSING)
        self.ledger.flush()
        query, (pod, is_known) = self._names.query(raw), self._asking(args.pod)
        if pod.request is not None:
            self._times.asked(pod.uid)
            answer = self._group_decides(args, args.pod, query, pod, pod.request)
            if answer is not None:
                return answer

        # nominated before: this one node was chosen for the pod, and its cards are held for it
        self._nominator.note_query(pod.uid, query)
        planned = self.ledger.holds.tentative(pod.uid) if len(query.rows) == 1 else None
        is_planned = planned is not None and self.ledger.fleet.row_of.get(planned.node) == query.rows[0]
        if is_planned or (pod.request is None and not pod.problem):  # or a pod that is none of our business
            self._passed.note(pod.uid, query.rows)
            if is_planned:
                self._binder.announce(pod.uid)
            return _answer(args, query.all_names(), query.everyone)
        if pod.request is None:
            if is_known:
                self._events.warn(pod, "InsufficientGPU", pod.problem)
            return _answer(args, _EMPTY_LIST, query.everyone[:0], *2 * (_of_all(query, pod.problem),))
        return self._choose(args, args.pod, query, pod, pod.request)

    def _choose(
        self, args: ExtenderArgs, asking: WirePod, query: NodeQuery, pod: Pod, request: Request
    ) -> FilterResult:
        """The answer to filter for a pod that asks for cards."""
        # rank
        fleet, is_known = self.ledger.flush(), pod.uid in self.ledger.pods
        keys = self._placer.rank(query, pod, request)
        if not (keys != NEVER).any() and self.ledger.give_way(request, pod.priority):
            fleet = self.ledger.flush()
            keys = self._placer.rank(query, pod, request)

        # pass the node that is nominated now, otherwise the best few of those that fit
        if asking.spec.pod_group:
            passing = self._groups.hold(pod, request, query, keys)
        else:
            passing = self._best(pod.uid, query, keys, all_that_fit=asking.spec.prefers)

        # answer
        self._passed.note(pod.uid, query.rows.take(passing))
        if len(passing):
            self._stranded.note_passed(pod.uid)
            if is_known:
                self._binder.announce(pod.uid)
            next_query = query.part(passing)
            self._names.expect(next_query, Ranked(asking, fleet.clock, keys.take(passing)))
            return _answer(args, next_query.raw, passing)  # reasons for the others would not be read
        # none fits: tell the pod's owner, and make room if the pod is important enough
        if not asking.spec.pod_group:  # room for one member is useless if the others do not fit
            self._preemptor.note_refused(pod.uid, query)
            self._batch_preemptor.pending.note_refused(pod.uid, query)
            self._stranded.note_refused(pod.uid, query)
        if is_known:
            self._events.warn(pod, "InsufficientGPU", self.refusals.explain(request, query, pod))
        return _answer(args, _EMPTY_LIST, passing, *self.refusals.by_node(request, query, pod))

    def _group_decides(
        self, args: ExtenderArgs, asking: WirePod, query: NodeQuery, pod: Pod, request: Request
    ) -> FilterResult | None:
        """The answer to filter for a member of a pod group; None if the pod is to be treated as any other."""
        if not asking.spec.pod_group and pod.group is None:
            return None
        if pod.uid not in self.ledger.pods:
            return FilterResult(error=NOT_SHOWN)
        if asking.spec.pod_group:
            if self._groups.ask(pod, asking.spec.pod_group, query):
                return None
            return _answer(args, _EMPTY_LIST, query.everyone[:0], _of_all(query, RESTS))
        return self._of_gated_group(args, query, pod, request)

    def _of_gated_group(
        self, args: ExtenderArgs, query: NodeQuery, pod: Pod, request: Request
    ) -> FilterResult:
        """The answer to filter for a member of a group by labels: the node that is held for it, or none."""
        why_not, held = self._gated.ask(pod), self.ledger.holds.of(pod.uid)
        if held is None:
            self._passed.note(pod.uid, query.rows[:0])
            return _answer(args, _EMPTY_LIST, query.everyone[:0], *2 * (_of_all(query, why_not),))
        passing = np.flatnonzero(query.rows == self.ledger.fleet.row_of.get(held.node, NO_ROW))
        if not len(passing) and held.kind.is_tentative:  # kube-scheduler's own filters exclude the held node
            self.ledger.forget(pod.uid)
            keys = self._placer.rank(query, pod, request)
            passing = self._placer.hold_best(pod, request, query, keys)
        self._passed.note(pod.uid, query.rows.take(passing))
        if not len(passing):
            self._gated.note_refused(pod.uid)
            self._events.warn(pod, "InsufficientGPU", self.refusals.explain(request, query, pod))
            return _answer(args, _EMPTY_LIST, passing, *self.refusals.by_node(request, query, pod))
        self._gated.note_passed(pod.uid)
        self._binder.announce(pod.uid)
        return _answer(args, query.part(passing).raw, passing)

    def note_filtered(self, args: ExtenderArgs, result: FilterResult, took_s: float) -> None:
        """Record that filter has answered, and how long it took."""
        if args.pod is not None:
            meta = args.pod.metadata
            key = f"{meta.namespace}/{meta.name}"
            self._traces.filtered(meta.uid, key, took_s, self._passed.count(meta.uid), result.error)

    def prioritize(self, args: ExtenderArgs) -> bytes:
        """Scores 0…10 as JSON. Only the best node gets 10, since kube-scheduler picks at random among equals.

        Raises `MalformedError` if the names are not a list of strings.
        """
        raw = args.names_json()
        if raw is None:
            return b"[]"
        fleet = self.ledger.flush()
        query = self._names.query(raw)
        ranked = query.ranked
        if ranked is not None and ranked.pod is args.pod and ranked.clock == fleet.clock:
            return query.scores_json(scores(ranked.keys))
        pod = self._asking(args.pod)[0] if args.pod is not None else None
        if pod is None or pod.request is None:
            return query.scores_json(np.zeros(len(query.rows), dtype=np.int64))
        keys = self._placer.rank(query, pod, pod.request)
        return query.scores_json(scores(keys))

    async def preempt(
        self, asking: WirePod | None, proposed: Mapping[str, MetaVictims]
    ) -> Mapping[str, MetaVictims]:
        """The nodes on which evicting pods of lower priority frees enough of a card, each with its victims.

        kube-scheduler asks only once, so a pod that it has seen before us is read from the API server.
        """
        if asking is None:
            return proposed
        pod, is_known = self._asking(asking)
        if pod.request is not None and not is_known:
            meta = asking.metadata
            is_known = await self._binder.read_early(meta.namespace, meta.name, meta.uid)
            pod = self._asking(asking)[0]
        if pod.request is None or not is_known or pod.group is not None:  # room for one is useless to a group
            return {} if pod.problem or pod.request is not None else proposed
        rejections = self._placer.rejections
        if rejections:
            proposed = {name: each for name, each in proposed.items() if not rejections.closes(name, pod)}
        found = await self._batch_preemptor.pending.victims(pod, pod.request, proposed)
        if found:
            self._preemptor.leave_to_scheduler(pod.uid)
            others = {name: each for name, each in proposed.items() if name not in found}
            await self._batch_preemptor.follow(pod, pod.request, others)
        return found

    async def bind(self, args: BindingArgs) -> str:
        """Hold the cards, annotate and bind; returns why not, or "" when the pod is bound.

        A pod is bound only to a node that our filter has let pass for it. Where a pod may run is for
        kube-scheduler to say, and that this replica answered its filter shows that it was asked.
        """
        key, row = f"{args.pod_namespace}/{args.pod_name}", self.ledger.flush().row_of.get(args.node, UNKNOWN)
        began, passed = time.monotonic(), self._passed.count(args.pod_uid)
        if not self._passed.holds(args.pod_uid, row):
            return f"pod {key}: filter has not let node {args.node} pass for it; ask filter first"
        self._groups.note_bind(args.pod_uid)
        self._traces.bind_begins(args.pod_uid)
        others = await self._gated.gathered(args.pod_uid)
        why_not = f"pod {key}: {others}" if others else await self._binder.bind(args)
        took_s = time.monotonic() - began
        self._traces.bound(args.pod_uid, key, args.node, took_s, why_not)
        known, held = self.ledger.pods.get(args.pod_uid), self.ledger.holds.of(args.pod_uid)
        slices = held.placement.slices if held is not None and held.placement is not None else ()
        decision = {
            "pod": key,
            "uid": args.pod_uid,
            "node": args.node,
            "cards": {str(part.card): part.units for part in slices},
            "policy": self._placer.policy.name,
            "passed": passed,  # how many nodes filter left for kube-scheduler to choose from
            "nominated": known is not None and bool(known.nominated),
            "replica": self._replica,
            "seconds": round(took_s, 4),
            "error": why_not,
        }
        self.decisions.append({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **decision})
        _log.info("bind decided", extra=decision)
        if not why_not:
            self._times.bound(args.pod_uid, shown=known is not None and bool(known.node))
        if why_not and known is not None and known.key == key:
            self._events.warn(known, "GPUBindFailed", why_not)
        return why_not

    def prewarm(self, shape: Shape | None) -> None:
        """Prepare what the next question needs: the table of names and the ranks of `shape`."""
        self.ledger.flush()
        self._names.refresh()
        if shape is not None:
            self._placer.policy.keys(shape)

    def _asking(self, asking: WirePod) -> tuple[Pod, bool]:
        """The pod in a question as the API server shows it, and whether it has shown it yet.

        kube-scheduler may have seen a pod before us. Such a pod is answered by what the question says of it,
        with the lowest priority, and nothing is done for it, since anybody can send a question.
        """
        meta = asking.metadata
        known = self.ledger.pods.get(meta.uid)
        if known is not None:
            return known, True
        asked = pod_requests(asking.spec, meta.labels)
        group = None
        with contextlib.suppress(InvalidRequestError):
            group = pod_group(meta.labels)
        pod = Pod(meta.uid, meta.namespace, meta.name, priority=LOWEST, group=group)
        return replace(pod, request=asked.request, problem=asked.problem), False

    def _best(self, uid: str, query: NodeQuery, keys: Ints, *, all_that_fit: bool) -> Positions:
        """Which of the nodes in the question pass."""
        fits = keys != NEVER
        fitting = np.count_nonzero(fits)
        if fitting > 1 and (held := self._nominator.hold(uid, query)) is not None:
            chosen = query.rows == self.ledger.fleet.row_of[held.node]
            fits &= chosen
        elif 0 < self._placer.filter_best < fitting and not all_that_fit:
            return best_of(keys, self._placer.filter_best)
        passing: Positions = fits.nonzero()[0]
        return passing


def _of_all(query: NodeQuery, reason: str) -> Pieces:
    """The same reason for each node."""
    return query.reasons_json([], dict.fromkeys(query.names(query.everyone), reason))


def _answer(
    args: ExtenderArgs,
    names: Json,
    passing: Positions,
    failed: Pieces = _EMPTY_OBJECT,
    never: Pieces = _EMPTY_OBJECT,
) -> FilterResult:
    """Answer in the form of the question: names for names, whole nodes for whole nodes."""
    result = FilterResult(node_names=names, failed_nodes=failed, failed_and_unresolvable_nodes=never)
    if (nodes := args.whole_nodes) is not None:
        result.nodes = NodeList(items=[nodes[position] for position in passing.tolist()])
    return result
