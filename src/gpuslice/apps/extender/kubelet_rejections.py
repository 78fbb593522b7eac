"""Learns from each pod that a kubelet rejects, and tells those who should know.

Where the next pods go is for the `Placer` to say. Here what is known is kept up to date with the API server,
after a start by the failed pods that are listed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from gpuslice.adapters.kube.events import node_reference
from gpuslice.adapters.kube.followed_pod import PodNews
from gpuslice.adapters.kube.objects import Condition, ObjectReference
from gpuslice.adapters.kube.slim import SlimNode, SlimOwner
from gpuslice.adapters.web.exposition import Family, MetricKind, labels
from gpuslice.apps.extender.leadership import Leadership
from gpuslice.apps.extender.pod_records import PodEvents
from gpuslice.core.contract import AMOUNT_NAMES, CARDS_NAMES, NODE_OUT_OF_USE
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement, Pod, Refusal, Request
from gpuslice.core.placement import IN_BACKOFF, NodeState, place, without_cards
from gpuslice.core.preemption import HIGHEST
from gpuslice.core.rejections import KNOWN_REASONS, Backoff, Rejection, Rejections, rejection_of, words_of

_log = logging.getLogger(__name__)

REMEMBERED = 10_000  # uids of rejected pods, which the API server may list long after
MOST_NAMED = 3  # nodes in one event
OTHER_REASON = "other"
OURS = "gpuslice.io/"


class KubeletRejections:
    """What kubelets have rejected. `now_ns`: since the epoch, as assume times are."""

    def __init__(
        self,
        ledger: Ledger,
        leadership: Leadership,
        events: PodEvents,
        *,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()  # by node and reason
        self._ledger = ledger
        self._rejections = Rejections()
        self._leadership = leadership
        self._events = events
        self._now_ns = now_ns
        self._seen: OrderedDict[str, None] = OrderedDict()  # uids of pods whose rejection has been counted
        self._sent: OrderedDict[str, None] = OrderedDict()  # uids of pods that this replica bound
        self._standing: dict[str, int] = {}  # by node, a hash of what kubelet and the agent say of it
        self._listed = False

    @property
    def now_s(self) -> float:
        return self._now_ns() / 1e9

    # -- what is heard -----------------------------------------------------------------------------------

    def pod_changed(self, news: PodNews) -> None:
        """Before the ledger learns it: what the pod held tells whether somebody has ended there."""
        pod = news.view
        if news.refusal is not None:
            if pod.uid not in self._seen:
                self._seen[pod.uid] = None
                if len(self._seen) > REMEMBERED:
                    self._seen.popitem(last=False)
                is_others = self._listed and self._leadership.leading and pod.uid not in self._sent
                rejection = rejection_of(
                    pod, news.refusal, self.now_s, is_news=self._listed, was_sent=not is_others
                )
                if rejection is not None and self._rejections.add(rejection) and self._listed:
                    self._learn(rejection, pod, news.controller)
        elif pod.node in self._rejections:
            if pod.finished:
                self._ended(pod.uid)
            elif pod.assigned:
                self._admitted(pod)

    def pod_gone(self, uid: str) -> None:
        """A pod is gone from the API server; likewise before the ledger learns it."""
        if self._rejections and uid not in self._seen:
            self._ended(uid)

    def listed(self) -> None:
        """All pods have been read: those that have their devices disprove what was rejected before."""
        self._listed = True
        for pod in self._ledger.pods.values() if self._rejections else ():
            if pod.assigned:
                self._admitted(pod)

    def node_changed(self, node: SlimNode) -> None:
        """As read: whatever changes of what kubelet and the agent say there may change kubelet's mind."""
        name, standing = node.metadata.name, standing_of(node)
        if self._standing.get(name) != standing:
            self._standing[name] = standing
            self.cards_changed(name)

    def cards_changed(self, node: str) -> None:
        """Other cards of the node are out of use than before."""
        self._rejections.changed(node, self.now_s)

    def node_gone(self, name: str) -> None:
        self._rejections.remove_node(name)
        self._standing.pop(name, None)
        for key in [key for key in self.counts if key[0] == name]:
            del self.counts[key]

    def _ended(self, uid: str) -> None:
        held = self._ledger.holds.of(uid)
        if held is not None and not held.kind.is_tentative:
            self._rejections.untried(uid, held.node)
            self._rejections.changed(held.node, self.now_s)

    def _admitted(self, pod: Pod) -> None:
        self._rejections.admitted(pod, min(self.now_s, pod.assume_time_ns / 1e9))

    def _learn(self, rejection: Rejection, pod: Pod, controller: SlimOwner | None) -> None:
        """Count it, give up what was planned there, and tell the node, and whoever makes the next pod."""
        now_s = self.now_s
        self._rejections.forget_old(now_s)
        if pod.request is not None:
            self._ledger.release_nominated(
                pod.request, HIGHEST, rejection.node
            )  # what was chosen there before
        if not self._leadership.leading:
            return
        reason = rejection.reason if rejection.reason in KNOWN_REASONS else OTHER_REASON
        self.counts[rejection.node, reason] += 1
        _log.warning(
            "kubelet rejected a pod",
            extra={"pod": pod.key, "node": rejection.node, "reason": reason, "error": rejection.message},
        )
        backoff = pod.request and self._rejections.on(rejection.node, pod, pod.request, now_s)
        if backoff and backoff.until_s > now_s:
            text = words_of(backoff, clock_time(backoff.until_s))
            about = node_reference(rejection.node)
            self._events.about(about, "KubeletRejectsPods", f"{text}; the last was pod {pod.key}")
            if controller is not None:
                about = ObjectReference(
                    api_version=controller.api_version,
                    kind=controller.kind,
                    namespace=pod.namespace,
                    name=controller.name,
                    uid=controller.uid,
                )
                self._events.about(about, "KubeletRejectsPods", text)

    # -- what is asked -----------------------------------------------------------------------------------

    def rows(self, pod: Pod, request: Request) -> tuple[list[int], list[int]]:
        """The rows of the fleet where back-offs leave the pod no room now, and those that it takes last."""
        closed: list[int] = []
        last_choice: list[int] = []
        for each in self._rejections.backoffs(pod, request, self.now_s) if self._rejections else ():
            row, state = self._ledger.fleet.row_of.get(each.node), self._ledger.state(each.node)
            if row is None or state is None:
                continue
            found = _place_beside(each, state, request)
            if isinstance(found, Refusal):
                closed.append(row)
            elif each.doubtful or not each.doubtful_cards.isdisjoint(part.card for part in found.slices):
                last_choice.append(row)
        return closed, last_choice

    def place(self, state: NodeState, pod: Pod, request: Request) -> Placement | Refusal | None:
        """Cards of a node that are not in back-off; None if none are, so that the policy may choose."""
        backoff = self._rejections.on(state.node.name, pod, request, self.now_s) if self._rejections else None
        return _place_beside(backoff, state, request) if backoff is not None else None

    def closes(self, node: str, pod: Pod) -> bool:
        """Whether it is no use to make room for the pod there now."""
        if pod.request is None or node not in self._rejections:
            return False
        backoff = self._rejections.on(node, pod, pod.request, self.now_s)
        return backoff is not None and backoff.until_s > self.now_s

    def why(self, pod: Pod, request: Request) -> list[str]:
        """What is closed to the pod now, for an event; not more than a few."""
        found = self._rejections.backoffs(pod, request, self.now_s) if self._rejections else ()
        closed = [each for each in found if each.closed or each.closed_cards]
        return [words_of(each, clock_time(each.until_s)) for each in closed[:MOST_NAMED]]

    def tried(self, pod: Pod, placement: Placement) -> None:
        """The pod is about to be bound there."""
        self._sent[pod.uid] = None
        if len(self._sent) > REMEMBERED:
            self._sent.popitem(last=False)
        if placement.node in self._rejections:
            cards = frozenset(part.card for part in placement.slices)
            self._rejections.tried(pod.uid, placement.node, cards, self.now_s)

    def __bool__(self) -> bool:
        return bool(self._rejections)

    def families(self) -> list[Family]:
        """Series vanish with their node."""
        rejected = Family(
            "gpuslice_extender_rejections_total",
            MetricKind.COUNTER,
            "Pods that a kubelet did not let start, by node and kubelet's reason.",
        )
        for (node, reason), count in sorted(self.counts.items()):
            rejected.add(count, labels({"node": node, "reason": reason}))
        self._rejections.forget_old(self.now_s)
        waiting = sum(opens_s > self.now_s for _, opens_s, _ in self._rejections.by_node())
        about = "Nodes where pods are kept off a card, or all of it, because kubelet rejected some."
        return [
            rejected,
            Family("gpuslice_extender_nodes_in_backoff", MetricKind.GAUGE, about, [("", float(waiting))]),
        ]


def _place_beside(backoff: Backoff, state: NodeState, request: Request) -> Placement | Refusal:
    """On cards that are not in back-off, and on those in doubt only where no others have room."""
    if backoff.closed:
        return Refusal(IN_BACKOFF)
    found = place(without_cards(state, backoff.doubtful_cards), request)
    if isinstance(found, Refusal):
        found = place(without_cards(state, backoff.closed_cards), request)
    return found


def clock_time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S UTC")


def standing_of(node: SlimNode) -> int:
    """A hash of all that may matter to kubelet's decisions; not what we write ourselves, nor heartbeats."""
    meta, status = node.metadata, node.status
    names = (*AMOUNT_NAMES, *CARDS_NAMES)
    amounts = [(side or {}).get(name) for side in (status.capacity, status.allocatable) for name in names]
    said = [
        each
        for each in sorted((meta.annotations or {}).items())
        if each[0].startswith(OURS) and each[0] != NODE_OUT_OF_USE
    ]
    marked = sorted(each for each in (meta.labels or {}).items() if each[0] != NODE_OUT_OF_USE)
    conditions = msgspec.json.decode(status.conditions or b"null", type=list[Condition] | None) or ()
    info = msgspec.json.decode(status.node_info or b"null", type=dict[str, str] | None) or {}
    states = [(each.type, each.status) for each in conditions]
    return hash((*amounts, *said, *marked, *states, info.get("bootID"), info.get("kubeletVersion")))
