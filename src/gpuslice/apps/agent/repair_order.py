"""In which order pods change their cards in the annotations, so that no card is promised beyond its units.

Anybody may read the annotations at any moment, and any write may be lost or late. So a pod is moved to a card
only when no other pod has to leave it and there is room; a pod in the way is first taken off its cards. A
bound pod without a card counts against every card of its node (see `core.ledger`), so nobody ever counts too
much as free, and the sum over a card is never too high.

What kubelet gave takes precedence over what is only meant for a waiting pod. If there is still no room, a
container is running there that kubelet has forgotten: the pod may not start (see `plugin`) and stays without
a card. A pod taken off its cards keeps a note of those meant for it, so that the next agent knows them if
this one dies.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.repair import Repair, units_by_card
from gpuslice.core.annotations import PLACEMENT_ANNOTATIONS
from gpuslice.core.contract import ANN_ASSIGNED, ANN_ASSUME_TIME, ANN_INDEX, ANN_MEANT
from gpuslice.core.model import Node, Placement

OF_NO_CARD = {ANN_ASSIGNED, ANN_ASSUME_TIME}
"""What says nothing about cards: whether the pod still waits, and since when."""


class RepairOrder:
    """What has to be written, and where all pods are by the annotations as last seen.

    `waiting` have no devices yet, most probable first; `granted` have some, and kubelet does not list on
    which cards. `unanswered` was sent and may have been written or not.
    """

    def __init__(
        self,
        repairs: Iterable[Repair],
        pods: Iterable[NodePod],
        node: Node,
        *,
        waiting: Iterable[NodePod],
        granted: Iterable[NodePod],
        unanswered: Iterable[Repair],
    ) -> None:
        self._repairs = list(repairs)
        self._pods = [pod for pod in pods if not pod.view.finished]
        self._waiting = list(waiting)
        self._granted = list(granted)
        self._unanswered = list(unanswered)
        self._units = {card.index: card.units for card in node.cards}
        self._targets = {each.pod.view.uid: each.target for each in self._repairs}

    def next_writes(self, uid: str = "") -> list[Repair]:
        """The next write for each repair, or for that of one pod. After one was done, ask again.

        What may have been written already is written again, and the answer shows it. Nothing else moves
        before that.
        """
        wanted = [each for each in self._repairs if uid in ("", each.pod.view.uid)]
        if self._unanswered:
            return [*self._unanswered, *(each for each in wanted if not each.of_cards)]
        writes = [write for each in wanted if (write := self._next_write(each)) is not None]
        if not any(each.of_cards for each in writes):
            waiting = [pod for pod in self._waiting if uid in ("", pod.view.uid) and self._too_many(pod)]
            writes += [withdrawal(pod, pod.meant) for pod in waiting[-1:]]
        return writes

    def _too_many(self, pod: NodePod) -> bool:
        """Whether its card is promised beyond its units: bound while kubelet gave the card to others."""
        cards = units_by_card(pod.view.placement)
        return any(self._promised(card) > self._units.get(card, 0) for card in cards)

    def _promised(self, card: int, *, but: str = "") -> int:
        """Units of a card that annotations currently promise to all pods except the one of this uid."""
        others = (pod.view for pod in self._pods if pod.view.uid != but)
        return sum(units_by_card(pod.placement).get(card, 0) for pod in others)

    def _next_write(self, repair: Repair) -> Repair | None:
        """`repair` itself, or what must come before it; None if it has to wait."""
        leaver = self._leaver(repair)
        if repair.ahead:
            return None if leaver is not None or self._overfull(repair) else repair
        if leaver is None:
            return self._making_room(repair)
        if not leaver.ahead and self._leaver(leaver) is None and self._making_room(leaver) is leaver:
            return leaver
        return withdrawal(leaver.pod, leaver.target)

    def _making_room(self, repair: Repair) -> Repair | None:
        """Pods that may be elsewhere leave the cards that kubelet gave, before `repair` itself is written."""
        overfull, grows = self._overfull(repair), _grows(repair).keys()
        for pod in self._granted:
            if not grows.isdisjoint(units_by_card(pod.view.placement)):
                return withdrawal(pod, pod.meant)
        for pod in reversed(self._waiting):
            if not overfull.isdisjoint(units_by_card(pod.view.placement)):
                return withdrawal(pod, pod.meant)
        cards, uid = units_by_card(repair.target), repair.pod.view.uid
        if any(cards[card] + self._promised(card, but=uid) > self._units.get(card, 0) for card in grows):
            return withdrawal(repair.pod, repair.target) if repair.pod.view.placement else None
        return repair

    def _leaver(self, repair: Repair) -> Repair | None:
        """A pod that is to leave a card which `repair` makes fuller."""
        grows = _grows(repair).keys()
        for other in self._repairs:
            if other.pod is repair.pod or other.target is None:
                continue
            then = units_by_card(other.target)
            now = units_by_card(other.pod.view.placement)
            if any(card in grows and then.get(card, 0) < units for card, units in now.items()):
                return other
        return None

    def _overfull(self, repair: Repair) -> set[int]:
        """The cards that `repair` makes fuller and that may then be promised beyond their units."""
        cards = units_by_card(repair.target)
        others = [pod for pod in self._pods if pod.view.uid != repair.pod.view.uid]

        def most(pod: NodePod, card: int) -> int:
            """The most that the annotations may give the pod of a card, before or after all writes."""
            now, then = units_by_card(pod.view.placement), units_by_card(self._targets.get(pod.view.uid))
            return max(now.get(card, 0), then.get(card, 0))

        return {
            card
            for card in _grows(repair)
            if cards[card] + sum(most(pod, card) for pod in others) > self._units.get(card, 0)
        }


def withdrawal(pod: NodePod, target: Placement | None) -> Repair:
    """Takes a pod off its cards, and notes those that are meant for it."""
    annotations = {
        name: None for name in PLACEMENT_ANNOTATIONS if name in pod.said and name not in OF_NO_CARD
    }
    cards = ",".join(map(str, units_by_card(target)))
    return Repair(pod, {**annotations, ANN_INDEX: None, ANN_MEANT: cards}, "its card is another pod's")


def _grows(repair: Repair) -> dict[int, int]:
    """By how much the repair makes which cards fuller."""
    now = units_by_card(repair.pod.view.placement)
    more = {card: units - now.get(card, 0) for card, units in units_by_card(repair.target).items()}
    return {card: units for card, units in more.items() if units > 0}
