"""What could be asked for differently, by what was measured: sizes, and cards that moving pods would empty.

Nothing here knows the future: a peak is that of the time measured, and who takes the advice is told so.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuslice.core.hold import Hold
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Card, Pod
from gpuslice.core.sizing import suggested_size

MOST_CARDS = 100
"""So many cards are advised to be emptied at most: nobody moves more pods than that at once."""
SETTLED_S = 600.0
"""A pod that was placed less than this ago may still be loading: nobody tells it to ask for less."""
MOST_MOVES = 4  # of pods on one card: who must move more gains little
SIZE_RISK = "Sizes are the measured peak plus 10 %: a pod that needs more some day will be refused memory."
MOVE_RISK = (
    "Moving a pod means deleting it and letting it be recreated: its work since the last checkpoint is lost, "
    "and its scheduler may choose another card. Node selectors, affinity and taints are not looked at here."
)


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a pod's one container held on its one card, and whether memory was refused to it."""

    peak_mib: float
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Resize:
    """A pod that asks for too much or, where `more`, for too little."""

    pod: Pod
    units: int
    suggested_units: int
    suggested_mib: int
    peak_mib: float
    more: bool


@dataclass(frozen=True, slots=True)
class Move:
    """A pod to another card."""

    pod: Pod
    units: int
    node: str
    card: int


@dataclass(frozen=True, slots=True)
class EmptyCard:
    """A card on which nobody is left after `moves`."""

    node: str
    card: int
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    """`given_back`: units by namespace that smaller sizes would leave to others. `measured` pods in all, and
    `young` ones that may need less and were not measured for long enough to say so."""

    resizes: tuple[Resize, ...]
    given_back: Mapping[str, int]
    cards: tuple[EmptyCard, ...]
    measured: int = 0
    young: int = 0


def card_of(ledger: Ledger, pod: Pod) -> Card | None:
    """The one card that a pod is on; None where it has several, none, or its size is not known."""
    if pod.placement is None or len(pod.placement.slices) != 1:
        return None
    state, index = ledger.state(pod.node), pod.placement.slices[0].card
    cards = state.node.cards if state is not None else ()
    return next((card for card in cards if card.index == index and card.memory_mib), None)


def advise(
    ledger: Ledger, peaks: Mapping[str, Peak], claims: Ledger | None = None, *, now_s: float = math.inf
) -> Advice:
    """`peaks` by uid of the pod. Who asks for too little comes first, then who could give back most.

    `now_s`: since the epoch, for the age of what was measured. `claims`: what each pod holds on nodes with
    claims. No card of these is emptied: kube-scheduler, which places their pods, ignores cards in use.
    """
    resizes, young = [], 0
    for uid, peak in peaks.items():
        of = claims if claims is not None and uid in claims.pods else ledger
        pod = of.pods.get(uid)
        card = card_of(of, pod) if pod is not None else None
        if pod is None or card is None or pod.placement is None:
            continue
        units = pod.placement.slices[0].units
        better = suggested_size(
            units=units,
            card_units=card.units,
            card_mib=card.memory_mib,
            peak_mib=peak.peak_mib,
            refused=peak.refused,
        )
        if better is None:
            continue
        if not better.more and now_s - pod.assume_time_ns / 1e9 < SETTLED_S:
            young += 1
        else:
            resizes.append(Resize(pod, units, better.units, better.limit_mib, peak.peak_mib, better.more))
    resizes.sort(key=lambda each: (not each.more, each.suggested_units - each.units, each.pod.key))
    given_back: dict[str, int] = defaultdict(int)
    for each in resizes:
        if not each.more:
            given_back[each.pod.namespace] += each.units - each.suggested_units
    ordered = dict(sorted(given_back.items(), key=lambda pair: (-pair[1], pair[0])))
    return Advice(tuple(resizes), ordered, tuple(emptied_cards(ledger)), len(peaks), young)


def emptied_cards(ledger: Ledger) -> Iterable[EmptyCard]:
    """Cards with the least on them, whose pods fit on others that are in use: best fit, one after the other.

    A card that took a pod is not emptied, and an emptied one takes none. Pods on several cards stay.
    """
    room = _Room(ledger)
    found = 0
    for place in sorted(room.holders, key=lambda place: (room.held(place), place)):
        if found == MOST_CARDS:
            return
        holders = room.holders[place]
        if place in room.taken or len(holders) > MOST_MOVES or not room.may_move(place):
            continue
        moves = room.moves(place)
        if moves is not None:
            found += 1
            yield EmptyCard(place[0], place[1], moves)


Place = tuple[str, int]


class _Room:
    """What is free on cards that are in use, by how much of it."""

    def __init__(self, ledger: Ledger) -> None:
        self.holders: dict[Place, list[Hold]] = defaultdict(list)
        self.taken: set[Place] = set()  # cards that a moved pod goes to
        self._left: dict[Place, tuple[int, int]] = {}
        self._by_left: dict[int, set[Place]] = defaultdict(set)
        for name in ledger.node_names():
            state, holds = ledger.state(name), ledger.holds.on(name)
            if state is None or holds is None or not state.node.divides_cards:
                continue
            for hold in holds.by_uid.values():
                for part in hold.placement.slices if hold.placement else ():
                    self.holders[name, part.card].append(hold)
            whole = 0 if state.node.compute_percent else None
            for slot, card in enumerate(state.node.cards):
                if (name, card.index) in self.holders and card.index not in state.node.unhealthy:
                    compute = 100 if whole is None else state.compute_left[slot]
                    self._put((name, card.index), state.left[slot], compute)

    def held(self, place: Place) -> int:
        return sum(
            part.units
            for hold in self.holders[place]
            for part in (hold.placement.slices if hold.placement else ())
            if part.card == place[1]
        )

    def may_move(self, place: Place) -> bool:
        return place in self._left and all(
            each.placement is not None and len(each.placement.slices) == 1 and not each.pod.terminating
            for each in self.holders[place]
        )

    def moves(self, place: Place) -> tuple[Move, ...] | None:
        """Where each pod of a card would go, the largest first; None where one has no place."""
        before = dict(self._left)
        self._drop(place)
        found: list[Move] = []
        parts = [(each, each.placement.slices[0]) for each in self.holders[place] if each.placement]
        for hold, part in sorted(parts, key=lambda pair: -pair[1].units):
            target = self._tightest(part.units, part.compute_percent)
            if target is None:
                for other, left in before.items():  # all of it as it was
                    if self._left.get(other) != left:
                        self._put(other, *left)
                return None
            units, compute = self._left[target]
            self._put(target, units - part.units, compute - part.compute_percent)
            found.append(Move(hold.pod, part.units, *target))
        self.taken.update((move.node, move.card) for move in found)
        return tuple(found)

    def _tightest(self, units: int, compute_percent: int) -> Place | None:
        for left in sorted(each for each, places in self._by_left.items() if each >= units and places):
            fitting = [each for each in self._by_left[left] if self._left[each][1] >= compute_percent]
            if fitting:
                return min(fitting)
        return None

    def _put(self, place: Place, units: int, compute_percent: int) -> None:
        self._drop(place)
        self._left[place] = (units, compute_percent)
        self._by_left[units].add(place)

    def _drop(self, place: Place) -> None:
        known = self._left.pop(place, None)
        if known is not None:
            self._by_left[known[0]].discard(place)
