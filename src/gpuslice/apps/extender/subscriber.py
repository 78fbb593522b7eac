"""What happens, published to all who subscribe: what the API server shows, what is decided, and who leads.

Who only subscribes changes no decision. Shortcuts are asked as well, where a search or a wait can be saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass

from gpuslice.adapters.kube.followed_pod import PodNews
from gpuslice.adapters.kube.slim import SlimNode
from gpuslice.core.hold import Hold
from gpuslice.core.model import CardSlice, Pod
from gpuslice.core.policy.fleet import Ints, Rows


@dataclass(frozen=True, slots=True)
class FilterVerdict:
    """filter's answer about a pod: `passed` of the `asked` nodes in the question pass, all as rows.

    `why_not` is for the pod's owner, if none does, and `error` for kube-scheduler, if nothing was decided.
    `is_known`: the API server has shown the pod, so it is not only what a question says. `in_group`: its
    members get their cards together, so that room for one is useless.
    """

    pod: Pod
    asked: Rows
    passed: Ints
    is_known: bool
    in_group: bool = False
    why_not: str = ""
    error: str = ""
    took_s: float = 0.0

    @property
    def is_refusal(self) -> bool:
        """Whether a pod that asks for cards fits nowhere by itself."""
        return not (len(self.passed) or self.error or self.in_group or self.pod.request is None)


@dataclass(frozen=True, slots=True)
class BindResult:
    """How a bind ended: `why_not` is "" if the pod is bound. `pod`: as it is known by now."""

    uid: str
    key: str
    node: str
    pod: Pod | None
    slices: tuple[CardSlice, ...]
    passed: int  # how many nodes filter left for kube-scheduler to choose from
    took_s: float
    why_not: str


class Subscriber:
    """Hears of all that happens; what is shown it hears when the ledger knows it already."""

    leads = False
    """Whether this replica decides, as far as was heard; what is sent to the API server is checked again."""

    def pod_changed(self, news: PodNews, before: Hold | None) -> None:
        """The API server shows a pod, which held `before` until now."""

    def pod_gone(self, uid: str, before: Hold | None) -> None:
        """A pod no longer exists."""

    def pods_listed(self) -> None:
        """All pods have been read."""

    def node_changed(self, node: SlimNode) -> None:
        """The API server shows a node, as read."""

    def node_gone(self, name: str) -> None:
        """A node no longer exists."""

    def cards_out_of_use(self, node: str, cards: frozenset[int]) -> None:
        """By its ConfigMap, a node's cards that are sick."""

    def decided(self, verdict: FilterVerdict) -> None:
        """filter has answered."""

    def bound(self, result: BindResult) -> None:
        """A bind has ended."""

    def started_leading(self) -> None:
        """This replica decides from now on; what an earlier leader began is settled."""
        self.leads = True

    def stopped_leading(self) -> None:
        """Another replica decides from now on."""
        self.leads = False


class Shortcuts(Subscriber):
    """Asked where kube-scheduler can be saved a search; here none is.

    Without shortcuts it finds the same nodes by itself, only later.
    """

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()  # of nominations

    def asked(self, uid: str, rows: Rows) -> None:
        """kube-scheduler asks about a pod on these rows, before anything is decided."""

    def passes_one(self, uid: str) -> bool:
        """Whether only the node is to pass on which cards are held for the pod, though others would do."""
        return False

    async def written(self, uid: str) -> None:
        """Wait until no request of ours for this pod is in flight."""

    def backpressure(self) -> Awaitable[None] | None:
        """What filter's answer should wait for."""
        return None
