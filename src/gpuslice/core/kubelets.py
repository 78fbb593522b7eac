"""What kubelets let start, as far as it is known, and from where that keeps the next pods."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuslice.core.hold import Hold, HoldKind
from gpuslice.core.model import Node, Pod, Refusal, Request
from gpuslice.core.placement import NodeState
from gpuslice.core.rejections import Backoff, Rejections
from gpuslice.core.unconfirmed import Unconfirmed


class Kubelets:
    """Of all nodes. `now_s`: seconds since the epoch; without a clock nothing keeps anybody."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        self.rejections = Rejections()
        self.unconfirmed = Unconfirmed()

    def has(self, hold: Hold, node: Node | None) -> None:
        """A pod has cards on a node, or will have some. Members of a group are not kept apart."""
        now_s, pod = self.now_s(), hold.pod
        if pod.assigned:
            self.unconfirmed.drop(pod.uid, now_s, started=True)
        elif node is not None and node.is_described and hold.kind is not HoldKind.GROUP:
            since_s = pod.assume_time_ns / 1e9 if hold.is_bound else now_s
            self.unconfirmed.put(pod.uid, node.name, since_s, now_s)
        if hold.kind is HoldKind.ASSUMED and hold.placement is not None and hold.node in self.rejections:
            cards = frozenset(part.card for part in hold.placement.slices)
            self.rejections.tried(pod.uid, hold.node, cards, now_s)

    def has_not(self, uid: str) -> None:
        """The pod has none any more."""
        self.unconfirmed.drop(uid, self.now_s())

    def keep_somebody(self) -> bool:
        """Whether any node is to be avoided by somebody: as a rule none is."""
        return bool(self.rejections or self.unconfirmed.crowded(self.now_s()))

    def rows_to_avoid(
        self, request: Request, pod: Pod, row_of: Mapping[str, int], state: Callable[[str], NodeState | None]
    ) -> tuple[list[int], list[int]]:
        """The rows where rejections leave the pod no room now, and those that it takes last."""
        closed: list[int] = []
        crowded = self.unconfirmed.crowded(self.now_s())
        last_choice = [row for node in crowded if (row := row_of.get(node)) is not None]
        for each in self.rejections.backoffs(pod, request, self.now_s()):
            row, there = row_of.get(each.node), state(each.node)
            if row is None or there is None:
                continue
            found = each.place(there, request)
            if isinstance(found, Refusal):
                closed.append(row)
            elif each.doubtful or not each.doubtful_cards.isdisjoint(part.card for part in found.slices):
                last_choice.append(row)
        return closed, last_choice

    def backoff(self, node: str, request: Request, pod: Pod) -> Backoff | None:
        """What the pod is kept from on a node because its kubelet has rejected pods; None if nothing."""
        return self.rejections.on(node, pod, request, self.now_s()) if self.rejections else None

    def reject(self, node: str, pod: Pod) -> bool:
        """Whether it is no use to make room for the pod there now."""
        backoff = self.backoff(node, pod.request, pod) if pod.request is not None else None
        return backoff is not None and backoff.until_s > self.now_s()
