"""Learns from each pod that a kubelet rejects, and tells those who should know.

Where the next pods go is for the ledger to say. Here what it knows of rejections is kept up to date with the
API server, after a start by the failed pods that are listed.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict

import msgspec

from gpuslice.adapters.kube.events import EventRecorder, node_reference
from gpuslice.adapters.kube.followed_pod import PodNews
from gpuslice.adapters.kube.objects import Condition, ObjectReference
from gpuslice.adapters.kube.slim import SlimNode, SlimOwner
from gpuslice.adapters.web.exposition import Family, MetricKind, labels
from gpuslice.apps.extender.subscriber import BindResult, Subscriber
from gpuslice.core.contract import AMOUNT_NAMES, CARDS_NAMES, NODE_OUT_OF_USE
from gpuslice.core.hold import Hold, HoldKind
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod
from gpuslice.core.preemption import HIGHEST
from gpuslice.core.rejections import KNOWN_REASONS, Rejection, rejection_of, words_of

_log = logging.getLogger(__name__)

REMEMBERED = 10_000  # uids of rejected pods, which the API server may list long after
OTHER_REASON = "other"
OURS = "gpuslice.io/"


class KubeletRejections(Subscriber):
    """Keeps what kubelets have rejected in a ledger."""

    def __init__(self, ledger: Ledger, events: EventRecorder) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()  # by node and reason
        self._ledger = ledger
        self._rejections = ledger.kubelets.rejections
        self._events = events
        self._seen: OrderedDict[str, None] = OrderedDict()  # uids of pods whose rejection has been counted
        self._sent: OrderedDict[str, None] = OrderedDict()  # uids of pods that this replica bound
        self._standing: dict[str, int] = {}  # by node, a hash of what kubelet and the agent say of it
        self._listed = False

    def pod_changed(self, news: PodNews, before: Hold | None) -> None:
        pod = news.view
        if before is not None and before.kind is HoldKind.ASSUMED:
            _remember(self._sent, pod.uid)
        if news.refusal is not None:
            if pod.uid not in self._seen:
                _remember(self._seen, pod.uid)
                is_others = self._listed and self.leads and pod.uid not in self._sent
                rejection = rejection_of(
                    pod,
                    news.refusal,
                    self._ledger.kubelets.now_s(),
                    is_news=self._listed,
                    was_sent=not is_others,
                )
                if rejection is not None and self._rejections.add(rejection) and self._listed:
                    self._learn(rejection, pod, news.controller)
        elif pod.node in self._rejections:
            if pod.finished:
                self._ended(before)
            elif pod.assigned:
                self._admitted(pod)

    def pod_gone(self, uid: str, before: Hold | None) -> None:
        if self._rejections and uid not in self._seen:
            self._ended(before)

    def bound(self, result: BindResult) -> None:
        if not result.why_not:
            _remember(self._sent, result.uid)

    def pods_listed(self) -> None:
        """Pods that have their devices disprove what was rejected before."""
        self._listed = True
        for pod in self._ledger.pods.values() if self._rejections else ():
            if pod.assigned:
                self._admitted(pod)

    def node_changed(self, node: SlimNode) -> None:
        """Whatever changes of what kubelet and the agent say there may change kubelet's mind."""
        name, standing = node.metadata.name, standing_of(node)
        if self._standing.get(name) != standing:
            self._standing[name] = standing
            self._rejections.changed(name, self._ledger.kubelets.now_s())

    def cards_out_of_use(self, node: str, cards: frozenset[int]) -> None:
        self._rejections.changed(node, self._ledger.kubelets.now_s())

    def node_gone(self, name: str) -> None:
        self._rejections.remove_node(name)
        self._standing.pop(name, None)
        for key in [key for key in self.counts if key[0] == name]:
            del self.counts[key]

    def _ended(self, held: Hold | None) -> None:
        if held is not None and not held.kind.is_tentative:
            self._rejections.untried(held.pod.uid, held.node)
            self._rejections.changed(held.node, self._ledger.kubelets.now_s())

    def _admitted(self, pod: Pod) -> None:
        self._rejections.admitted(pod, min(self._ledger.kubelets.now_s(), pod.assume_time_ns / 1e9))

    def _learn(self, rejection: Rejection, pod: Pod, controller: SlimOwner | None) -> None:
        """Count it, give up what was planned there, and tell the node, and whoever makes the next pod."""
        now_s = self._ledger.kubelets.now_s()
        self._rejections.forget_old(now_s)
        if pod.request is not None:  # what was chosen there before
            self._ledger.release_nominated(pod.request, HIGHEST, rejection.node)
        if not self.leads:
            return
        reason = rejection.reason if rejection.reason in KNOWN_REASONS else OTHER_REASON
        self.counts[rejection.node, reason] += 1
        _log.warning(
            "kubelet rejected a pod",
            extra={"pod": pod.key, "node": rejection.node, "reason": reason, "error": rejection.message},
        )
        backoff = pod.request and self._rejections.on(rejection.node, pod, pod.request, now_s)
        if backoff and backoff.until_s > now_s:
            text = words_of(backoff)
            about = node_reference(rejection.node)
            message = f"{text}; the last was pod {pod.key}"
            self._events.add(about, "KubeletRejectsPods", message, type="Warning")
            if controller is not None:
                about = ObjectReference(
                    api_version=controller.api_version,
                    kind=controller.kind,
                    namespace=pod.namespace,
                    name=controller.name,
                    uid=controller.uid,
                )
                self._events.add(about, "KubeletRejectsPods", text, type="Warning")

    def families(self) -> list[Family]:
        """Series vanish with their node."""
        rejected = Family(
            "gpuslice_extender_rejections_total",
            MetricKind.COUNTER,
            "Pods that a kubelet did not let start, by node and kubelet's reason.",
        )
        for (node, reason), count in sorted(self.counts.items()):
            rejected.add(count, labels({"node": node, "reason": reason}))
        now_s = self._ledger.kubelets.now_s()
        self._rejections.forget_old(now_s)
        waiting = sum(opens_s > now_s for _, opens_s, _ in self._rejections.by_node())
        about = "Nodes where pods are kept off a card, or all of it, because kubelet rejected some."
        return [
            rejected,
            Family("gpuslice_extender_nodes_in_backoff", MetricKind.GAUGE, about, [("", float(waiting))]),
        ]


def _remember(uids: OrderedDict[str, None], uid: str) -> None:
    uids[uid] = None
    if len(uids) > REMEMBERED:
        uids.popitem(last=False)


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
