"""What was decided about a pod, published once to all who only listen: events, times, traces, wakers."""

from __future__ import annotations

from dataclasses import dataclass

from gpuslice.apps.extender.node_query import NodeQuery, Positions
from gpuslice.core.model import CardSlice, Pod


@dataclass(frozen=True, slots=True)
class FilterVerdict:
    """filter's answer about a pod: which of the nodes in the question pass.

    `why_not` is for the pod's owner, if none does, and `error` for kube-scheduler, if nothing was decided.
    `is_known`: the API server has shown the pod, so it is not only what a question says. `in_group`: its
    members get their cards together, so that room for one is useless.
    """

    pod: Pod
    query: NodeQuery
    passing: Positions
    is_known: bool
    in_group: bool = False
    why_not: str = ""
    error: str = ""
    took_s: float = 0.0

    @property
    def is_refusal(self) -> bool:
        """Whether a pod that asks for cards fits nowhere by itself."""
        return not (len(self.passing) or self.error or self.in_group or self.pod.request is None)


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


class VerdictListener:
    """Hears of each verdict and of each bind, and changes neither."""

    def decided(self, verdict: FilterVerdict) -> None:
        """filter has answered."""

    def bound(self, result: BindResult) -> None:
        """A bind has ended."""
