"""Scheduling one pod, from kube-scheduler's first question to its binding, verb by verb.

    filter      which of these nodes can hold the pod, and why the others cannot
    prioritize  how well it would fit on each of them
    preempt     whom to evict if it fits nowhere
    bind        hold cards on the node that kube-scheduler picked, annotate and bind the pod

filter recognizes the pod, decides, and publishes one verdict to all who subscribe. filter and prioritize
are synchronous, and preempt decides after it has read what it needs: each sees the ledger as it is now, and
no decision is based on a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from gpuslice.adapters.kube.kueue import POD_SET_OF_POD
from gpuslice.adapters.wire.extender import BindingArgs, ExtenderArgs, FilterResult, MetaVictims, NodeList
from gpuslice.adapters.wire.extender import Pod as WirePod
from gpuslice.adapters.wire.names import UNKNOWN, Json, Pieces
from gpuslice.apps.extender.binder import Binder
from gpuslice.apps.extender.node_query import NodeNames, NodeQuery, PassedNodes, Positions, Ranked
from gpuslice.apps.extender.placer import Placer, best_of, scores
from gpuslice.apps.extender.pod_groups import PodGroups
from gpuslice.apps.extender.preemption.pending_evictions import PendingEvictions
from gpuslice.apps.extender.refusals import Refusals
from gpuslice.apps.extender.subscriber import BindResult, FilterVerdict, Shortcuts, Subscriber
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.hold import HoldKind
from gpuslice.core.ledger import shape_of
from gpuslice.core.model import Pod, Request
from gpuslice.core.pod_group import pod_group
from gpuslice.core.policy import NEVER
from gpuslice.core.policy.fleet import Shape
from gpuslice.core.preemption import LOWEST
from gpuslice.core.views import pod_requests

POD_MISSING = "arg or pod is nil"
NAMES_MISSING = "cannot get node names"
MOST_REFUSALS = 64  # shapes
LOOK_AGAIN_S, MOST_LOOKS = 0.02, 40  # while kube-scheduler waits for news
NOT_SHOWN = "the API server has not shown this pod yet, for which cards may be held; ask again"

_EMPTY_LIST = b"[]"
_EMPTY_OBJECT: Pieces = (b"{}",)


@dataclass(frozen=True, slots=True)
class _Answer:
    """Which nodes in the question pass, as positions and as JSON, and why the others do not.

    `never`: of those, where preemption cannot help. `why_not` is for the pod's owner, `error` for
    kube-scheduler.
    """

    passing: Positions
    names: Json = _EMPTY_LIST
    failed: Pieces = _EMPTY_OBJECT
    never: Pieces = _EMPTY_OBJECT
    why_not: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What a pod of some shape and priority was told at a `clock` of the fleet about some nodes."""

    clock: int
    query: NodeQuery
    answer: _Answer


class SchedulingCycle:
    """kube-scheduler's verbs for one cluster. `explain`: filter says of each node the most that would fit."""

    def __init__(
        self,
        placer: Placer,
        groups: PodGroups,
        evictions: PendingEvictions,
        binder: Binder,
        shortcuts: Shortcuts,
        *,
        subscribers: Iterable[Subscriber],
        explain: bool = False,
    ) -> None:
        self.ledger = placer.ledger
        self.refusals = Refusals(placer.ledger, in_full=explain)
        self._placer = placer
        self._groups = groups
        self._evictions = evictions
        self._binder = binder
        self._shortcuts = shortcuts
        self._subscribers = tuple(subscribers)
        self._names = NodeNames(placer.ledger.fleet)
        self._passed = PassedNodes()
        self._refused_before: OrderedDict[tuple[Shape, int, bool], _Refusal] = OrderedDict()

    def awaits_news(self, args: ExtenderArgs) -> Awaitable[None] | None:
        """What filter should wait for: whether kubelet takes the pods that went to the only nodes with room,
        or that a pod is shown for which cards may be held.

        None as a rule. The longest is less than a second. Raises `MalformedError` as filter does.
        """
        uid, raw = args.pod.metadata.uid if args.pod is not None else "", args.names_json()
        pod = self.ledger.pods.get(uid)
        if pod is None and args.pod is not None and self._may_have_cards(args.pod):
            return _until(lambda: uid in self.ledger.pods)
        if raw is None or pod is None or pod.request is None or self.ledger.holds.of(uid) is not None:
            return None
        request, rows = pod.request, self._names.query(raw).rows
        if pod.group is not None or not self._placer.is_uncertain(rows, pod, request):
            return None
        return _until(lambda: not self._placer.is_uncertain(rows, pod, request))

    def filter(self, args: ExtenderArgs, not_ready: str = "") -> FilterResult:
        """Which nodes in the question can hold the pod, and why the others cannot; `not_ready` bars all.

        Raises `MalformedError` if the names are not a list of strings.
        """
        began_s, raw, asking = time.perf_counter(), args.names_json(), args.pod
        if asking is None or raw is None:
            return FilterResult(error=not_ready or (POD_MISSING if asking is None else NAMES_MISSING))
        self.ledger.flush()
        query, (pod, is_known) = self._names.query(raw), self._recognize(asking)
        if not_ready:
            answer = _Answer(query.everyone[:0], error=not_ready)
        elif pod.problem and pod.request is None:
            answer = _refused_everywhere(query, pod.problem, pod.problem)
        elif pod.request is None:  # none of our business
            answer = _Answer(query.everyone, query.all_names())
        elif not is_known and self._may_have_cards(asking):
            answer = _Answer(query.everyone[:0], error=NOT_SHOWN)
        elif pod.group is not None or asking.spec.pod_group:
            answer = self._member(asking, query, pod, pod.request, is_known=is_known)
        else:
            answer = self._alone(asking, query, pod, pod.request, is_known=is_known)
        passed = query.rows.take(answer.passing)
        if not answer.error:
            self._passed.note(pod.uid, passed)
        verdict = FilterVerdict(
            pod,
            query.rows,
            passed,
            is_known,
            in_group=pod.group is not None or bool(asking.spec.pod_group),
            why_not=answer.why_not,
            error=answer.error,
            took_s=time.perf_counter() - began_s,
        )
        for each in self._subscribers:
            each.decided(verdict)
        if answer.error:
            return FilterResult(error=answer.error)
        result = FilterResult(None, answer.names, answer.failed, answer.never)
        if (nodes := args.whole_nodes) is not None:  # whole nodes for whole nodes, names for names
            result.nodes = NodeList(items=[nodes[position] for position in answer.passing.tolist()])
        return result

    def _may_have_cards(self, asking: WirePod) -> bool:
        """Whether it may be one for which a queue had cards held, which would be in its own way."""
        queued = POD_SET_OF_POD in (asking.metadata.labels or {})
        return queued and bool(self.ledger.holds.of_kind(HoldKind.ADMITTED))

    def _member(
        self, asking: WirePod, query: NodeQuery, pod: Pod, request: Request, *, is_known: bool
    ) -> _Answer:
        """A member of a pod group passes for the one node on which cards are held for it."""
        if not is_known:
            return _Answer(query.everyone[:0], error=NOT_SHOWN)
        passing = self._groups.place(pod, request, asking.spec.pod_group, query.rows)
        if isinstance(passing, str):
            return _refused_everywhere(query, passing)
        if not len(passing):
            return self._refused(query, pod, request, is_known=True)
        return _Answer(passing, query.part(passing).raw)

    def _alone(
        self, asking: WirePod, query: NodeQuery, pod: Pod, request: Request, *, is_known: bool
    ) -> _Answer:
        """A pod passes for the node that is nominated, otherwise for the best few of those that fit."""
        self._shortcuts.asked(pod.uid, query.rows)
        held = self.ledger.holds.tentative(pod.uid) if len(query.rows) == 1 else None
        if held is not None and self.ledger.fleet.row_of.get(held.node) == query.rows[0]:
            return _Answer(query.everyone, query.all_names())
        before = self.ledger.holds.of(pod.uid)
        if before is not None and before.kind in (HoldKind.PROMISED, HoldKind.ADMITTED):
            self.ledger.forget(pod.uid)  # chosen again
        if (refused := self._as_before(query, pod, request, is_known=is_known)) is not None:
            return refused
        keys = self._placer.rank_making_room(query.rows, pod, request)
        fits, most = keys != NEVER, self._placer.filter_best
        fitting = np.count_nonzero(fits)
        if not fitting:
            return self._refused(query, pod, request, is_known=is_known)
        promised = self._placer.promise_best(pod, request, query.rows, keys) if is_known else None
        if fitting > 1 and promised is not None and self._shortcuts.passes_one(pod.uid):
            fits &= query.rows == self.ledger.fleet.row_of[promised.node]
        elif 0 < most < fitting and not asking.spec.prefers:
            fits[:] = False
            fits[best_of(keys, most)] = True
        passing: Positions = fits.nonzero()[0]
        next_query = query.part(passing)
        self._names.expect(next_query, Ranked(asking, self.ledger.flush().clock, keys.take(passing)))
        return _Answer(passing, next_query.raw)  # reasons for the others would not be read

    def _as_before(self, query: NodeQuery, pod: Pod, request: Request, *, is_known: bool) -> _Answer | None:
        """What an equal pod was told when the fleet was as it is now.

        On a full cluster kube-scheduler tries all waiting pods again at each event of any pod.
        """
        refused = self._refused_before.get((shape_of(request), pod.priority, is_known))
        if refused is None or refused.query is not query or refused.clock != self.ledger.flush().clock:
            return None
        return None if self._depends_on_pod() else refused.answer

    def _depends_on_pod(self) -> bool:
        """Whether a refusal may be another one for an equal pod."""
        return bool(self.ledger.holds.reserved) or self.ledger.kubelets.keep_somebody()

    def _refused(self, query: NodeQuery, pod: Pod, request: Request, *, is_known: bool) -> _Answer:
        why_not = self.refusals.explain(request, query, pod) if is_known else ""
        failed, never = self.refusals.by_node(request, query, pod)
        answer = _Answer(query.everyone[:0], failed=failed, never=never, why_not=why_not)
        if not self._depends_on_pod():
            key = (shape_of(request), pod.priority, is_known)
            self._refused_before[key] = _Refusal(self.ledger.flush().clock, query, answer)
            if len(self._refused_before) > MOST_REFUSALS:
                self._refused_before.popitem(last=False)
        return answer

    def prioritize(self, args: ExtenderArgs) -> bytes:
        """Scores 0…10 as JSON. Only the best node gets 10, since kube-scheduler picks at random among equals.

        Raises `MalformedError` if the names are not a list of strings.
        """
        raw = args.names_json()
        if raw is None:
            return _EMPTY_LIST
        fleet = self.ledger.flush()
        query = self._names.query(raw)
        ranked = query.ranked
        if ranked is not None and ranked.pod is args.pod and ranked.clock == fleet.clock:
            return query.scores_json(scores(ranked.keys))
        pod = self._recognize(args.pod)[0] if args.pod is not None else None
        if pod is None or pod.request is None:
            return query.scores_json(np.zeros(len(query.rows), dtype=np.int64))
        keys = self._placer.rank(query.rows, pod, pod.request)
        if (held := self.ledger.holds.tentative(pod.uid)) is not None:  # others would find less room there
            keys[query.rows == fleet.row_of.get(held.node, UNKNOWN)] = keys.min(initial=NEVER) - 1
        return query.scores_json(scores(keys))

    async def preempt(
        self, asking: WirePod | None, proposed: Mapping[str, MetaVictims]
    ) -> Mapping[str, MetaVictims]:
        """The nodes on which evicting pods of lower priority frees enough of a card, each with its victims.

        kube-scheduler asks only once, so a pod that it has seen before us is read from the API server.
        """
        if asking is None:
            return proposed
        pod, is_known = self._recognize(asking)
        if pod.request is not None and not is_known:
            meta = asking.metadata
            is_known = await self._binder.read_early(meta.namespace, meta.name, meta.uid)
            pod = self._recognize(asking)[0]
        if pod.request is None or not is_known or pod.group is not None:  # room for one is useless to a group
            return {} if pod.problem or pod.request is not None else proposed
        return await self._evictions.victims(pod, pod.request, proposed)

    async def bind(self, args: BindingArgs) -> str:
        """Hold the cards, annotate and bind; returns why not, or "" when the pod is bound.

        A pod is bound only to a node that our filter has let pass for it. Where a pod may run is for
        kube-scheduler to say, and that this replica answered its filter shows that it was asked.
        """
        key, row = f"{args.pod_namespace}/{args.pod_name}", self.ledger.flush().row_of.get(args.node, UNKNOWN)
        began_s, passed = time.monotonic(), self._passed.count(args.pod_uid)
        if not self._passed.holds(args.pod_uid, row):
            return f"pod {key}: filter has not let node {args.node} pass for it; ask filter first"
        others = await self._groups.gathered(args.pod_uid)
        why_not = f"pod {key}: {others}" if others else await self._binder.bind(args)
        known, held = self.ledger.pods.get(args.pod_uid), self.ledger.holds.of(args.pod_uid)
        slices = held.placement.slices if held is not None and held.placement is not None else ()
        took_s = time.monotonic() - began_s
        result = BindResult(args.pod_uid, key, args.node, known, slices, passed, took_s, why_not)
        for each in self._subscribers:
            each.bound(result)
        return why_not

    def prepare(self, shape: Shape | None) -> None:
        """Prepare what the next question needs: the table of names and the ranks of `shape`."""
        self.ledger.flush()
        self._names.refresh()
        if shape is not None:
            self._placer.policy.keys(shape)

    def _recognize(self, asking: WirePod) -> tuple[Pod, bool]:
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


async def _until(settled: Callable[[], bool]) -> None:
    for _ in range(MOST_LOOKS):
        if settled():
            return
        await asyncio.sleep(LOOK_AGAIN_S)


def _refused_everywhere(query: NodeQuery, reason: str, why_not: str = "") -> _Answer:
    """The same reason for each node."""
    each = query.reasons_json([], dict.fromkeys(query.names(query.everyone), reason))
    return _Answer(query.everyone[:0], failed=each, never=each, why_not=why_not)
