"""One decision, from kube-scheduler's question to the answer: filter, prioritize, choose, assume.

    filter      which of these nodes can hold the pod, and why not the others
    prioritize  how well it would sit on each of them
    choose      the cards on the node that kube-scheduler picked
    assume      choose, and hold them from this moment on (`binding` then tells the API server)

Everything here is synchronous and looks at the ledger as it is now: no decision rests on a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from gpuslice.adapters.wire.extender import ExtenderArgs, FilterResult, HostPriority
from gpuslice.adapters.wire.extender import Pod as WirePod
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.ledger import Ledger, shape_of
from gpuslice.core.model import Placement, Pod, Refusal, Request
from gpuslice.core.placement import (
    CORE_REQUIRED,
    NO_CORE,
    NO_ROOM,
    NO_ROOM_IN_SEVERAL,
    not_shared,
    place,
    refuse,
)
from gpuslice.core.policy import NEVER, Policy
from gpuslice.core.policy.fleet import Flags, Fleet, Ints, Shape
from gpuslice.core.request import pod_request
from gpuslice.core.views import container_specs

TOP_SCORE = 10  # MaxExtenderPriority
REMEMBERED_REFUSED = 10_000
NO_POD = "arg or pod is nil"
NO_NAMES = "cannot get node names"
NOT_THE_BEST = "The node fits, other nodes are packed better"


@dataclass(frozen=True, slots=True)
class Refused:
    """A pod that fits on none of the nodes asked about, in words for its owner."""

    pod: WirePod
    explanation: str


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
    ) -> None:
        self.ledger = ledger
        self.policy = policy
        self._filter_best = filter_best
        self._explain = explain
        self._on_refused = on_refused
        self._refused: OrderedDict[str, None] = OrderedDict()

    # -- filter --------------------------------------------------------------------------------------------

    def filter(self, args: ExtenderArgs) -> FilterResult:
        """Part the nodes asked about into those that can hold the pod and the others with their reasons."""
        if args.pod is None:
            return FilterResult(error=NO_POD)
        names = args.names()
        if names is None:
            return FilterResult(error=NO_NAMES)
        try:
            request = request_of(args.pod)
        except InvalidRequestError as error:
            reasons = dict.fromkeys(names, str(error))
            self._on_refused(Refused(args.pod, str(error)))
            return _answer(args, [], reasons, reasons)
        if request is None:  # we were asked about a pod that is none of our business
            return _answer(args, names, {}, {})
        return self._filter(args, names, request)

    def _filter(self, args: ExtenderArgs, names: Sequence[str], request: Request) -> FilterResult:
        fleet, shape = self.ledger.flush(), shape_of(request)
        rows = _rows(fleet, names)
        keys = self._keys(shape, rows, names, request)
        fits = keys != NEVER
        passing = list(compress(names, fits))
        failed, never = self._reasons(fleet, names, rows, fits, request)
        if self._filter_best and len(passing) > self._filter_best:
            passing, dropped = self._best(names, keys)
            failed |= dict.fromkeys(dropped, NOT_THE_BEST)
        if not passing:
            self._note_refused(args, names, rows, request)
        return _answer(args, passing, failed, never)

    def _best(self, names: Sequence[str], keys: Ints) -> tuple[list[str], list[str]]:
        """The `filter_best` best of the fitting nodes, and the other fitting ones."""
        best = np.argpartition(keys, self._filter_best - 1)[: self._filter_best]
        chosen = np.zeros(len(keys), dtype=np.bool_)
        chosen[best] = True
        others = (keys != NEVER) & ~chosen
        return list(compress(names, chosen)), list(compress(names, others))

    def _reasons(
        self, fleet: Fleet, names: Sequence[str], rows: Ints, fits: Flags, request: Request
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Why each node was refused, and the part of it that not even an empty node would change."""
        refused = ~fits
        if not refused.any():
            return {}, {}
        texts, never = _texts(fleet, rows, request)
        failed: dict[str, str] = {}
        unresolvable: dict[str, str] = {}
        for name, text, final in compress(zip(names, texts, never, strict=True), refused):
            reason = text or self._special(name, request)
            failed[name] = self._explained(name, request, reason)
            if final:
                unresolvable[name] = failed[name]
        return failed, unresolvable

    def _special(self, name: str, request: Request) -> str:
        state = self.ledger.state(name)
        return refuse(state, request).reason if state is not None else not_shared(name).reason

    def _explained(self, name: str, request: Request, reason: str) -> str:
        if not self._explain:
            return reason
        state = self.ledger.state(name)
        return str(refuse(state, request)) if state is not None else reason

    def _note_refused(self, args: ExtenderArgs, names: Sequence[str], rows: Ints, request: Request) -> None:
        """Tell the policy, once for a pod, that its shape fits nowhere; tell the owner why."""
        assert args.pod is not None
        uid, shape = args.pod.metadata.uid, shape_of(request)
        if uid not in self._refused and self.policy.choose(shape) is None:
            self._refused[uid] = None
            self.policy.refused(shape)
            if len(self._refused) > REMEMBERED_REFUSED:
                self._refused.popitem(last=False)
        self._on_refused(Refused(args.pod, self._explanation(names, rows, request)))

    def _explanation(self, names: Sequence[str], rows: Ints, request: Request) -> str:
        """What was asked, what is missing and the most that would fit, over all nodes asked about."""
        shared = int((rows >= 0).sum())
        if not shared:
            return f"asked for {request.units} units; none of the {len(names)} nodes shares its cards"
        left = np.sort(self.ledger.fleet.left[rows], axis=1)[:, ::-1]
        most = np.where(rows >= 0, left[:, min(request.gpu_count, left.shape[1]) - 1], -1)
        state = self.ledger.state(names[int(most.argmax())])
        detail = refuse(state, request).detail if state is not None else ""
        return f"{detail} ({shared} nodes with shared cards looked at)"

    # -- prioritize ----------------------------------------------------------------------------------------

    def prioritize(self, args: ExtenderArgs) -> list[HostPriority]:
        """Scores 0…10: the node to take has 10, alone, since kube-scheduler draws lots among equals."""
        names = args.names() or []
        try:
            request = request_of(args.pod) if args.pod is not None else None
        except InvalidRequestError:
            request = None
        if request is None or not names:
            return [HostPriority(name, 0) for name in names]
        rows = _rows(self.ledger.flush(), names)
        scores = _scores(self._keys(shape_of(request), rows, names, request))
        return list(map(HostPriority, names, scores))

    # -- choose, assume --------------------------------------------------------------------------------------

    def choose(self, node_name: str, request: Request) -> Placement | Refusal:
        """The cards of one node for a request, as things stand."""
        fleet, shape = self.ledger.flush(), shape_of(request)
        state = self.ledger.state(node_name)
        row = fleet.row_of.get(node_name)
        if state is None or row is None:
            return not_shared(node_name)
        if self.policy.keys(shape)[row] == NEVER:
            return refuse(state, request)
        return place(state, request, self.policy.slots(shape, row))

    def assume(self, pod: Pod, request: Request, node_name: str) -> Placement | Refusal:
        """Choose cards for `pod` and hold them from now on."""
        chosen = self.choose(node_name, request)
        if isinstance(chosen, Refusal):
            return chosen
        return self.ledger.assume(pod, chosen) or chosen

    # -- the arrays ------------------------------------------------------------------------------------------

    def _keys(self, shape: Shape, rows: Ints, names: Sequence[str], request: Request) -> Ints:
        """The policy's rank of each node asked about; NEVER where it does not fit or is not known."""
        ranks = self.policy.keys(shape)
        keys = np.where(rows >= 0, ranks[rows], NEVER) if len(ranks) else np.full(len(rows), NEVER)
        if self.ledger.core_required and not request.core_percent:
            keys[[name in self.ledger.core_required for name in names]] = NEVER
        return keys


def request_of(pod: WirePod) -> Request | None:
    """What the pod asks for, None for nothing. Raises `InvalidRequestError`."""
    return pod_request(container_specs(pod.spec), pod.metadata.labels)


def _rows(fleet: Fleet, names: Sequence[str]) -> Ints:
    """Row of each node, -1 where it is not known or shares nothing."""
    get = fleet.row_of.get
    return np.array([get(name, -1) for name in names], dtype=np.int64)


def _texts(fleet: Fleet, rows: Ints, request: Request) -> tuple[list[str], list[bool]]:
    """Per node the reason if it were refused, "" where only a closer look tells; and whether it is final."""
    if not fleet.rows:
        return [""] * len(rows), [True] * len(rows)
    each, known = request.units_per_gpu, rows >= 0
    large_enough = (fleet.size[rows] >= each).sum(axis=1) >= request.gpu_count
    text = NO_ROOM if request.gpu_count == 1 else NO_ROOM_IN_SEVERAL.format(count=request.gpu_count)
    texts = np.where(known, text, "")
    if request.core_percent:
        roomy = (fleet.left[rows] >= each).any(axis=1)
        texts = np.where(known & roomy, NO_CORE, texts)
    else:
        roomy = (fleet.left[rows] >= each).sum(axis=1) >= request.gpu_count
        texts = np.where(known & roomy, CORE_REQUIRED, texts)
    return texts.tolist(), (~known | ~large_enough).tolist()


def _scores(keys: Ints) -> list[int]:
    """Best key 10, the others by their cost between 9 and 0, what does not fit 0."""
    fits = keys != NEVER
    scores = np.zeros(len(keys), dtype=np.int64)
    if not fits.any():
        return scores.tolist()
    costs = (keys >> 32).astype(np.float64)  # the policy's own cost, without the fixed order among equals
    least, most = costs[fits].min(), costs[fits].max()
    spread = (most - least) or 1.0
    scores[fits] = np.round((TOP_SCORE - 1) * (most - costs[fits]) / spread).astype(np.int64)
    scores[int(keys.argmin())] = TOP_SCORE
    return scores.tolist()


def _answer(
    args: ExtenderArgs, passing: list[str], failed: dict[str, str], never: dict[str, str]
) -> FilterResult:
    """In the form of the question: names for names, whole nodes for whole nodes."""
    result = FilterResult(node_names=passing, failed_nodes=failed, failed_and_unresolvable_nodes=never)
    if args.node_names is None and args.nodes is not None:
        kept, names = set(passing), args.names() or []
        items = [item for name, item in zip(names, args.nodes.items or (), strict=True) if name in kept]
        result.nodes = {"metadata": {}, "items": items}
    return result
