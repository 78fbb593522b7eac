"""Whom to evict so that a pod fits on the cards of a node.

kube-scheduler picks victims until the node's *sum* of units suffices, but evicting half of two cards makes no
room on either. Here victims are picked card by card, by kube-scheduler's own rules (``SelectVictimsOnNode``,
``pickOneNodeForPreemption`` in pkg/scheduler/framework, 1.36): as many pods as possible stay, those protected
by a disruption budget and those of high priority first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from gpuslice.core.hold import NOTHING_TAKEN, Hold, Taken
from gpuslice.core.holds import NodeHolds
from gpuslice.core.model import Pod, Request
from gpuslice.core.placement import barred

Cost = tuple[int, int, int, int, int]
"""Budgets violated, highest priority of a victim, sum of the priorities, number of victims, and minus the
start of the victim that has run longest among those of the highest priority: lower is better."""
NO_VICTIMS: Cost = (0, -(1 << 40), 0, 0, 0)
NO_LIMIT = 1 << 31  # of compute, for a pod that asks for none
LIFT = 1 << 31  # added to each priority, so that more victims never cost less
LOWEST, HIGHEST = -(1 << 31), 1 << 31
"""Beyond all priorities. With the lowest, `eviction` takes only pods that are leaving anyway."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A PodDisruptionBudget: how many more pods may be evicted, and of which (uids)."""

    allowed: int
    uids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Eviction:
    """Room for a request on `cards` of `node` once the `victims` are gone, the most important one first.

    Without victims the room exists already, or comes when pods that are leaving have left.
    """

    node: str
    cards: tuple[int, ...]
    victims: tuple[Hold, ...]
    violations: int = 0

    @property
    def cost(self) -> Cost:
        return cost([hold.pod for hold in self.victims], self.violations)


def cost(pods: Sequence[Pod], violations: int) -> Cost:
    """What evicting these pods costs."""
    if not pods:
        return NO_VICTIMS
    highest = max(pod.priority for pod in pods)
    first = min(pod.assume_time_ns for pod in pods if pod.priority == highest)
    return (violations, highest, sum(pod.priority + LIFT for pod in pods), len(pods), -first)


def eviction(
    holds: NodeHolds,
    request: Request,
    priority: int,
    budgets: Sequence[Budget] = (),
    taken: Taken = NOTHING_TAKEN,
) -> Eviction | None:
    """The cheapest way to make room on one node for a pod of `priority`; None if no eviction does.

    Pods that are leaving count as gone: what they free need not be freed again. `taken` is what is reserved
    for others.
    """
    if holds.node is None or barred(holds.node, request):
        return None
    cards = _cards(holds, priority, _leaves, taken)
    return _cheapest(holds.name, cards, _Rules(request, importance, budgets))


@dataclass(frozen=True, slots=True)
class Victims:
    """Whom to evict (uids) so that a pod fits on these cards, and how many of them a budget protects."""

    uids: frozenset[str]
    cards: tuple[int, ...]
    violations: int = 0


def victims(
    holds: NodeHolds,
    request: Request,
    priority: int,
    proposed: Collection[str],
    budgets: Sequence[Budget] = (),
    *,
    taken: Taken = NOTHING_TAKEN,
    suffices: Callable[[Collection[str]], bool] = lambda _: True,
) -> Victims | None:
    """The pods to evict from a node so that `request` fits; None if no eviction helps.

    `proposed` is kube-scheduler's own choice. It stands if it helps on the cards too, and of equal choices
    its pods are preferred, while those that `budgets` protect go last. If it includes pods without a part of
    a card, they are in the way of something else than GPU memory: then all of it is kept, and what the cards
    need is added. Pods in it that are leaving count as gone; others that are leaving do not, since
    kube-scheduler left them out.

    If some of the node is `taken`, kube-scheduler's choice makes room for the owners of that as well,
    although their victims have been chosen card by card already: then no more pods are evicted than the cards
    need, and all that are leaving count as gone. If the cards need no victims, its choice stands, since pods
    that come first need the room. `suffices` returns whether what the pod needs besides cards is available
    without these pods (uids).
    """
    if holds.node is None or barred(holds.node, request):
        return None
    going = set(proposed)
    settled = _cards(holds, None, lambda hold: hold.pod.uid in going, taken)
    roomy = sorted((card for card in settled if card.room(request) is not None), key=lambda card: card.units)
    if not taken and len(roomy) >= request.card_count:
        return Victims(frozenset(going), tuple(card.index for card in roomy[: request.card_count]))
    kept = going if going - holds.by_uid.keys() else {uid for uid in going if _leaves(holds.by_uid[uid])}
    leaving = {uid for uid, hold in holds.by_uid.items() if _leaves(hold)} if taken else set()
    cards = _cards(holds, priority, lambda hold: hold.pod.uid in kept | leaving, taken)

    def by_proposal(hold: Hold) -> tuple[object, ...]:
        return (-hold.pod.priority, hold.pod.uid in going, hold.pod.uid)

    left = [Budget(each.allowed - len(each.uids & kept), each.uids - kept) for each in budgets]
    found = _cheapest(holds.name, cards, _Rules(request, by_proposal, left, going))
    if found is None:
        return None
    uids = kept | {hold.pod.uid for hold in found.victims}
    if not suffices(uids | leaving):
        uids |= going
    uids = uids or leaving or going
    return Victims(frozenset(uids), found.cards, len(violating(sorted(uids), budgets)))


# -- one node ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Card:
    """`units` and `core`: what is left once all evictable pods are gone; negative if too much stays."""

    index: int
    units: int
    core: int
    evictable: list[Hold] = field(default_factory=list)

    def room(self, request: Request) -> tuple[int, int] | None:
        """What is left in addition to the request; None if it does not fit."""
        units, core = self.units - request.units_per_card, self.core - request.compute_percent
        if not request.compute_percent:
            core = NO_LIMIT
        return (units, core) if units >= 0 and core >= 0 else None


def _cards(
    holds: NodeHolds, priority: int | None, leaves: Callable[[Hold], bool], taken: Taken
) -> list[_Card]:
    """The usable cards. A pod that `leaves` is gone; one of less than `priority` may be evicted."""
    node = holds.node
    if node is None:
        return []
    cards = {gpu.index: _Card(gpu.index, gpu.units, node.compute_percent) for gpu in node.cards}
    everywhere = 0
    for hold in holds.by_uid.values():
        if leaves(hold):
            continue
        everywhere += hold.unplaced_units
        if hold.placement is None:
            continue
        evictable = (  # not a pod that is just being bound: the next question sees it bound
            priority is not None
            and hold.pod.priority < priority
            and not hold.pod.terminating
            and hold.is_bound
        )
        for part in hold.placement.slices:
            card = cards.get(part.card)
            if card is None:
                continue
            if evictable:
                card.evictable.append(hold)
            else:
                card.units -= part.units
                card.core -= part.compute_percent
    for card in cards.values():
        units, core = taken.get(card.index, (0, 0))
        card.units -= units + everywhere
        card.core -= core
    return [card for card in cards.values() if card.index not in node.unhealthy]


def _leaves(hold: Hold) -> bool:
    return hold.pod.terminating


@dataclass(frozen=True, slots=True)
class _Rules:
    """How victims are chosen: who is kept first (`order`), which budgets count, who was `proposed`."""

    request: Request
    order: Callable[[Hold], tuple[object, ...]]
    budgets: Sequence[Budget] = ()
    proposed: Collection[str] = ()

    def rank(self, way: Eviction, card: _Card) -> tuple[object, ...]:
        """Lower is better; among equals, proposed victims and the fullest card are preferred."""
        strangers = sum(hold.pod.uid not in self.proposed for hold in way.victims)
        return (way.cost, strangers, card.units, card.index)


def _cheapest(node: str, cards: Sequence[_Card], rules: _Rules) -> Eviction | None:
    ways = [(way, card) for card in cards if (way := _evicted(node, [card], rules))]
    wanted = rules.request.card_count
    if len(ways) < wanted:
        return None
    ways.sort(key=lambda each: rules.rank(*each))
    if wanted == 1:
        return ways[0][0]
    return _evicted(node, sorted((card for _, card in ways[:wanted]), key=lambda card: card.index), rules)


def _evicted(node: str, cards: Sequence[_Card], rules: _Rules) -> Eviction | None:
    """The fewest victims that make room on each of these cards; None if not even all of them do."""
    room = {card.index: left for card in cards if (left := card.room(rules.request)) is not None}
    if len(room) < len(cards):
        return None
    evictable = {each.pod.uid: each for card in cards for each in card.evictable}
    important = sorted(evictable.values(), key=rules.order)
    protected = violating((each.pod.uid for each in important), rules.budgets)
    if protected:
        important.sort(key=lambda hold: hold.pod.uid not in protected)
    gone = [hold for hold in important if not _stays(hold, room)]
    if protected:
        gone.sort(key=rules.order)
    violations = sum(hold.pod.uid in protected for hold in gone)
    return Eviction(node, tuple(room), tuple(gone), violations)


def _stays(hold: Hold, room: dict[int, tuple[int, int]]) -> bool:
    """Let the pod keep its parts if that leaves enough room on all of the cards."""
    assert hold.placement is not None
    mine = hold.placement.slices
    if len(mine) > 1 or len(room) > 1:
        mine = tuple(part for part in mine if part.card in room)
    for part in mine:
        units, core = room[part.card]
        if part.units > units or part.compute_percent > core:
            return False
    for part in mine:
        units, core = room[part.card]
        room[part.card] = (units - part.units, core - part.compute_percent)
    return True


def violating(uids: Iterable[str], budgets: Sequence[Budget]) -> frozenset[str]:
    """Pods whose eviction violates a budget if all of them go, as in ``filterPodsWithPDBViolation``."""
    allowed, found = [budget.allowed for budget in budgets], set[str]()
    for uid in uids:
        for number, budget in enumerate(budgets):
            if uid in budget.uids:
                allowed[number] -= 1
                if allowed[number] < 0:
                    found.add(uid)
    return frozenset(found)


def importance(hold: Hold) -> tuple[object, ...]:
    """Higher priorities first, then pods that have run longer; the cards were given when the pod started."""
    return (-hold.pod.priority, hold.pod.assume_time_ns, hold.pod.uid)
