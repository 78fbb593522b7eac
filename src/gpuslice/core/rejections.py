"""What kubelets have rejected, and where the next pods should not go for a while.

kubelet decides alone whether a pod that was bound to its node may start there, and its no is final: the pod
has failed, and only a controller's next pod gets another chance. Each rejection says something of the cards,
of the node, or of pods like this one (`Scope`). What it concerns is in *back-off* from then on: closed for a
time that doubles with each round of rejections, and in doubt after that. What is in doubt is chosen only
where nothing else has room, and one pod at a time tries it. A pod that gets its devices there ends the doubt,
a change on the node (somebody has ended, the agent or kubelet says something new) ends the waiting.

All times are seconds since the epoch; what is later than now, by a clock that was set back, says nothing.
What is known can be rebuilt from the pods that the API server lists, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import inf

from gpuslice.core.contract import AMOUNT_NAMES
from gpuslice.core.errors import printable
from gpuslice.core.model import Placement, Pod, Refusal, Request
from gpuslice.core.placement import IN_BACKOFF, NodeState, place, without_cards
from gpuslice.core.words import counted

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 15.0, 600.0
MOST_A_MINUTE = 4  # rejections on a node, however often something changes there
SEVERAL = 3  # rejections on more than one card, with nothing admitted since, are the node's fault
FORGOTTEN_AFTER_S = 1800.0
TRIAL_S = 60.0  # what takes longer than that has been admitted, or nobody says so any more
REMEMBERED = 64  # rejections of one node
LONGEST_MESSAGE = 240  # characters: it is shown in events


class Scope(Enum):
    """What a rejection concerns."""

    CARDS = auto()  # the cards that were chosen, for requests that are as large or larger
    NODE = auto()  # whoever is sent there
    ALIKE = auto()  # pods of the same shape in the same namespace: the cause may be the pod's own


NODE_REASONS = frozenset(
    {"Evicted", "NodeShutdown", "Shutdown", "Terminated", "InvalidNodeInfo", "OutOfpods"}
)
"""kubelet's reasons that say something of the node alone."""
KNOWN_REASONS = NODE_REASONS | {
    "UnexpectedAdmissionError",
    "TopologyAffinityError",
    "NodeAffinity",
    "NodePorts",
    "OutOfcpu",
    "OutOfmemory",
    "OutOfephemeral-storage",
    "PreStartContainer",
}
OWN_REASONS = frozenset({"DeadlineExceeded", "Preempting"})  # not about the node, even if nothing started
NO_PLUGIN = ("no healthy devices", "unregistered device", "endpoint not found", "code = Unavailable")
"""In kubelet's messages: no amount would have been given out."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """One pod that a kubelet did not let start. `units`: of each card."""

    uid: str
    pod: str
    alike: tuple[str, int, int, int]
    node: str
    units: int
    cards: frozenset[int]
    scope: Scope
    reason: str
    message: str
    at_s: float

    def concerns(self, alike: tuple[str, int, int, int], units: int) -> bool:
        if self.scope is Scope.ALIKE:
            return self.alike == alike
        return self.scope is Scope.NODE or units >= self.units


@dataclass(frozen=True, slots=True)
class Backoff:
    """What of a node a pod is kept from now; after that it is the last choice, as what is `doubtful` now."""

    node: str
    closed: bool  # all of it
    doubtful: bool
    closed_cards: frozenset[int]
    doubtful_cards: frozenset[int]
    until_s: float  # the first moment at which more is open; -inf if nothing is closed
    count: int
    last: Rejection

    def place(self, state: NodeState, request: Request) -> Placement | Refusal:
        """On cards of the node that are open, and on those in doubt only where no others have room."""
        if self.closed:
            return Refusal(IN_BACKOFF)
        found = place(without_cards(state, self.doubtful_cards), request)
        if isinstance(found, Refusal):
            found = place(without_cards(state, self.closed_cards), request)
        return found


def alike(pod: Pod, request: Request) -> tuple[str, int, int, int]:
    """Equal for pods that are treated as one in what may be their own fault."""
    return pod.namespace, request.units_per_card, request.card_count, request.compute_percent


def scope_of(reason: str, message: str, *, asks_others: bool) -> Scope:
    """What a rejection concerns. `asks_others`: the pod asks for devices of other plugins as well."""
    if reason in NODE_REASONS or reason.removeprefix("OutOf") in AMOUNT_NAMES:
        return Scope.NODE
    if reason not in {"UnexpectedAdmissionError", "TopologyAffinityError"}:
        return Scope.ALIKE
    if asks_others and not any(name in message for name in AMOUNT_NAMES):
        return Scope.ALIKE
    return Scope.NODE if any(words in message for words in NO_PLUGIN) else Scope.CARDS


@dataclass(slots=True)
class _Node:
    rejections: list[Rejection] = field(default_factory=list)  # by time
    admitted_s: float = -inf  # when the last pod got its devices
    changed_s: float = -inf
    trials: dict[str, tuple[frozenset[int], float]] = field(default_factory=dict)  # by uid: cards, since when


class Rejections:
    """By node, what was rejected and not disproved since. Empty, and without any cost, as a rule."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def __contains__(self, node: str) -> bool:
        return node in self._nodes

    # -- what becomes known ------------------------------------------------------------------------------

    def add(self, rejection: Rejection) -> bool:
        """False if it is known already."""
        node = self._nodes.setdefault(rejection.node, _Node())
        node.trials.pop(rejection.uid, None)
        if any(each.uid == rejection.uid for each in node.rejections):
            return False
        node.rejections.append(rejection)
        node.rejections.sort(key=lambda each: each.at_s)
        del node.rejections[:-REMEMBERED]
        return True

    def admitted(self, pod: Pod, at_s: float) -> None:
        """kubelet gave a pod its devices at that time: what was rejected before that is possible again."""
        node = self._nodes.get(pod.node)
        if node is None or pod.request is None or pod.placement is None:
            return
        if (trial := node.trials.pop(pod.uid, None)) is not None:
            at_s = max(at_s, trial[1])  # whatever the clock of the pod's node says
        node.admitted_s = max(node.admitted_s, at_s)
        cards = frozenset(part.card for part in pod.placement.slices)
        same, units = alike(pod, pod.request), pod.request.units_per_card
        left = []
        for each in node.rejections:
            is_like = each.alike == same if each.scope is Scope.ALIKE else units >= each.units
            if each.at_s >= at_s or not (is_like or each.scope is Scope.NODE):
                left.append(each)
            elif each.scope is Scope.CARDS and each.cards - cards:
                left.append(replace(each, cards=each.cards - cards))
        node.rejections = left
        if not left:
            del self._nodes[pod.node]

    def tried(self, uid: str, node_name: str, cards: frozenset[int], now_s: float) -> None:
        """A pod is sent there: where something is in doubt, no other is until it is known how it ends."""
        if (node := self._nodes.get(node_name)) is not None:
            node.trials[uid] = cards, now_s

    def untried(self, uid: str, node_name: str) -> None:
        """The pod is not on its way there any more."""
        if (node := self._nodes.get(node_name)) is not None:
            node.trials.pop(uid, None)

    def changed(self, node_name: str, now_s: float) -> None:
        """Something on the node is not as it was: kubelet may think otherwise now."""
        if (node := self._nodes.get(node_name)) is not None:
            node.changed_s = now_s

    def remove_node(self, name: str) -> None:
        self._nodes.pop(name, None)

    def forget_old(self, now_s: float) -> None:
        """Let go of what happened so long ago that it says nothing any more."""
        for name, node in tuple(self._nodes.items()):
            node.rejections = [each for each in node.rejections if each.at_s > now_s - FORGOTTEN_AFTER_S]
            if not node.rejections:
                del self._nodes[name]

    # -- what is asked -----------------------------------------------------------------------------------

    def backoffs(self, pod: Pod, request: Request, now_s: float) -> list[Backoff]:
        """What a pod is kept from now, or should take last, by node."""
        found = (self._backoff(name, pod, request, now_s) for name in self._nodes)
        return [each for each in found if each is not None]

    def on(self, node: str, pod: Pod, request: Request, now_s: float) -> Backoff | None:
        """The same of one node."""
        return self._backoff(node, pod, request, now_s) if node in self._nodes else None

    def by_node(self) -> Iterator[tuple[str, float, Sequence[Rejection]]]:
        """Of each node, until when something is closed to somebody there, and what was rejected."""
        for name, node in self._nodes.items():
            by_subject: dict[object, list[float]] = {}
            for each in node.rejections:
                subjects = each.cards if each.scope is Scope.CARDS else (each.scope,)
                for subject in subjects:
                    by_subject.setdefault(subject, []).append(each.at_s)
            opens_s = max((_opens_s(times, node) for times in by_subject.values()), default=-inf)
            yield name, opens_s, node.rejections

    def _backoff(self, name: str, pod: Pod, request: Request, now_s: float) -> Backoff | None:
        node, same = self._nodes[name], alike(pod, request)
        units = request.units_per_card
        mine = [
            each
            for each in node.rejections
            if now_s - FORGOTTEN_AFTER_S < each.at_s <= now_s and each.concerns(same, units)
        ]
        if not mine:
            return None
        of_cards = [each for each in mine if each.scope is Scope.CARDS]
        cards = frozenset[int]().union(*(each.cards for each in of_cards))
        opens_s = {
            card: _opens_s([each.at_s for each in of_cards if card in each.cards], node) for card in cards
        }
        of_all = [each.at_s for each in mine if each.scope is not Scope.CARDS]
        since = [each for each in of_cards if each.at_s > node.admitted_s]
        if len(since) >= SEVERAL and len(frozenset[int]().union(*(each.cards for each in since))) > 1:
            of_all += [each.at_s for each in since]
        node_opens_s = _opens_s(sorted(of_all), node) if of_all else -inf

        # what is in doubt is tried by one pod at a time
        proven = not of_all and node.admitted_s > mine[-1].at_s
        for uid, (tried, since_s) in node.trials.items():
            if uid != pod.uid and since_s <= now_s < since_s + TRIAL_S:
                if not proven:
                    node_opens_s = max(node_opens_s, since_s + TRIAL_S)
                for card in tried & cards:
                    opens_s[card] = max(opens_s[card], since_s + TRIAL_S)
        closed_cards = frozenset(card for card in cards if opens_s[card] > now_s)
        closed = node_opens_s > now_s
        until_s = node_opens_s if closed else min((opens_s[card] for card in closed_cards), default=-inf)
        return Backoff(name, closed, not proven, closed_cards, cards, until_s, len(mine), mine[-1])


def _opens_s(times: Sequence[float], node: _Node) -> float:
    """When what was rejected at these times may be tried again."""
    rounds, begun_s = 0, -inf
    for at_s in times:
        if at_s >= begun_s + FIRST_BACKOFF_S:  # those before were sent when nothing was known yet
            rounds, begun_s = rounds + 1, at_s
    opens_s = times[-1] + min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (rounds - 1))
    if node.changed_s > times[-1]:
        opens_s = min(opens_s, node.changed_s)
    if len(node.rejections) < MOST_A_MINUTE:
        return opens_s
    return max(opens_s, node.rejections[-MOST_A_MINUTE].at_s + 60.0)


# -- what the API server shows of a pod --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KubeletRefusal:
    """kubelet's own words about a pod that it did not let start. `at_s`: 0 if it does not say when."""

    reason: str
    message: str
    asks_others: bool = False
    at_s: float = 0.0


def refusal_of(
    phase: str, reason: str, message: str, containers: Sequence[Mapping[str, object]]
) -> KubeletRefusal | None:
    """kubelet's refusal of a pod on its node, by the pod's status; None if it let it start.

    `containers`: the states of its containers. A pod that kubelet rejects has none (rejectPod of 1.27 to
    1.36); one that is evicted or stopped later has some that started. A container whose device plugin refuses
    at PreStartContainer waits, and kubelet tries it again in the same pod.
    """
    if phase == "Failed":
        if not reason or reason in OWN_REASONS or any(map(_has_started, containers)):
            return None
        if reason == "Evicted" and "had condition" not in message:  # it was admitted, and evicted later
            return None
        return KubeletRefusal(reason, _shortened(message.removeprefix("Pod was rejected: ")))
    for each in containers if phase == "Pending" else ():
        waiting = _part(_part(each, "state"), "waiting")
        words = str(waiting.get("message") or "")
        if "PreStartContainer" in words:
            return KubeletRefusal("PreStartContainer", _shortened(words))
    return None


def rejection_of(
    pod: Pod, refusal: KubeletRefusal, now_s: float, *, is_news: bool, was_sent: bool = True
) -> Rejection | None:
    """None for a pod that no annotation sent there. `is_news`: it happens now, otherwise when it says.

    `was_sent`: false for a pod that its owner put there, which says nothing that others should suffer from.
    """
    request, placement = pod.request, pod.placement
    if not pod.node or request is None or placement is None:
        return None
    scope = Scope.ALIKE
    if was_sent:
        scope = scope_of(refusal.reason, refusal.message, asks_others=refusal.asks_others)
    return Rejection(
        uid=pod.uid,
        pod=pod.key,
        alike=alike(pod, request),
        node=pod.node,
        units=request.units_per_card,
        cards=frozenset(part.card for part in placement.slices),
        scope=scope,
        reason=refusal.reason,
        message=refusal.message,
        at_s=now_s if is_news else min(now_s, max(refusal.at_s, pod.assume_time_ns / 1e9)),
    )


def words_of(backoff: Backoff) -> str:
    """A sentence without its full stop, which says until when."""
    minutes, seconds = divmod(int(backoff.until_s), 60)
    at = f"{minutes // 60 % 24:02}:{minutes % 60:02}:{seconds:02} UTC"
    cards, last = ", ".join(map(str, sorted(backoff.closed_cards))), backoff.last
    who = counted(backoff.count, "pod")
    return (
        f"kubelet on {backoff.node} rejected {who}, the last one with {last.reason} ({last.message}): "
        f"{'the node' if backoff.closed else f'card {cards} there'} is in back-off until {at}"
    )


def _has_started(container: Mapping[str, object]) -> bool:
    state, last = _part(container, "state"), _part(container, "lastState")
    ended = _part(state, "terminated")
    return bool("running" in state or ended.get("startedAt") or last or container.get("restartCount"))


def _part(of: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = of.get(name)
    return found if isinstance(found, Mapping) else {}


def _shortened(message: str) -> str:
    text = printable(message)
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 1]}…"
