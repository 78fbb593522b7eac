"""One decision, from kube-scheduler's question to the answer: filter, prioritize, choose, assume.

    filter      which of these nodes can hold the pod, and why not the others
    prioritize  how well it would sit on each of them
    preempt     whom to evict where it fits nowhere
    choose      the cards on the node that kube-scheduler picked
    assume      choose, and hold them from this moment on (`binding` then tells the API server)

Everything here is synchronous and looks at the ledger as it is now: no decision rests on a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from gpuslice.adapters.wire.extender import (
    ExtenderArgs,
    FilterResult,
    NodeList,
    PreemptionArgs,
    PreemptionResult,
)
from gpuslice.adapters.wire.extender import Pod as WirePod
from gpuslice.adapters.wire.names import Json, Pieces
from gpuslice.apps.extender.asked import Asked, Names, Places, Ranked, Reason
from gpuslice.apps.extender.promises import Promises
from gpuslice.apps.extender.ranked import Impossible, best_of, reasons, scores
from gpuslice.apps.extender.refusals import Refusals, Refused
from gpuslice.apps.extender.victims import VictimsByCard
from gpuslice.core.ledger import Ledger, shape_of
from gpuslice.core.model import Placement, Pod, Refusal, Request
from gpuslice.core.nomination import open_to
from gpuslice.core.placement import not_shared, place, refuse
from gpuslice.core.policy import NEVER, Policy
from gpuslice.core.policy.fleet import Fleet, Ints, Shape
from gpuslice.core.preemption import NOTHING_TAKEN
from gpuslice.core.views import PodRequests, pod_requests

HIGHEST = 1 << 31  # above every priority
NO_POD = "arg or pod is nil"
NO_NAMES = "cannot get node names"
NOT_THE_BEST = "Outranked"  # short: it goes over the wire once for nearly every node
KEPT = "The free cards are kept for a pod that others were evicted for"


class Decisions:
    """Answers for one cluster. `on_refused` hears of pods that fit nowhere."""

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
        *,
        filter_best: int = 0,
        explain: bool = False,
        on_refused: Callable[[Refused], None] = lambda _: None,
        on_asked: Callable[[str, Asked], None] = lambda *_: None,
        on_victims: Callable[[str], None] = lambda _: None,
        hold: Callable[[str, Asked], Placement | None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = ledger
        self.policy = policy
        self._names = Names(ledger.fleet)
        self._impossible = Impossible(ledger.fleet)
        self._filter_best = filter_best
        self._explain = explain
        self.refusals = Refusals(ledger, policy, on_refused)
        self._victims = VictimsByCard(ledger, Promises(ledger, clock))
        self._on_asked = on_asked
        self._on_victims = on_victims
        self._hold = hold

    # -- filter --------------------------------------------------------------------------------------------

    def filter(self, args: ExtenderArgs) -> FilterResult:
        """Part the nodes asked about into those that can hold the pod and the others with their reasons.

        Raises `MalformedError` when the names are no list of strings.
        """
        if args.pod is None:
            return FilterResult(error=NO_POD)
        raw = args.names_json()
        if raw is None:
            return FilterResult(error=NO_NAMES)
        self.ledger.flush()
        asked = self._names.asked(raw)
        self._on_asked(args.pod.metadata.uid, asked)
        if self._is_planned(args.pod.metadata.uid, asked):
            return _answer(args, asked.all_names(), asked.everyone, _NOBODY, _NOBODY)
        fleet = self.ledger.flush()  # what was planned for the pod may have been given up
        wants = _wants(args.pod)
        if wants.problem:
            self.refusals.wrong(args.pod, wants.problem)
            reasons = asked.reasons_json([], dict.fromkeys(asked.names(asked.everyone), wants.problem))
            return _answer(args, _NO_NAMES, asked.everyone[:0], reasons, reasons)
        if wants.request is None:  # we were asked about a pod that is none of our business
            return _answer(args, asked.all_names(), asked.everyone, _NOBODY, _NOBODY)
        return self._filter(args, args.pod, asked, fleet, wants.request)

    def _filter(
        self, args: ExtenderArgs, pod: WirePod, asked: Asked, fleet: Fleet, request: Request
    ) -> FilterResult:
        keys = self._keys(shape_of(request), asked, request)
        compute_counts = bool(request.compute_percent or self.ledger.compute_required)
        never = (keys == NEVER).nonzero()[0]
        refused = reasons(fleet, asked, never, request, compute_counts=compute_counts)
        kept = self._kept_for_others(asked, keys, pod, request)
        keys[kept] = NEVER
        fitting = np.count_nonzero(keys != NEVER)
        if not fitting and self.ledger.make_way(request, pod.spec.priority or 0):
            return self._filter(args, pod, asked, self.ledger.flush(), request)
        others: list[Reason] = [(kept, KEPT)]
        if fitting > 1 and (held := self._hold(pod.metadata.uid, asked)) is not None:
            chosen, fits = asked.rows == fleet.row_of[held.node], keys != NEVER
            passing = (chosen & fits).nonzero()[0]
            others.append(((~chosen & fits).nonzero()[0], NOT_THE_BEST))
        elif 0 < self._filter_best < fitting and not pod.spec.prefers:
            passing, worse = best_of(keys, self._filter_best)
            others.append((worse, NOT_THE_BEST))
        else:
            passing = (keys != NEVER).nonzero()[0]
        if len(passing):
            question = asked.part(passing)
            names: Json = question.raw
            self._names.expect(question, Ranked(pod, fleet.clock, keys.take(passing)))
        else:
            names = _NO_NAMES
            self.refusals.note(pod, asked, request)
        if len(passing) == len(asked.rows):
            return _answer(args, names, passing, _NOBODY, _NOBODY)
        impossible = [(self._impossible.of(asked, which, request), text) for which, text in refused]
        return _answer(
            args,
            names,
            passing,
            self._reasons_json(asked, [*refused, *others], request),
            self._reasons_json(asked, impossible, request),
        )

    def _is_planned(self, uid: str, asked: Asked) -> bool:
        """Whether this is the one node whose cards are held for the pod already."""
        placement = self.ledger.planned(uid) if len(asked.rows) == 1 else None
        return placement is not None and self.ledger.fleet.row_of.get(placement.node) == asked.rows[0]

    def _reasons_json(self, asked: Asked, reasons: list[Reason], request: Request) -> Pieces:
        """The texts of `reasons`; nodes that share nothing are told so by name."""
        own = (
            {name: not_shared(name).reason for name in asked.names(asked.strangers)}
            if len(asked.strangers)
            else {}
        )
        if self._explain:
            for which, _ in reasons:
                own |= {name: self._explained(name, request) for name in asked.names(which)}
            reasons = []
        return asked.reasons_json(reasons, own)

    def _explained(self, name: str, request: Request) -> str:
        state = self.ledger.state(name)
        return str(refuse(state, request)) if state is not None else not_shared(name).reason

    # -- prioritize ----------------------------------------------------------------------------------------

    def prioritize(self, args: ExtenderArgs) -> bytes:
        """Scores 0…10 as JSON: the node to take has 10, alone, since kube-scheduler draws lots among equals.

        Raises `MalformedError` when the names are no list of strings.
        """
        raw = args.names_json()
        if raw is None:
            return b"[]"
        fleet = self.ledger.flush()
        asked = self._names.asked(raw)
        ranked = asked.ranked
        if ranked is not None and ranked.pod is args.pod and ranked.clock == fleet.clock:
            return asked.scores_json(scores(ranked.keys))
        request = request_of(args.pod) if args.pod is not None else None
        if request is None or args.pod is None:
            return asked.scores_json(np.zeros(len(asked.rows), dtype=np.int64))
        keys = self._keys(shape_of(request), asked, request)
        keys[self._kept_for_others(asked, keys, args.pod, request)] = NEVER
        return asked.scores_json(scores(keys))

    # -- preempt -------------------------------------------------------------------------------------------

    def preempt(self, args: PreemptionArgs) -> PreemptionResult:
        """Keep the nodes on which evicting lower pods makes room on the cards, with those to evict."""
        pod, proposed = args.pod, args.victims()
        if pod is None:
            return PreemptionResult(proposed)
        request, _, problem = _wants(pod)
        if problem:
            return PreemptionResult({})
        if request is None:
            return PreemptionResult(proposed)
        found = self._victims.of(pod, request, proposed)
        if found:
            self._on_victims(pod.metadata.uid)
        return PreemptionResult(found)

    # -- choose, assume --------------------------------------------------------------------------------------

    def choose(self, node_name: str, request: Request, pod: Pod | None = None) -> Placement | Refusal:
        """The cards of one node for a request, as things stand; those kept for others only with no `pod`."""
        fleet, shape = self.ledger.flush(), shape_of(request)
        allocations, row = self.ledger.allocations(node_name), fleet.row_of.get(node_name)
        if allocations is None or allocations.node is None or row is None:
            return not_shared(node_name)
        state = allocations.state()
        slots = self.policy.fitting_slots(shape, row)
        if slots is None:
            return refuse(state, request)
        taken = self.ledger.nominations.taken(node_name, pod.uid, pod.priority) if pod else NOTHING_TAKEN
        if taken:
            return place(open_to(allocations, taken), request)
        return place(state, request, slots)

    def assume(self, pod: Pod, request: Request, node_name: str) -> Placement | Refusal:
        """Choose cards for `pod` and hold them from now on: its planned ones, else before others' plans."""
        planned = self.ledger.planned(pod.uid)
        if planned is not None and planned.node == node_name:
            return self.ledger.assume(pod, planned) or planned
        chosen = self.choose(node_name, request, pod)
        if isinstance(chosen, Refusal) and self.ledger.make_way(request, HIGHEST, node_name):
            chosen = self.choose(node_name, request, pod)
        if isinstance(chosen, Refusal):
            return chosen
        return self.ledger.assume(pod, chosen) or chosen

    def warm(self, shape: Shape | None) -> None:
        """Get ready what the next question would else wait for: the table of names, the ranks of `shape`."""
        self.ledger.flush()
        self._names.renew()
        if shape is not None:
            self.policy.keys(shape)

    # -- the arrays ------------------------------------------------------------------------------------------

    def _keys(self, shape: Shape, asked: Asked, request: Request) -> Ints:
        """The policy's rank of each node asked about; NEVER where it does not fit or is not known."""
        ranks = self.policy.keys(shape)
        if not len(ranks):
            return np.full(len(asked.rows), NEVER)
        keys: Ints = ranks.take(asked.rows)
        keys[asked.strangers] = NEVER
        if barred := self._barred(request):
            keys[np.isin(asked.rows, barred)] = NEVER
        return keys

    def _barred(self, request: Request) -> list[int]:
        """Rows of nodes that take no pod of this kind, whatever is free there."""
        if not self.ledger.compute_required or request.compute_percent:
            return []
        return rows_of(self.ledger.compute_required, self.ledger.fleet)

    def ranks(self, request: Request) -> Ints:
        """The policy's rank of every row of the fleet, to keep; NEVER where the request does not fit now."""
        self.ledger.flush()
        keys = self.policy.keys(shape_of(request)).copy()
        keys[self._barred(request)] = NEVER
        return keys

    def best(self, keys: Ints) -> Ints:
        """The rows that filter would let pass, the best first."""
        rows = np.flatnonzero(keys != NEVER)
        if 0 < self._filter_best < len(rows):
            rows, _ = best_of(keys, self._filter_best)
        return rows[np.argsort(keys[rows])]

    def _kept_for_others(self, asked: Asked, keys: Ints, pod: WirePod, request: Request) -> Places:
        """Nodes whose room is kept for pods that come before this one: mostly none, never many."""
        closed: list[int] = []
        uid, priority = pod.metadata.uid, pod.spec.priority or 0
        for name in self.ledger.nominations.nodes_closed_to(uid, priority):
            allocations, row = self.ledger.allocations(name), self.ledger.fleet.row_of.get(name)
            if allocations is not None and row is not None:
                state = open_to(allocations, self.ledger.nominations.taken(name, uid, priority))
                if isinstance(place(state, request), Refusal):
                    closed.append(row)
        if not closed:
            return asked.strangers[:0]
        return np.flatnonzero(np.isin(asked.rows, closed) & (keys != NEVER))


_NO_NAMES = b"[]"
_NOBODY: Pieces = (b"{}",)


def rows_of(names: Iterable[str], fleet: Fleet) -> list[int]:
    """The rows of these nodes, without those that share nothing."""
    return [fleet.row_of[name] for name in names if name in fleet.row_of]


def request_of(pod: WirePod) -> Request | None:
    """What the pod asks for, None for nothing and for what can never be given."""
    return _wants(pod).request


def _wants(pod: WirePod) -> PodRequests:
    return pod_requests(pod.spec, pod.metadata.labels)


def _answer(args: ExtenderArgs, names: Json, passing: Places, failed: Pieces, never: Pieces) -> FilterResult:
    """In the form of the question: names for names, whole nodes for whole nodes."""
    result = FilterResult(node_names=names, failed_nodes=failed, failed_and_unresolvable_nodes=never)
    if (nodes := args.whole_nodes) is not None:
        result.nodes = NodeList(items=[nodes[place] for place in passing.tolist()])
    return result
