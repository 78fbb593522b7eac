"""The policy `opportunity-cost`: a pod goes where the GPU that can still be sold drops least.

See `worth` for what a node is worth and `mix` for how the pods to expect are learned. Pods of several cards
need whole nodes kept before the first of them is refused; how much that is worth, the slot price, is
learned from refusals and from how many pods come and go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gpuslice.core.policy.fleet import Flags, Fleet, Floats, Ints, Rows, Shape
from gpuslice.core.policy.mix import LearnedMix
from gpuslice.core.policy.prices import CuttingStock
from gpuslice.core.policy.ranking import NO_SLOT, Policy, card_fits, keys_small_first
from gpuslice.core.policy.worth import Demand, Market, States, Worth, demand_of, layout_of, market_of

STEP = 0.02  # cards; costs closer than this are equal
TIE_FREE_NODE = 0.0001  # a card of free GPU on the node after the pod
TIE_FREE_CARD = 0.001  # a card's part left on the pod's own card
ROUNDING = 1e-9
FIRST_SLOT_PRICE = 0.02
SLOT_PRICE_RISE = 1.5
MOST_SLOT_PRICE = 5.0  # × the slots' demand
FREE_SLOTS_ELSEWHERE = 4  # times the refused pod's cards must be free in all for the price to rise
TURNOVER_HALF_LIFE_ARRIVALS = 2_000
LARGEST = np.iinfo(np.int64).max


class SlotPrice:
    """W: what a kept slot for a pod of several cards is worth, in all such shapes together."""

    def __init__(self) -> None:
        self.price = FIRST_SLOT_PRICE
        self._arrivals = 0
        self._placed = 0.0
        self._departed = 0.0

    def arrived(self) -> None:
        self._arrivals += 1
        if self._arrivals % TURNOVER_HALF_LIFE_ARRIVALS == 0:
            self._placed /= 2
            self._departed /= 2

    def placed(self) -> None:
        self._placed += 1

    def departed(self) -> None:
        self._departed += 1

    def renew(self, slot_demand: float) -> None:
        """Raise the price as pods come and go: then whole nodes must be kept before the first refusal."""
        turnover = min(1.0, self._departed / self._placed) if self._placed else 0.0
        self.price = max(self.price, MOST_SLOT_PRICE * slot_demand * turnover)

    def refused(self, slot_demand: float) -> bool:
        """A pod was refused although the cards it wants are free, but apart; says whether the price rose."""
        if self.price >= MOST_SLOT_PRICE * slot_demand:
            return False
        self.price *= SLOT_PRICE_RISE
        return True

    def factor(self, slot_demand: float) -> float:
        """By which the slots' demand is multiplied."""
        return min(MOST_SLOT_PRICE, self.price / slot_demand) if slot_demand else 0.0


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Some nodes as the cost sees them: their state, and [line, slot] what their cards have."""

    states: States
    total: Floats  # free GPU, in cards
    left: Ints
    worth: Floats  # of each card's free part
    free: Flags  # wholly free cards


@dataclass(frozen=True, slots=True)
class _Ways:
    """Ways to place a pod: on which line, on which slot (one-card pods), and the node's state afterwards."""

    line: Rows
    slot: Ints
    states: States
    tie: Floats


class OpportunityCost(Policy):
    """Least loss of saleable GPU; among equals nodes with fewer cards, so that large ones stay whole."""

    name: ClassVar[str] = "opportunity-cost"

    def __init__(self, fleet: Fleet, counts: Mapping[Shape, float] | None = None) -> None:
        """`counts`: how many pods of each shape there are, when that is known; otherwise it is learned."""
        super().__init__(fleet)
        self.slot_price = SlotPrice()
        self._known = counts
        self._mix = LearnedMix()
        self._stock: dict[int, CuttingStock] = {}
        self._demand: Demand | None = None
        self._market: Market | None = None
        self._worth: Worth | None = None

    def arrived(self, shape: Shape) -> None:
        self._mix.arrived(shape)
        self.slot_price.arrived()

    def placed(self, shape: Shape) -> None:
        self.slot_price.placed()

    def departed(self, shape: Shape) -> None:
        self.slot_price.departed()

    def refused(self, shape: Shape) -> None:
        if shape.cards < 2 or self._market is None or not self._scattered(shape):
            return
        if self.slot_price.refused(self._market.slot_demand):
            self._price(self._market)

    def prepare(self) -> None:
        if self._market is not None and self._market.layout.version != self.fleet.cards_version:
            self._market = None
        if self._market is None or self._mix.due:
            self.renew()

    def renew(self) -> None:
        """Take up the mix as it is now; all ranks are void afterwards."""
        learned = self._mix.renew(self.fleet)
        self._demand = demand_of(learned if self._known is None else self._known)
        layout = self._market.layout if self._market is not None else layout_of(self.fleet)
        self._market = market_of(layout, self._demand, self._stock)
        self.slot_price.renew(self._market.slot_demand)
        self._price(self._market)

    def rank(self, shape: Shape, rows: Rows) -> tuple[Ints, Ints]:
        cost, slot = self.cost(shape, rows)
        step = np.floor((cost + ROUNDING) / STEP).astype(np.int64)
        return keys_small_first(step, rows, self.fleet.cards[rows]), slot

    def cost(self, shape: Shape, rows: Rows) -> tuple[Floats, Ints]:
        """Loss of worth in cards on each of `rows`, on all of which the shape fits, and the card for it."""
        nodes = self._look(rows)
        ways = self._ways(shape, nodes)
        worth = self._current.of(nodes.states.followed_by(ways.states))
        before, after = worth[: len(rows)], worth[len(rows) :]
        return _cheapest(len(rows), ways, before[ways.line] - after + ways.tie)

    @property
    def _current(self) -> Worth:
        if self._worth is None:
            self.prepare()
        assert self._worth is not None  # prepare made it
        return self._worth

    def _price(self, market: Market) -> None:
        self._worth = market.worth(self.slot_price.factor(market.slot_demand))
        self.version += 1

    def _scattered(self, shape: Shape) -> bool:
        """Whether plenty of the cards it wants are wholly free, so that only slots are missing."""
        fleet = self.fleet
        free = ((fleet.left == fleet.size) & (fleet.size >= max(shape.units, 1))).sum(axis=1)
        allowed = fleet.allowed(shape.models)
        if allowed is not None:
            free = free * allowed[fleet.model]
        return int(free.sum()) >= FREE_SLOTS_ELSEWHERE * shape.cards

    def _look(self, rows: Rows) -> _Nodes:
        fleet, worth, layout = self.fleet, self._current, self._current.layout
        left = fleet.left[rows].astype(np.int64)
        values = worth.values[layout.place(rows, left)]
        free = left == layout.size[rows]
        states = States(
            rows=rows,
            value=values.sum(axis=1),
            whole=(free * layout.weight[rows]).sum(axis=1),
            whole_cards=free.sum(axis=1).astype(np.float64),
            cpu_milli=fleet.cpu_left[rows],
            memory_mib=fleet.memory_left[rows],
        )
        return _Nodes(states, left.sum(axis=1) / layout.mean_units, left, values, free)

    def _ways(self, shape: Shape, nodes: _Nodes) -> _Ways:
        if shape.cards == 0:
            return self._without_cards(shape, nodes)
        fits = card_fits(self.fleet, shape, nodes.states.rows)
        if shape.cards == 1:
            return self._on_one_card(shape, nodes, fits)
        return self._on_several_cards(shape, nodes, fits)

    def _without_cards(self, shape: Shape, nodes: _Nodes) -> _Ways:
        lines = np.arange(len(nodes.total))
        slots = np.zeros((len(lines), 0), dtype=np.int64)
        return self._taking(shape, nodes, lines, slots)

    def _on_one_card(self, shape: Shape, nodes: _Nodes, fits: Flags) -> _Ways:
        """The used card whose free part loses least, and the first wholly free card."""
        used, unused = fits & ~nodes.free, fits & nodes.free
        lines = np.flatnonzero(used.any(axis=1))
        free_lines = np.flatnonzero(unused.any(axis=1))
        slots = self._least_loss(shape, nodes, used, lines)
        slots = np.concatenate([slots, unused[free_lines].argmax(axis=1)])
        return self._taking(shape, nodes, np.concatenate([lines, free_lines]), slots[:, None])

    def _least_loss(self, shape: Shape, nodes: _Nodes, used: Flags, lines: Rows) -> Ints:
        """Among the used cards that fit: least loss of value, then least left, then the lowest index."""
        if not len(lines):
            return np.zeros(0, dtype=np.int64)
        left, rows = nodes.left[lines], nodes.states.rows[lines]
        after = np.maximum(left - shape.units, 0)
        place = self._current.layout.place(rows, after)
        loss = np.round(nodes.worth[lines] - self._current.values[place], 9)
        loss = np.where(used[lines], loss, np.inf)
        ties = loss == loss.min(axis=1, keepdims=True)
        fullest: Ints = np.where(ties, left, LARGEST).argmin(axis=1)
        return fullest

    def _on_several_cards(self, shape: Shape, nodes: _Nodes, fits: Flags) -> _Ways:
        """The fullest cards that fit, the lowest numbers first: see `several_cards`."""
        order = np.argsort(np.where(fits, nodes.left, LARGEST), axis=1, kind="stable")[:, : shape.cards]
        return self._taking(shape, nodes, np.arange(len(order)), order)

    def _taking(self, shape: Shape, nodes: _Nodes, lines: Rows, slots: Ints) -> _Ways:
        """Take what the shape asks from `slots` [way, card] of `lines`."""
        layout, before = self._current.layout, nodes.states
        rows, column = before.rows[lines], lines[:, None]
        at = (rows[:, None], slots)
        after = nodes.left[column, slots] - shape.units
        lost = nodes.worth[column, slots] - self._current.values[layout.place(at, after)]
        free = nodes.free[column, slots]
        states = States(
            rows=rows,
            value=before.value[lines] - lost.sum(axis=1),
            whole=before.whole[lines] - (free * layout.weight[at]).sum(axis=1),
            whole_cards=before.whole_cards[lines] - free.sum(axis=1),
            cpu_milli=before.cpu_milli[lines] - shape.cpu_milli,
            memory_mib=before.memory_mib[lines] - shape.memory_mib,
        )
        tie = TIE_FREE_NODE * (nodes.total[lines] - shape.total_units / layout.mean_units)
        if shape.cards == 1:
            tie += TIE_FREE_CARD / layout.mean_units * after[:, 0]
        slot = slots[:, 0] if shape.cards == 1 else np.full(len(lines), NO_SLOT)
        return _Ways(lines, slot, states, tie)


def _cheapest(count: int, ways: _Ways, cost: Floats) -> tuple[Floats, Ints]:
    """Of the ways on each line the cheapest, the earlier one among equals."""
    best, slot = np.full(count, np.inf), np.full(count, -1)
    order = np.lexsort((-np.arange(len(cost)), -cost))  # the cheapest last, so that it is what stays
    best[ways.line[order]] = cost[order]
    slot[ways.line[order]] = ways.slot[order]
    return best, slot
