"""What a node is worth: the GPU that can still be sold on it, given the workload of pods to expect.

    U(node) = Σ_j w_j · room_j

over the shapes j of the workload, all amounts in cards (of mean size). `room_j` is what shape j finds: at
most what its free cards are worth (V, where a part of a card counts by its price), at most what CPU and
memory still serve, and in whole slots where it asks for several cards. `w_j` is its part of the demand, more
where few cards may serve it. Where CPU or memory runs out before the cards do, `host_value` says what a node
is worth instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gpuslice.core.policy.cutting_stock import CuttingStock, value_of_space
from gpuslice.core.policy.fleet import Fleet, Floats, Ints, Rows, Shape
from gpuslice.core.policy.host_value import HostValue

COVERED_DEMAND = 0.98  # of the GPU demand, by the shapes that are looked at
PACKED_PART, NEXT_PART = 0.7, 0.3  # of a free part's value: if packed well; for the very next pod
NEWS_PART = 0.2  # of what a new workload says about packing; the rest stays, as do the pods packed so far
NEAR_SLOT = 0.6  # what a slot still to be freed is worth, for each card that keeps it from being one
WHOLE_VALUE, WHOLE_FREE = 0.95, 0.05  # room for one whole card: by value and by wholly free cards
FINEST_PARTS = 200  # cards of more units are looked at in hundredths
COARSE_PARTS = 100
MOST_SIZES = 12  # of cards that are priced apart; further ones are taken for the nearest
ROUNDING = 1e-9
BLOCK_ROWS = 128  # looked at in one go, so that what is between stays in the processor's cache


@dataclass(frozen=True, slots=True)
class CardClass:
    """Cards of one size: `parts` they are looked at in, where their values start in the table."""

    size: int
    parts: int
    start: int

    def pieces(self, units: int) -> int:
        """Parts that a request takes, rounded up."""
        return -(-units * self.parts // self.size)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which cards there are, as arrays over [row, slot] and rows; changes only with `Fleet.cards_version`.

    A card's value is found at `start + left · parts // size`. `weight` is its size in mean cards, 0 where
    there is none. `kind` numbers the pairs (class, model); `kinds` says which they are and how many mean
    cards each has.
    """

    classes: tuple[CardClass, ...]
    start: Ints
    parts: Ints
    size: Ints
    weight: Floats
    kind: Ints
    kinds: tuple[tuple[CardClass, str, float], ...]
    cards: Ints
    mean_units: float
    version: int
    by_unit: bool  # each card is looked at in as many parts as it has units

    def cards_of(self, rows: Rows) -> Ints:
        """[line, slot] Where the cards of `rows` stand in arrays over [row, slot] made one line."""
        width = self.size.shape[1]
        cards: Ints = rows[:, None] * width + np.arange(width)
        return cards

    def place(self, at: Ints, left: Ints) -> Ints:
        """Where in the table the value of `left` units is, on the cards that stand `at` (see `cards_of`)."""
        parts = left if self.by_unit else left * self.parts.take(at) // self.size.take(at)
        return self.start.take(at) + parts


def layout_of(fleet: Fleet) -> Layout:
    """Sort the cards of a fleet into classes and its nodes into kinds."""
    present = fleet.size > 0
    sizes, numbers = np.unique(fleet.size[present], return_counts=True)
    mean = float((sizes * numbers).sum() / numbers.sum()) if len(sizes) else 1.0
    common = np.sort(sizes[np.argsort(-numbers, kind="stable")[:MOST_SIZES]]).tolist() or [1]
    found, start = [], 0
    for size in common:
        fineness = size if size <= FINEST_PARTS else COARSE_PARTS
        found.append(CardClass(size, fineness, start))
        start += fineness + 1
    classes = tuple(found)
    known = np.array([card.size for card in classes])
    nearest = np.searchsorted((known[1:] + known[:-1]) / 2, fleet.size, side="left").astype(np.int64)
    kinds, kind = _kinds(fleet, classes, nearest, mean)
    parts = np.array([card.parts for card in classes])[nearest]
    return Layout(
        classes=classes,
        start=np.array([card.start for card in classes])[nearest],
        parts=parts,
        size=np.maximum(fleet.size, 1).astype(np.int64),
        weight=np.where(present, fleet.size / mean, 0.0),
        kind=kind,
        kinds=kinds,
        cards=fleet.cards.copy(),
        mean_units=mean,
        version=fleet.cards_version,
        by_unit=bool((parts == fleet.size)[present].all()),
    )


def _kinds(
    fleet: Fleet, classes: tuple[CardClass, ...], nearest: Ints, mean: float
) -> tuple[tuple[tuple[CardClass, str, float], ...], Ints]:
    largest = nearest.max(axis=1, initial=0)
    pairs = largest * (len(fleet.models) + 1) + fleet.model
    names, kind = np.unique(pairs, return_inverse=True)
    kinds = []
    for number, pair in enumerate(names.tolist()):
        card_class, model = divmod(pair, len(fleet.models) + 1)
        cards = float(fleet.size[kind == number].sum()) / mean
        kinds.append((classes[card_class], fleet.models[model] if fleet.models else "", cards))
    return tuple(kinds), kind.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Columns:
    """Shapes side by side. `weight`: [kind, shape]. A node with `cpu` CPU serves `cpu · cards_per_cpu` cards.

    For shares and single cards room is `by_value · V + by_free · F` at most, [kind, shape], where V counts
    the parts of cards in the shape's `band`. For several cards it comes in slots of `cards` free cards that
    count `gpu` each.
    """

    weight: Floats
    cards_per_cpu: Floats
    cards_per_memory: Floats
    by_value: Floats
    by_free: Floats
    cards: Floats
    gpu: Floats
    band: Ints

    def __len__(self) -> int:
        return len(self.gpu)


VALUES = 4


@dataclass(frozen=True, slots=True)
class States:
    """Nodes in some state, one line each.

    `amounts`: [quantity, line] wholly free cards by weight and by number, free CPU, free memory, and from
    `VALUES` on V of each band.
    """

    rows: Rows
    amounts: Floats

    def part(self, lines: slice | Rows) -> States:
        """Some of these."""
        return States(self.rows[lines], self.amounts[:, lines])

    def followed_by(self, others: States) -> States:
        """These and then those, to be looked at in one go."""
        return States(
            np.concatenate([self.rows, others.rows]), np.concatenate([self.amounts, others.amounts], axis=1)
        )


class NodeValue:
    """Values of free parts of cards and of nodes under one workload; never changes."""

    def __init__(self, model: DemandModel, slots: Columns) -> None:
        self.layout = model.layout
        self.values = model.values
        self._parts = parts = model.parts
        self._slots = slots
        self._turnover = model.turnover
        self._host_value = model.host
        self._one_kind = bool((parts.by_value == parts.by_value[:1]).all())
        self._per_cpu = np.concatenate([parts.cards_per_cpu, slots.cards_per_cpu])
        self._per_memory = np.concatenate([parts.cards_per_memory, slots.cards_per_memory])
        self._weight = np.concatenate([parts.weight, slots.weight], axis=1)

    def of(self, states: States) -> Floats:
        """U of nodes in a given state, in cards."""
        if self._host_value is not None:
            _, _, cpu_milli, memory_mib, value = states.amounts[: VALUES + 1]
            return self._host_value.of(value, cpu_milli, memory_mib)
        if len(states.rows) <= BLOCK_ROWS:
            return self._of_block(states)
        starts = range(0, len(states.rows), BLOCK_ROWS)
        return np.concatenate([self._of_block(states.part(slice(at, at + BLOCK_ROWS))) for at in starts])

    def _of_block(self, states: States) -> Floats:
        """Room for each shape, the shares and single cards first and then those of several, by its weight."""
        whole, whole_cards, cpu_milli, memory_mib = states.amounts[:VALUES]
        value = states.amounts[VALUES:]
        kind, parts = self.layout.kind.take(states.rows), len(self._parts)
        room: Floats = cpu_milli[:, None] * self._per_cpu  # cards that free CPU and memory serve
        np.minimum(room, memory_mib[:, None] * self._per_memory, out=room)
        np.maximum(room, 0.0, out=room)  # what others use of a node may be more than we know of
        pick = slice(0, 1) if self._one_kind else kind
        of_band = value[0][:, None] if len(value) == 1 else value.take(self._parts.band, axis=0).T
        on_cards: Floats = of_band * self._parts.by_value[pick]
        on_cards += whole[:, None] * self._parts.by_free[pick]
        np.minimum(room[:, :parts], on_cards, out=room[:, :parts])
        # whole slots for each shape of several cards, with the chances of such as come free next
        rows = states.rows
        hosted = room[:, parts:]
        columns = self._slots
        slots: Floats = np.minimum(whole_cards[:, None] / columns.cards, hosted / columns.gpu)
        np.floor(slots + ROUNDING, out=slots)
        if self._turnover:
            free = whole_cards[:, None]  # a slot not yet free counts less for each card it still lacks
            asked = (np.floor(free / columns.cards) + 1.0) * columns.cards
            possible = asked <= self.layout.cards[rows][:, None]
            slots += self._turnover * (NEAR_SLOT ** (asked - free) * possible)
        room[:, parts:] = slots * columns.gpu
        worth: Floats = np.einsum("ij,ij->i", room, self._weight.take(kind, axis=0))
        return worth


@dataclass(frozen=True, slots=True)
class Demand:
    """The mix as demand: shapes that cover most of it, largest first, with their part q of all GPU.

    `seen`: part of the pods that are not the prior's.
    """

    counts: Mapping[Shape, float]
    kept: tuple[tuple[Shape, float], ...]
    seen: float = 1.0


def demand_of(counts: Mapping[Shape, float], seen: float = 1.0) -> Demand:
    """Leave out pods without GPU, keep the shapes of largest demand until 98 % are covered."""
    wanted = {shape: count for shape, count in counts.items() if shape.cards and count > 0}
    total = sum(count * shape.total_units for shape, count in wanted.items())
    parts = sorted(
        ((shape, count * shape.total_units / total) for shape, count in wanted.items()),
        key=lambda pair: (-pair[1], pair[0].units, pair[0].cards, pair[0].cpu_milli, pair[0].memory_mib),
    )
    covered, kept = 0.0, []
    for shape, part in parts:
        if covered >= COVERED_DEMAND:
            break
        kept.append((shape, part))
        covered += part
    return Demand(wanted, tuple(kept), seen)


class PackedValue:
    """What free parts of one class of cards are worth when packed well, under a workload that keeps changing.

    Prices jump from one corner of a linear program to another when the workload changes a little; pods packed
    by the old prices stay. So new prices are taken up bit by bit, at first as far as pods were seen. Before
    that every part is worth what it is of a card: of the prior's optimal prices those that favour no size.
    """

    def __init__(self, parts: int) -> None:
        self._cutter = CuttingStock(parts)
        self._worth: Floats | None = None

    def renew(self, pieces: Floats, seen: float) -> Floats:
        """NodeValue of 0 … parts, as part of a card; `pieces[size]` are asked for, a part of them `seen`."""
        prices = self._cutter.prices({int(size): float(pieces[size]) for size in np.flatnonzero(pieces)})
        worth = np.minimum(1.0, value_of_space(self._cutter.length, prices))
        before, news = self._worth, NEWS_PART
        if before is None:
            before, news = np.arange(len(pieces)) / (len(pieces) - 1), seen
        self._worth = news * worth + (1.0 - news) * before
        return self._worth


PackedValues = dict[int, PackedValue]


def card_values(layout: Layout, demand: Demand, stock: PackedValues) -> Floats:
    """The table of what free parts of cards are worth, in mean cards, one stretch for each class."""
    tables = []
    for card in layout.classes:
        packed = stock.setdefault(card.size, PackedValue(card.parts))
        # v(x), x = 0 … parts: 0.7 × its worth when packed well + 0.3 × what the next pod alone can use of
        # it
        share = {shape: count for shape, count in demand.counts.items() if 0 < shape.units < card.size}
        pieces = np.zeros(card.parts + 1)
        for shape, count in share.items():
            pieces[card.pieces(shape.units)] += count * shape.cards
        values = np.zeros(card.parts + 1)
        if share:
            served = np.cumsum(pieces) / pieces.sum()
            values = (
                PACKED_PART * packed.renew(pieces, demand.seen)
                + NEXT_PART * np.arange(card.parts + 1) / card.parts * served
            )
        values[0], values[-1] = 0.0, 1.0
        tables.append(values * (card.size / layout.mean_units))
    return np.concatenate(tables)


def banded(layout: Layout, values: Floats) -> Floats:
    """[band, place in the table] The same for requests larger than the largest 0, 1 … of the classes.

    Such a request has no use for a part that a smaller card could be: else it makes what is left beside it on
    its cards as dear as whole ones, and pods that would fill that break smaller cards instead.
    """
    sizes = [card.size for card in layout.classes]
    units = np.concatenate([np.arange(card.parts + 1) * (card.size / card.parts) for card in layout.classes])
    return np.array([values * (units > least) for least in (0, *sizes[:-1])])


@dataclass(frozen=True, slots=True)
class DemandModel:
    """The demand laid over the kinds of nodes there are: weights of all shapes, slots not yet priced.

    `turnover`: departures for each pod placed, 0 while a cluster fills up, 1 where as many go as come.
    `host`: what nodes are worth where CPU or memory runs out.
    """

    layout: Layout
    values: Floats
    parts: Columns
    slots: Columns
    slot_demand: float  # S: weight of all shapes of several cards, each at its best kind
    turnover: float
    host: HostValue | None = None

    def worth(self, slot_price: float) -> NodeValue:
        """Price the slots: W / S times their demand, at most `slot_price` in all."""
        return NodeValue(self, replace(self.slots, weight=self.slots.weight * slot_price))


def demand_model_of(layout: Layout, demand: Demand, stock: PackedValues, turnover: float) -> DemandModel:
    """Weigh the kept shapes for each kind of node.

    A shape that may use few cards weighs as much more there: where each model is asked for as often as there
    are cards of it, all nodes are worth the same, and pods that may use any do not fill up the rare ones.
    """
    shapes = [shape for shape, _ in demand.kept]
    weight = np.zeros((len(layout.kinds), len(shapes)))
    whole = np.zeros_like(weight, dtype=np.bool_)
    for column, (shape, part) in enumerate(demand.kept):
        usable = [
            shape.units <= card.size and (not shape.models or model in shape.models)
            for card, model, _ in layout.kinds
        ]
        cards = sum(kind[2] for kind, may in zip(layout.kinds, usable, strict=True) if may)
        everything = sum(kind[2] for kind in layout.kinds)
        if cards > 0:
            weight[:, column] = np.array(usable) * (part / (cards / everything))
        whole[:, column] = [shape.units >= card.size for card, _, _ in layout.kinds]
    several = np.array([shape.cards > 1 for shape in shapes], dtype=np.bool_)
    values = banded(layout, card_values(layout, demand, stock))
    parts = _columns(shapes, weight * ~(whole & several), whole, layout)
    slots = _columns(shapes, weight * (whole & several), whole, layout)
    slot_demand = float(slots.weight.max(axis=0, initial=0.0).sum())
    return DemandModel(layout, values, parts, slots, slot_demand, turnover)


def _columns(shapes: list[Shape], weight: Floats, whole: npt.NDArray[np.bool_], layout: Layout) -> Columns:
    used = np.flatnonzero(weight.any(axis=0))
    chosen = [shapes[column] for column in used]
    gpu = np.array([shape.total_units / layout.mean_units for shape in chosen])
    smaller = [card.size for card in layout.classes[:-1]]
    return Columns(
        weight=weight[:, used],
        cards_per_cpu=gpu / np.array([float(max(shape.cpu_milli, 1)) for shape in chosen]),
        cards_per_memory=gpu / np.array([float(max(shape.memory_mib, 1)) for shape in chosen]),
        by_value=np.where(whole[:, used], WHOLE_VALUE, 1.0),
        by_free=np.where(whole[:, used], WHOLE_FREE, 0.0),
        cards=np.array([float(shape.cards) for shape in chosen]),
        gpu=gpu,
        band=np.searchsorted(smaller, [shape.units for shape in chosen]),
    )
