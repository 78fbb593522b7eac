"""In which order pods change their cards in the annotations, so that no card is promised beyond its units.

Everybody may read the annotations at any moment, and any write may be lost or late. So a pod is moved to a
card only when nobody else has to leave it and there is room; whoever is in the way is taken off its cards
before. A bound pod without a card counts against every card of its node (see `core.ledger`), so nobody ever
counts too much free, and whoever adds up cards never counts too much promised.

What kubelet gave (a truth) goes before what is only promised to a pod that waits. Whoever is taken off its
cards keeps a note of those that are meant for it, so that the next agent knows them should this one die.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.repair import Repair, wished_cards
from gpuslice.core.annotations import PLACEMENT_ANNOTATIONS
from gpuslice.core.contract import ANN_ASSIGNED, ANN_ASSUME_TIME, ANN_INDEX, ANN_MEANT
from gpuslice.core.model import Node, Placement

KEPT = {ANN_ASSIGNED, ANN_ASSUME_TIME}
"""What says nothing of cards: whether the pod still waits, and since when."""


class Moves:
    """What has to be written, and where everybody stands by the annotations as they were last seen.

    `waiting` have no devices yet, most probable first; `granted` have some, and kubelet's book does not show
    of which cards. `unsure` was sent and may have been written or not.
    """

    def __init__(
        self,
        repairs: Iterable[Repair],
        pods: Iterable[NodePod],
        node: Node,
        *,
        waiting: Iterable[NodePod],
        granted: Iterable[NodePod],
        unsure: Iterable[Repair],
    ) -> None:
        self._repairs = list(repairs)
        self._pods = [pod for pod in pods if not pod.view.finished]
        self._waiting = list(waiting)
        self._granted = list(granted)
        self._unsure = list(unsure)
        self._units = {card.index: card.units for card in node.cards}
        self._targets = {each.pod.view.uid: each.target for each in self._repairs}

    def steps(self, uid: str = "") -> list[Repair]:
        """The next write for each repair, or for that of one pod. After one was done, ask again.

        What may have been written already is written once more, and the answer tells. Nobody moves before.
        """
        wanted = [each for each in self._repairs if uid in ("", each.pod.view.uid)]
        if self._unsure:
            return [*self._unsure, *(each for each in wanted if not each.of_cards)]
        return [step for each in wanted if (step := self._step(each)) is not None]

    def _step(self, repair: Repair) -> Repair | None:
        """`repair` itself, or what must come before it; None when it has to wait."""
        if repair.promise:
            return self._promised(repair)
        leaver = self._leaver(repair)
        if leaver is None:
            return self._given(repair)
        if not leaver.promise and self._leaver(leaver) is None and self._given(leaver) is leaver:
            return leaver
        return withdrawal(leaver.pod, leaver.target)

    def _promised(self, repair: Repair) -> Repair | None:
        return None if self._leaver(repair) is not None or self._crowded(repair) else repair

    def _given(self, repair: Repair) -> Repair:
        """What kubelet gave is there, room or not. Those who may be elsewhere leave its cards before."""
        crowded, grows = self._crowded(repair), _grows(repair).keys()
        for pod in self._granted:
            if not grows.isdisjoint(_stands(pod)):
                return withdrawal(pod, pod.meant)
        for pod in reversed(self._waiting):
            if not crowded.isdisjoint(_stands(pod)):
                return withdrawal(pod, pod.meant)
        return repair

    def _leaver(self, repair: Repair) -> Repair | None:
        """Somebody who is to leave a card that `repair` makes fuller."""
        grows = _grows(repair).keys()
        others = (each for each in self._repairs if each.pod is not repair.pod)
        return next((each for each in others if not grows.isdisjoint(_leaves(each))), None)

    def _crowded(self, repair: Repair) -> set[int]:
        """The cards that `repair` makes fuller and that may then be promised beyond their units."""
        cards = wished_cards(repair.target)
        others = [pod for pod in self._pods if pod.view.uid != repair.pod.view.uid]
        return {
            card
            for card in _grows(repair)
            if cards[card] + sum(self._most(pod, card) for pod in others) > self._units.get(card, 0)
        }

    def _most(self, pod: NodePod, card: int) -> int:
        """What the annotations may say that a pod has of a card, before or after all has been written."""
        target = self._targets.get(pod.view.uid)
        return max(_stands(pod).get(card, 0), wished_cards(target).get(card, 0))


def withdrawal(pod: NodePod, target: Placement | None) -> Repair:
    """Takes a pod off its cards, and notes those that are meant for it."""
    annotations = {name: None for name in PLACEMENT_ANNOTATIONS if name in pod.said and name not in KEPT}
    cards = ",".join(map(str, wished_cards(target)))
    return Repair(pod, {**annotations, ANN_INDEX: None, ANN_MEANT: cards}, "its card is another pod's")


def _stands(pod: NodePod) -> dict[int, int]:
    return wished_cards(pod.view.placement)


def _grows(repair: Repair) -> dict[int, int]:
    """By how much the repair makes which cards fuller."""
    now = _stands(repair.pod)
    more = {card: units - now.get(card, 0) for card, units in wished_cards(repair.target).items()}
    return {card: units for card, units in more.items() if units > 0}


def _leaves(repair: Repair) -> set[int]:
    """The cards that the repair makes emptier."""
    if repair.target is None:
        return set()
    then = wished_cards(repair.target)
    return {card for card, units in _stands(repair.pod).items() if then.get(card, 0) < units}
