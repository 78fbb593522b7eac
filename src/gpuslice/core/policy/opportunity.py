"""The policy `opportunity-cost`: a pod goes where it reduces the GPU that can still be sold the least.

See `node_value` for what a node is worth, and `learned_workload` for how the expected pods are learned. For
pods of several cards, whole nodes must be kept before the first of them is refused: see `slot_price`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from gpuslice.core.policy.fit import card_fits
from gpuslice.core.policy.fleet import Fleet, Floats, Ints, Rows, Shape
from gpuslice.core.policy.host_value import Scarce, host_value, scarce
from gpuslice.core.policy.layout import layout_of
from gpuslice.core.policy.learned_workload import LearnedWorkload
from gpuslice.core.policy.node_classes import NodeClasses
from gpuslice.core.policy.node_value import (
    VALUES,
    DemandModel,
    NodeValue,
    PackedValues,
    States,
    demand_model_of,
    demand_of,
)
from gpuslice.core.policy.packing import fullest_card
from gpuslice.core.policy.ranking import NO_SLOT, STEP_PARTS, Policy, RankCache, keys_small_first
from gpuslice.core.policy.slot_price import Turnover

STEP = 0.02  # cards; costs closer together than this count as equal, except among nodes of one size
TIE_FREE_NODE = 0.0001  # per card of free GPU on the node after the pod
TIE_FREE_CARD = 0.001  # per card left free on the pod's own card
ROUNDING = 1e-9
LOOK_PART = 0.01  # of the cards: after as many arrivals, check whether slots have become short
SAME_SLOT_PRICE = 0.1  # of it: a smaller change is not worth ranking all nodes again
MANY_ROWS = 256  # from here on it pays to look for nodes in the same state
LARGEST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Nodes as the cost function sees them: their state, and [line, slot] the state of their cards.

    `at`: the positions of the cards in flattened [row, slot] arrays.
    """

    states: States
    total: Floats  # free GPU, in cards
    at: Ints
    left: Ints
    worth: Floats  # [line of the table, line, slot] of each card's free part


class OpportunityCost(Policy):
    """Least loss of saleable GPU; among equals smaller nodes, so that large ones stay whole."""

    name: ClassVar[str] = "opportunity-cost"

    def __init__(
        self, fleet: Fleet, counts: Mapping[Shape, float] | None = None, *, renew_when_asked: bool = True
    ) -> None:
        """`counts`: the number of pods of each shape, if known; otherwise it is learned.

        A new mix invalidates all ranks. With `renew_when_asked` the next request pays for that; without it,
        the current ranks stay in force until `maintain` has computed the new ones piece by piece.
        """
        super().__init__(fleet)
        self.turnover = Turnover()
        self._renew_when_asked = renew_when_asked
        self._known = counts
        self._workload = LearnedWorkload()
        self._classes = NodeClasses(fleet)
        self._stock: PackedValues = {}
        self._demand_model: DemandModel | None = None
        self._scarce: Scarce | None = None  # what runs out before the cards, until that takes effect
        self._cache: RankCache | None = None
        self._renewal: Iterator[None] | None = None
        self._slot_prices = np.zeros(0)  # in force
        self._since_look, self._look_every = 0, 0.0  # arrivals: slots may run out before a workload changes
        self._slots_changed = False
        self._largest = -1, 0  # version of the cards, and the units of the largest

    def arrived(self, shape: Shape) -> None:
        if self.fleet.rows and shape.units > self._largest_card:
            return  # a typing error: it would be expected again, and room kept for it
        self._workload.arrived(shape)
        self.turnover.arrived()
        self._since_look += 1
        model = self._demand_model
        if self._since_look >= self._look_every and model is not None and not self._cards_changed(model):
            self._since_look = 0
            prices = model.slot_demand.prices(self.fleet, model.layout, self.turnover.part)
            self._slots_changed = not np.allclose(prices, self._slot_prices, rtol=SAME_SLOT_PRICE)

    def placed(self, shape: Shape) -> None:
        if shape.cards:
            self.turnover.placed()

    def departed(self, shape: Shape) -> None:
        if shape.cards:
            self.turnover.departed()

    def cache(self) -> RankCache:
        if self._cache is None or self._demand_model is None or self._cards_changed(self._demand_model):
            self._cache, self._renewal = self._renewed(), None
        elif self._renew_when_asked and self._due:
            self._cache = self._renewed()
        return self._cache

    def maintain(self) -> bool:
        if self._renewal is None:
            if self._cache is None or not self._due:
                return False
            self._renewal = self._renew_beside(self._cache.shapes())
        elif self._demand_model is None or self._cards_changed(self._demand_model):
            self._renewal = None  # it was begun for other cards and rows; the next request starts again
            return False
        if next(self._renewal, self) is self:
            self._renewal = None
        return True

    def _renew_beside(self, shapes: list[Shape]) -> Iterator[None]:
        """Apply a new workload: rank all shapes under it, then switch to the new ranks."""
        renewed = self._renewed()
        yield
        for shape in shapes:
            yield from renewed.prepare(shape)
        self._cache = renewed

    @property
    def _largest_card(self) -> int:
        if self._largest[0] != self.fleet.cards_version:
            self._largest = self.fleet.cards_version, int(self.fleet.size.max(initial=0))
        return self._largest[1]

    @property
    def _due(self) -> bool:
        return self._slots_changed or self._workload.due or self._is_scarce_now

    @property
    def _is_scarce_now(self) -> bool:
        """Checked with every pod: what is left may not last until the next workload."""
        return self._scarce is not None and self._scarce.is_felt(self.fleet)

    def _cards_changed(self, model: DemandModel) -> bool:
        return model.layout.version != self.fleet.cards_version

    def _renewed(self) -> RankCache:
        """An empty rank cache, under the current workload."""
        model = self._demand_model
        if model is None or self._workload.due or self._is_scarce_now or self._cards_changed(model):
            learned = self._workload.renew(self.fleet)
            known = self._known
            demand = demand_of(learned, self._workload.seen) if known is None else demand_of(known)
            same_cards = model is not None and not self._cards_changed(model)
            layout = model.layout if model and same_cards else layout_of(self.fleet)
            turnover = self.turnover.part
            model = demand_model_of(layout, demand, self._stock, turnover)
            counts = learned if known is None else known
            self._scarce = scarce(self.fleet, layout.mean_units, counts, turnover)
            if self._is_scarce_now and self._scarce is not None:
                host = host_value(self.fleet, layout.mean_units, counts, self._scarce)
                model, self._scarce = replace(model, host=host), None
            self._demand_model = model
            self._look_every = LOOK_PART * sum(kind.cards for kind in layout.kinds)
        self._slot_prices = model.slot_demand.prices(self.fleet, model.layout, self.turnover.part)
        self._slots_changed = False
        return RankCache(self.fleet, Pricing(self.fleet, NodeValue(model, self._slot_prices), self._classes))


class Pricing:
    """Costs of placements under one workload."""

    def __init__(self, fleet: Fleet, worth: NodeValue, classes: NodeClasses) -> None:
        self.fleet = fleet
        self.worth = worth
        self._classes = classes
        self._before = np.zeros(fleet.rows)  # U of each row, and the fleet's clock when it was computed
        self._before_at = np.full(fleet.rows, -1)

    def rank(self, shape: Shape, rows: Rows) -> tuple[Ints, Ints]:
        cost, slot = self.cost(shape, rows)
        parts = np.floor((cost + ROUNDING) * (STEP_PARTS / STEP)).astype(np.int64)
        return keys_small_first(parts, rows, self.worth.layout.node_size.take(rows)), slot

    def cost(self, shape: Shape, rows: Rows) -> tuple[Floats, Ints]:
        """Loss of worth in cards on each of `rows`, on all of which the shape fits, and the card to use
        there.
        """
        if len(rows) < MANY_ROWS:
            return self._cost(shape, rows)
        first, like = self._classes.distinct(rows)
        cost, slot = self._cost(shape, first)
        return cost[like], slot[like]

    def _cost(self, shape: Shape, rows: Rows) -> tuple[Floats, Ints]:
        nodes = self._look(rows)
        # the cards to take, [line] or [line, card]: the fullest that fit, the first among equals
        if shape.cards == 0:
            slots = np.zeros((len(nodes.total), 0), dtype=np.int64)
        else:
            fits = card_fits(self.fleet, shape, nodes.states.rows)
            if shape.cards == 1:
                slots = fullest_card(nodes.left, fits)
            else:
                left = np.where(fits, nodes.left, LARGEST)
                slots = np.argsort(left, axis=1, kind="stable")[:, : shape.cards]
        line = np.arange(len(rows)) * nodes.left.shape[1]
        cards = slots + (line if slots.ndim == 1 else line[:, None])
        after = self._after(shape, nodes, cards)
        stale = (self.fleet.stamp.take(rows) > self._before_at.take(rows)).nonzero()[0]
        worth = self.worth.of(nodes.states.part(stale).followed_by(after))
        self._before[rows[stale]] = worth[: len(stale)]
        self._before_at[rows[stale]] = self.fleet.clock
        # tie-breakers: prefer less left on the node, and on the pod's card
        mean_units = self.worth.layout.mean_units
        tie = TIE_FREE_NODE * (nodes.total - shape.total_units / mean_units)
        if shape.cards == 1:
            tie += TIE_FREE_CARD / mean_units * (nodes.left.take(cards) - shape.units)
        cost = self._before.take(rows) - worth[len(stale) :] + tie
        return cost, slots if shape.cards == 1 else np.full(len(rows), NO_SLOT)

    def _look(self, rows: Rows) -> _Nodes:
        fleet, layout = self.fleet, self.worth.layout
        at = layout.cards_of(rows)
        left = fleet.left.take(at).astype(np.int64)
        values = self.worth.values.take(layout.place(at, left), axis=1)
        amounts = np.empty((VALUES + len(values), len(rows)))
        amounts[0], amounts[1] = fleet.cpu_left.take(rows), fleet.memory_left.take(rows)
        values.sum(axis=2, out=amounts[VALUES:])
        return _Nodes(States(rows, amounts), left.sum(axis=1) / layout.mean_units, at, left, values)

    def _after(self, shape: Shape, nodes: _Nodes, cards: Ints) -> States:
        """The nodes after giving what the shape requests of `cards`: indices into the [line, slot] arrays."""
        layout, at = self.worth.layout, nodes.at.take(cards)
        place = layout.place(at, nodes.left.take(cards) - shape.units)
        amounts = nodes.states.amounts.copy()
        amounts[0] -= shape.cpu_milli
        amounts[1] -= shape.memory_mib
        for band, values in enumerate(self.worth.values):
            lost = nodes.worth[band].take(cards) - values.take(place)
            amounts[VALUES + band] -= lost if lost.ndim == 1 else lost.sum(axis=1)  # of several cards
        return States(nodes.states.rows, amounts)
