"""Whom to evict so that a pod fits on the cards of a node.

kube-scheduler picks victims until the node's *sum* of units suffices; evicting half of two cards makes no
room on either. Here victims are picked card by card, by kube-scheduler's own rules
(``SelectVictimsOnNode``, ``pickOneNodeForPreemption`` in pkg/scheduler/framework, 1.36): as many pods as
possible stay, those that a disruption budget protects and those of high priority first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuslice.core.book import Holding, NodeBook
from gpuslice.core.model import Request

Cost = tuple[int, int, int, int, int]
"""Budgets violated, highest priority of a victim, sum of the priorities, number of victims, and minus the
start of the one that has run longest among those of the highest priority: the less the better."""
NO_VICTIMS: Cost = (0, -(1 << 40), 0, 0, 0)
NO_LIMIT = 1 << 31  # of compute, for a pod that asks for none
LIFT = 1 << 31  # added to each priority, so that more victims never cost less

Taken = Mapping[int, tuple[int, int]]
"""Units and percent of compute that are kept for others, by card."""
NOTHING_TAKEN: Taken = {}


@dataclass(frozen=True, slots=True)
class Budget:
    """A PodDisruptionBudget: how many more pods may go, and of which (uids)."""

    allowed: int
    uids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Eviction:
    """Room for a request on `cards` of `node` once the `victims` are gone, the most important of them first.

    Without victims the room is there, or comes when pods that are leaving already have left.
    """

    node: str
    cards: tuple[int, ...]
    victims: tuple[Holding, ...]
    violations: int = 0

    @property
    def cost(self) -> Cost:
        return _cost(self.victims, self.violations)


def eviction(
    book: NodeBook,
    request: Request,
    priority: int,
    budgets: Sequence[Budget] = (),
    taken: Taken = NOTHING_TAKEN,
) -> Eviction | None:
    """The cheapest way to make room on one node for a pod of `priority`; None when no eviction does.

    Pods that are leaving count as gone: what they free need not be freed again. `taken` is what they, or
    others, leave to somebody else.
    """
    if _barred(book, request):
        return None
    cards = _cards(book, priority, _leaves, taken)
    return _cheapest(book.name, cards, _Rules(request, _importance, budgets))


@dataclass(frozen=True, slots=True)
class Victims:
    """Whom to evict (uids) so that a pod fits on these cards."""

    uids: frozenset[str]
    cards: tuple[int, ...]


def victims(
    book: NodeBook,
    request: Request,
    priority: int,
    proposed: Collection[str],
    *,
    taken: Taken = NOTHING_TAKEN,
    suffices: Callable[[Collection[str]], bool] = lambda _: True,
) -> Victims | None:
    """The pods to evict from a node so that `request` fits; None when no eviction helps.

    `proposed` is kube-scheduler's own choice. It stands if it helps on the cards too, and among equal choices
    its pods go first. Where it holds pods that have no share of a card, they are in the way of something else
    than GPU memory: then all of it is kept, and what the cards need comes on top. Pods of it that are leaving
    count as gone; others that are leaving do not, as kube-scheduler left them out.

    Where some of the node is `taken`, its choice makes room for those who took it as well, though whom that
    costs has been settled card by card: then no more are evicted than the cards need, and all who are leaving
    count as gone. Where the cards need nobody, its choice stands: those before the pod want for room.
    `suffices` tells whether what the pod wants beside cards is there without these (uids).
    """
    if _barred(book, request):
        return None
    going = set(proposed)
    settled = _cards(book, None, lambda holding: holding.pod.uid in going, taken)
    roomy = sorted((card for card in settled if card.room(request) is not None), key=lambda card: card.units)
    if not taken and len(roomy) >= request.gpu_count:
        return Victims(frozenset(going), tuple(card.index for card in roomy[: request.gpu_count]))
    kept = going if going - book.holdings.keys() else {uid for uid in going if _leaves(book.holdings[uid])}
    leaving = {uid for uid, holding in book.holdings.items() if _leaves(holding)} if taken else set()
    cards = _cards(book, priority, lambda holding: holding.pod.uid in kept | leaving, taken)

    def by_proposal(holding: Holding) -> tuple[object, ...]:
        return (-holding.pod.priority, holding.pod.uid in going, holding.pod.uid)

    found = _cheapest(book.name, cards, _Rules(request, by_proposal, proposed=going))
    if found is None:
        return None
    uids = kept | {holding.pod.uid for holding in found.victims}
    if not suffices(uids | leaving):
        uids |= going
    return Victims(frozenset(uids or leaving or going), found.cards)


# -- one node ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Card:
    """`units` and `core`: what is left once everybody who may go is gone; negative where too much stays."""

    index: int
    units: int
    core: int
    evictable: list[Holding] = field(default_factory=list)

    def room(self, request: Request) -> tuple[int, int] | None:
        """What is left beside the request, None when it does not fit."""
        units, core = self.units - request.units_per_gpu, self.core - request.core_percent
        if not request.core_percent:
            core = NO_LIMIT
        return (units, core) if units >= 0 and core >= 0 else None


def _barred(book: NodeBook, request: Request) -> bool:
    """Whether the node takes no pod of this kind, whoever leaves it."""
    return book.node is None or (book.node.core_required and not request.core_percent)


def _cards(
    book: NodeBook, priority: int | None, leaves: Callable[[Holding], bool], taken: Taken
) -> list[_Card]:
    """The usable cards. Who `leaves` is not there any more; who has less than `priority` may be evicted."""
    node = book.node
    if node is None:
        return []
    cards = {gpu.index: _Card(gpu.index, gpu.units, node.core_percent) for gpu in node.gpus}
    everywhere = 0
    for holding in book.holdings.values():
        if leaves(holding):
            continue
        everywhere += holding.unplaced_units
        if holding.placement is None:
            continue
        evictable = priority is not None and _may_go(holding, priority)
        for share in holding.placement.shares:
            card = cards.get(share.gpu)
            if card is None:
                continue
            if evictable:
                card.evictable.append(holding)
            else:
                card.units -= share.units
                card.core -= share.core_percent
    for card in cards.values():
        units, core = taken.get(card.index, (0, 0))
        card.units -= units + everywhere
        card.core -= core
    return [card for card in cards.values() if card.index not in node.unhealthy]


def _leaves(holding: Holding) -> bool:
    return holding.pod.terminating


def _may_go(holding: Holding, priority: int) -> bool:
    """A pod that is being bound at this moment is let alone: who asks again sees it bound."""
    return holding.pod.priority < priority and not holding.pod.terminating and not holding.assumed


@dataclass(frozen=True, slots=True)
class _Rules:
    """What decides among victims: who is kept first (`order`), which budgets count, who was `proposed`."""

    request: Request
    order: Callable[[Holding], tuple[object, ...]]
    budgets: Sequence[Budget] = ()
    proposed: Collection[str] = ()

    def rank(self, way: Eviction, card: _Card) -> tuple[object, ...]:
        """The less the better; on equal terms who was proposed goes first, and the fullest card is taken."""
        strangers = sum(holding.pod.uid not in self.proposed for holding in way.victims)
        return (way.cost, strangers, card.units, card.index)


def _cheapest(node: str, cards: Sequence[_Card], rules: _Rules) -> Eviction | None:
    ways = [(way, card) for card in cards if (way := _evicted(node, [card], rules))]
    wanted = rules.request.gpu_count
    if len(ways) < wanted:
        return None
    ways.sort(key=lambda each: rules.rank(*each))
    if wanted == 1:
        return ways[0][0]
    return _evicted(node, sorted((card for _, card in ways[:wanted]), key=lambda card: card.index), rules)


def _evicted(node: str, cards: Sequence[_Card], rules: _Rules) -> Eviction | None:
    """The fewest victims that make room on each of these cards; None when all of them would not."""
    room = {card.index: left for card in cards if (left := card.room(rules.request)) is not None}
    if len(room) < len(cards):
        return None
    important = sorted(_present(cards), key=rules.order)
    protected = _protected(important, rules.budgets)
    if protected:
        important.sort(key=lambda holding: holding.pod.uid not in protected)
    gone = [holding for holding in important if not _stays(holding, room)]
    if protected:
        gone.sort(key=rules.order)
    violations = sum(holding.pod.uid in protected for holding in gone)
    return Eviction(node, tuple(room), tuple(gone), violations)


def _present(cards: Sequence[_Card]) -> Iterable[Holding]:
    if len(cards) == 1:
        return cards[0].evictable
    return {holding.pod.uid: holding for card in cards for holding in card.evictable}.values()


def _stays(holding: Holding, room: dict[int, tuple[int, int]]) -> bool:
    """Let the pod keep its shares if that leaves room enough on all of the cards."""
    assert holding.placement is not None
    mine = holding.placement.shares
    if len(mine) > 1 or len(room) > 1:
        mine = tuple(share for share in mine if share.gpu in room)
    for share in mine:
        units, core = room[share.gpu]
        if share.units > units or share.core_percent > core:
            return False
    for share in mine:
        units, core = room[share.gpu]
        room[share.gpu] = (units - share.units, core - share.core_percent)
    return True


def _protected(important: Iterable[Holding], budgets: Sequence[Budget]) -> frozenset[str]:
    """Those whose eviction violates a budget if all of them go, as ``filterPodsWithPDBViolation`` counts."""
    if not budgets:
        return frozenset()
    allowed = [budget.allowed for budget in budgets]
    protected = []
    for holding in important:
        violated = False
        for number, budget in enumerate(budgets):
            if holding.pod.uid in budget.uids:
                allowed[number] -= 1
                violated |= allowed[number] < 0
        if violated:
            protected.append(holding.pod.uid)
    return frozenset(protected)


def _importance(holding: Holding) -> tuple[object, ...]:
    """Higher priorities first, then who has run longest; the cards were given when the pod started."""
    return (-holding.pod.priority, holding.pod.assume_time_ns, holding.pod.uid)


def _cost(evicted: Sequence[Holding], violations: int) -> Cost:
    if not evicted:
        return NO_VICTIMS
    highest = max(holding.pod.priority for holding in evicted)
    first = min(holding.pod.assume_time_ns for holding in evicted if holding.pod.priority == highest)
    lifted = sum(holding.pod.priority + LIFT for holding in evicted)
    return (violations, highest, lifted, len(evicted), -first)
