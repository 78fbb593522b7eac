"""What could be asked for differently, by what was measured: sizes, and cards that moving pods would empty.

Nothing here knows the future: a peak is that of the time measured, and who takes the advice is told so.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gpuslice.core.hold import Hold
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Card, Pod
from gpuslice.core.sizing import Suggestion, suggested_size
from gpuslice.core.units import limit_mib, worth_mib

MayRun = Callable[[Pod, str], bool]
MOST_CARDS = 100
"""So many cards are advised to be emptied at most: nobody moves more pods than that at once."""
SETTLED_S = 600.0
"""A pod that was placed less than this ago may still be loading: nobody tells it to ask for less."""
MOST_MOVES = 4  # of pods on one card: who must move more gains little
SIZE_RISK = "Sizes are the measured peak plus 10 %: a pod that needs more some day will be refused memory."
MOVE_RISK = (
    "Moving a pod means deleting it and letting it be recreated: its work since the last checkpoint is lost, "
    "and its scheduler may choose another card. Pod affinity, spread and volumes are not looked at here."
)


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a pod's one container held on one of its cards, and whether memory was refused to it."""

    peak_mib: float
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Resize:
    """A pod that asks for too much or, where `more`, for too little. Amounts are of all its `cards` together,
    the peak is of one. `suggested_units` is 0 for one that never touched its card.
    """

    pod: Pod
    units: int
    mib: int
    suggested_units: int
    suggested_mib: int
    peak_mib: float
    more: bool
    cards: int = 1


@dataclass(frozen=True, slots=True)
class Move:
    """A pod to another card."""

    pod: Pod
    units: int
    mib: int
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
    """`given_back`: MiB by namespace that smaller sizes would leave to others. `measured` pods in all, and
    `young` ones that may need less and were not measured for long enough to say so."""

    resizes: tuple[Resize, ...]
    given_back: Mapping[str, int]
    cards: tuple[EmptyCard, ...]
    measured: int = 0
    young: int = 0


def card_of(ledger: Ledger, pod: Pod) -> Card | None:
    """The card that a pod is on, of several the smallest; None if it has none, or its size is not known."""
    held = {part.card for part in pod.placement.slices} if pod.placement is not None else set()
    state = ledger.state(pod.node) if held else None
    cards = [card for card in (state.node.cards if state is not None else ()) if card.index in held]
    if len(cards) < len(held) or not all(card.memory_mib for card in cards):
        return None
    return min(cards, key=lambda card: card.memory_mib / max(card.units, 1), default=None)


def advise(
    ledger: Ledger,
    peaks: Mapping[str, Peak],
    claims: Ledger | None = None,
    *,
    now_s: float = math.inf,
    may_run: MayRun = lambda *_: True,
) -> Advice:
    """`peaks` by uid of the pod. Who asks for too little comes first, then who could give back most.

    `may_run`: whether a pod's own constraints let it run on a node. `now_s`: since the epoch, for the age of
    what was measured. `claims`: what each pod holds on nodes with claims. No card of these is
    emptied: kube-scheduler, which places their pods, ignores cards in use.
    """
    resizes, young = [], 0
    for uid, peak in peaks.items():
        of = claims if claims is not None and uid in claims.pods else ledger
        pod = of.pods.get(uid)
        card = card_of(of, pod) if pod is not None else None
        if pod is None or card is None or pod.placement is None:
            continue
        units, cards = pod.placement.slices[0].units, len(pod.placement.slices)
        better = suggested_size(
            units=units,
            card_units=card.units,
            card_mib=card.memory_mib,
            peak_mib=peak.peak_mib,
            refused=peak.refused,
        )
        if peak.peak_mib == 0 and not peak.refused and 0 < units <= card.units:
            better = Suggestion(0, 0, more=False)
        if better is None:
            continue
        if not better.more and now_s - pod.assume_time_ns / 1e9 < SETTLED_S:
            young += 1
        else:
            now_mib = limit_mib(card.memory_mib, units, card.units)
            now, then = (cards * units, cards * now_mib), (cards * better.units, cards * better.limit_mib)
            resizes.append(Resize(pod, *now, *then, peak.peak_mib, better.more, cards))
    resizes.sort(key=lambda each: (not each.more, each.suggested_units - each.units, each.pod.key))
    given_back: dict[str, int] = defaultdict(int)
    for each in resizes:
        if not each.more:
            given_back[each.pod.namespace] += each.mib - each.suggested_mib
    ordered = dict(sorted(given_back.items(), key=lambda pair: (-pair[1], pair[0])))
    return Advice(tuple(resizes), ordered, tuple(emptied_cards(ledger, may_run)), len(peaks), young)


def emptied_cards(ledger: Ledger, may_run: MayRun = lambda *_: True) -> Iterable[EmptyCard]:
    """Cards with the least on them, whose pods fit on others that are in use: best fit, one after the other.

    A card that took a pod is not emptied, and an emptied one takes none. Pods on several cards stay.
    """
    room = _Room(ledger, may_run)
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

    def __init__(self, ledger: Ledger, may_run: MayRun) -> None:
        self._ledger = ledger
        self._may_run = may_run
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
            target = self._tightest(hold.pod, part.units, part.compute_percent)
            if target is None:
                for other, left in before.items():  # all of it as it was
                    if self._left.get(other) != left:
                        self._put(other, *left)
                return None
            units, compute = self._left[target]
            self._put(target, units - part.units, compute - part.compute_percent)
            found.append(Move(hold.pod, part.units, self._mib(target, part.units), *target))
        self.taken.update((move.node, move.card) for move in found)
        return tuple(found)

    def _mib(self, place: Place, units: int) -> int:
        state = self._ledger.state(place[0])
        card = next((card for card in (state.node.cards if state else ()) if card.index == place[1]), None)
        return (
            worth_mib(card.memory_mib, units, card.units) if card is not None and units <= card.units else 0
        )

    def _suits(self, pod: Pod, node: str) -> bool:
        """Whether it may run there, by the names it asks with, and its limits are held as strictly as now."""
        state, now, request = self._ledger.state(node), self._ledger.state(pod.node), pod.request
        if state is None or now is None or request is None or state.node.names != request.names:
            return False
        return state.node.tier >= max(request.min_tier, now.node.tier) and self._may_run(pod, node)

    def _tightest(self, pod: Pod, units: int, compute_percent: int) -> Place | None:
        for left in sorted(each for each, places in self._by_left.items() if each >= units and places):
            for each in sorted(self._by_left[left]):
                if self._left[each][1] >= compute_percent and self._suits(pod, each[0]):
                    return each
        return None

    def _put(self, place: Place, units: int, compute_percent: int) -> None:
        self._drop(place)
        self._left[place] = (units, compute_percent)
        self._by_left[units].add(place)

    def _drop(self, place: Place) -> None:
        known = self._left.pop(place, None)
        if known is not None:
            self._by_left[known[0]].discard(place)
