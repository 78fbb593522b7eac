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

from gpuslice.core.policy.cutting_stock import CuttingStock, value_of_space
from gpuslice.core.policy.fleet import Floats, Ints, Rows, Shape
from gpuslice.core.policy.host_value import HostValue
from gpuslice.core.policy.layout import Layout
from gpuslice.core.policy.slot_price import SlotDemand

COVERED_DEMAND = 0.98  # of the GPU demand, by the shapes that are looked at
PACKED_PART, NEXT_PART = 0.7, 0.3  # of a free part's value: if packed well; for the very next pod
NEWS_PART = 0.2  # of what a new workload says about packing; the rest stays, as do the pods packed so far
LARGE_DEARER = 0.3  # more for a whole card, in proportion for a part of one: see `PackedValue`
NEAR_SLOT = 0.6  # what a slot still to be freed is worth, for each card that keeps it from being one
WHOLE_FREE = 0.05  # of the room for one whole card, by wholly free cards; the rest by value
WHOLE_FREE_TURNOVER = 0.5  # the same of that rest, where as many pods leave as come
ROUNDING = 1e-9
BLOCK_ROWS = 128  # looked at in one go, so that what is between stays in the processor's cache


@dataclass(frozen=True, slots=True)
class Columns:
    """Shapes side by side. `weight`: [kind, shape]. A node with `cpu` CPU serves `cpu · cards_per_cpu` cards.

    `value`, `pieces`, `wide` are lines of the table: what the free part of a card is worth to the shape, into
    how many pieces of what the shape asks of a card it can be cut, whether into any. For shares and single
    cards room is `by_value · value + by_free · pieces` at most, [kind, shape]. For several cards it comes in
    slots of `cards` pieces on as many cards, that count `gpu` together. `most`: [kind, shape] how many pieces
    an empty node has.
    """

    weight: Floats
    cards_per_cpu: Floats
    cards_per_memory: Floats
    by_value: Floats
    by_free: Floats
    cards: Floats
    gpu: Floats
    value: Ints
    pieces: Ints
    wide: Ints
    most: Floats

    def __len__(self) -> int:
        return len(self.gpu)


VALUES = 2


@dataclass(frozen=True, slots=True)
class States:
    """Nodes in some state, one line each.

    `amounts`: [quantity, line] free CPU, free memory, and from `VALUES` on what the free parts of the cards
    sum up to, by each line of the table.
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

    def __init__(self, model: DemandModel, slot_prices: Floats) -> None:
        self.layout = model.layout
        self.values = model.values
        self._parts = parts = model.parts
        self._slots = slots = replace(model.slots, weight=model.slots.weight * slot_prices)
        self._turnover = model.turnover
        self._host_value = model.host
        self._one_kind = bool((parts.by_value == parts.by_value[:1]).all())
        self._per_cpu = np.concatenate([parts.cards_per_cpu, slots.cards_per_cpu])
        self._per_memory = np.concatenate([parts.cards_per_memory, slots.cards_per_memory])
        self._weight = np.concatenate([parts.weight, slots.weight], axis=1)

    def of(self, states: States) -> Floats:
        """U of nodes in a given state, in cards."""
        if self._host_value is not None:
            cpu_milli, memory_mib, value = states.amounts[: VALUES + 1]
            return self._host_value.of(value, cpu_milli, memory_mib)
        if len(states.rows) <= BLOCK_ROWS:
            return self._of_block(states)
        starts = range(0, len(states.rows), BLOCK_ROWS)
        return np.concatenate([self._of_block(states.part(slice(at, at + BLOCK_ROWS))) for at in starts])

    def _of_block(self, states: States) -> Floats:
        """Room for each shape, the shares and single cards first and then those of several, by its weight."""
        cpu_milli, memory_mib = states.amounts[:VALUES]
        value = states.amounts[VALUES:]
        kind, parts = self.layout.kind.take(states.rows), len(self._parts)
        room: Floats = cpu_milli[:, None] * self._per_cpu  # cards that free CPU and memory serve
        np.minimum(room, memory_mib[:, None] * self._per_memory, out=room)
        np.maximum(room, 0.0, out=room)  # what others use of a node may be more than we know of
        pick = slice(0, 1) if self._one_kind else kind
        on_cards: Floats = _of_lines(value, self._parts.value) * self._parts.by_value[pick]
        on_cards += _of_lines(value, self._parts.pieces) * self._parts.by_free[pick]
        np.minimum(room[:, :parts], on_cards, out=room[:, :parts])
        if len(self._slots):
            room[:, parts:] = self._slot_room(value, room[:, parts:], kind)
        worth: Floats = np.einsum("ij,ij->i", room, self._weight.take(kind, axis=0))
        return worth

    def _slot_room(self, value: Floats, hosted: Floats, kind: Ints) -> Floats:
        """Whole slots for each shape of several cards, with the chances of such as come free next.

        A piece without the CPU or memory for it is none: who takes these of a node breaks a slot, too.
        """
        columns = self._slots
        pieces = np.minimum(_of_lines(value, columns.pieces), hosted * (columns.cards / columns.gpu))
        if (columns.wide != columns.pieces).any():
            wide = _of_lines(value, columns.wide)
            np.minimum(pieces, wide, out=pieces, where=wide < columns.cards)
        np.floor(pieces + ROUNDING, out=pieces)
        slots: Floats = np.floor(pieces / columns.cards + ROUNDING)
        if self._turnover:  # a slot not yet free counts less for each piece it still lacks
            asked = (slots + 1.0) * columns.cards
            possible = asked <= columns.most.take(kind, axis=0)
            slots += self._turnover * (NEAR_SLOT ** (asked - pieces) * possible)
        slots *= columns.gpu
        return slots


def _of_lines(value: Floats, lines: Ints) -> Floats:
    """[node, shape] What the free parts of a node's cards sum up to, by each shape's line of the table."""
    same = len(lines) and (lines == lines[0]).all()
    of_each: Floats = value[lines[0]][:, None] if same else value.take(lines, axis=0).T
    return of_each


@dataclass(frozen=True, slots=True)
class Demand:
    """The mix as demand: shapes that cover most of it, largest first, with their part q of all GPU.

    `seen`: part of the pods that are not the prior's. `several_seen`: how much GPU those of them that want
    several cards ask for, as part of what the prior's do, at most 1.
    """

    counts: Mapping[Shape, float]
    kept: tuple[tuple[Shape, float], ...]
    seen: float
    several_seen: float


def demand_of(counts: Mapping[Shape, float], seen: Mapping[Shape, float] | None = None) -> Demand:
    """Leave out pods without GPU, keep the shapes of largest demand until 98 % are covered.

    `seen`: those of `counts` that are not the prior's; without it all of them.
    """
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
    arrived = counts if seen is None else seen
    pods, several = sum(counts.values()), _units_of_several(arrived)
    assumed = _units_of_several(counts) - several
    return Demand(
        wanted,
        tuple(kept),
        seen=sum(arrived.values()) / pods if pods else 0.0,
        several_seen=min(1.0, several / assumed) if assumed > 0 else 1.0,
    )


def _units_of_several(counts: Mapping[Shape, float]) -> float:
    return sum(count * shape.total_units for shape, count in counts.items() if shape.cards > 1)


class PackedValue:
    """What free parts of one class of cards are worth when packed well, under a workload that keeps changing.

    Prices jump from one corner of a linear program to another when the workload changes a little; pods packed
    by the old prices stay. So new prices are taken up bit by bit, at first as far as pods were seen. Before
    that every part is worth what it is of a card: of the prior's optimal prices those that favour no size.

    Where several prices explain the demand equally well, or nearly so, the dearer pieces are to be the large
    ones. With about as many of 51 as of 34 hundredths, half a card for each would do as well as a whole one
    for the larger and nothing for the smaller. But then two of 34 go together as gladly as one beside one of
    51, and the third of a card that they leave is lost for good; what is kept for the larger is not.
    """

    def __init__(self, parts: int) -> None:
        self._cutter = CuttingStock(parts)
        self._worth: Floats | None = None

    def renew(self, pieces: Floats, seen: float) -> Floats:
        """Value of 0 … parts, as part of a card; `pieces[size]` are asked for, a part of them `seen`."""
        asked = pieces * (1.0 + LARGE_DEARER * np.arange(len(pieces)) / self._cutter.length)
        prices = self._cutter.prices({int(size): float(asked[size]) for size in np.flatnonzero(asked)})
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
    """[band, place in the table] Values for requests larger than the largest 0, 1 … of the classes.

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
    slot_demand: SlotDemand
    turnover: float
    host: HostValue | None = None


def demand_model_of(layout: Layout, demand: Demand, stock: PackedValues, turnover: float) -> DemandModel:
    """Weigh the kept shapes for each kind of node.

    A shape that may use few cards weighs as much more there: where each model is asked for as often as there
    are cards of it, all nodes are worth the same, and pods that may use any do not fill up the rare ones.
    """
    shapes = [shape for shape, _ in demand.kept]
    part = np.array([part for _, part in demand.kept])
    allowed, most = layout.allowed(shapes), layout.pieces(shapes)
    cards = np.array([kind.cards for kind in layout.kinds])
    usable = cards @ allowed
    weight = np.divide(part * cards.sum(), usable, out=np.zeros(len(shapes)), where=usable > 0.0)
    weight = weight * (allowed & (most > 0.0))
    several = np.array([shape.cards > 1 for shape in shapes], dtype=np.bool_)
    table = [*banded(layout, card_values(layout, demand, stock))]
    parts = _columns(shapes, weight * ~several, most, layout, table, turnover=turnover)
    slots = _columns(shapes, weight * several, most, layout, table, turnover=turnover)
    used = np.flatnonzero((weight * several).any(axis=0))
    slot_demand = SlotDemand(
        shapes=[shapes[column] for column in used],
        part=part[used],
        holds=allowed[:, used] & (slots.most >= slots.cards),
        weight=float(slots.weight.max(axis=0, initial=0.0).sum()),
        seen=demand.several_seen,
    )
    return DemandModel(layout, np.array(table), parts, slots, slot_demand, turnover)


def _columns(
    shapes: list[Shape], weight: Floats, most: Floats, layout: Layout, table: list[Floats], *, turnover: float
) -> Columns:
    """The shapes of some weight; what must be known of cards for them is added to the `table`."""
    used = np.flatnonzero(weight.any(axis=0))
    chosen = [shapes[column] for column in used]
    smaller = [card.size for card in layout.classes[:-1]]
    units = np.array([shape.units for shape in chosen], dtype=np.int64)
    cards = np.array([shape.cards for shape in chosen], dtype=np.float64)
    gpu = units * cards / layout.mean_units
    cpu_milli = np.array([max(shape.cpu_milli, 1) for shape in chosen], dtype=np.float64)
    memory_mib = np.array([max(shape.memory_mib, 1) for shape in chosen], dtype=np.float64)
    whole = units == np.array([max(kind.sizes, default=0) for kind in layout.kinds])[:, None]
    # where pods come and go, holes do not become whole cards by being filled; those of a model that few have
    # are kept for the pods bound to it all the same, or others would fill them up
    comes_free = turnover * np.array([not shape.models for shape in chosen], dtype=np.float64)
    by_value = np.where(whole, (1.0 - WHOLE_FREE) * (1.0 - WHOLE_FREE_TURNOVER * comes_free), 1.0)
    lines = [
        _lines_of(shape, layout, table) if shape.cards > 1 or whole[:, column].any() else (0, 0)
        for column, shape in enumerate(chosen)
    ]
    pieces, wide = np.array(lines, dtype=np.int64).reshape(-1, 2).T
    return Columns(
        weight=weight[:, used],
        cards_per_cpu=gpu / cpu_milli,
        cards_per_memory=gpu / memory_mib,
        by_value=by_value,
        by_free=(1.0 - by_value) * gpu,
        cards=cards,
        gpu=gpu,
        value=np.searchsorted(smaller, units),
        pieces=pieces,
        wide=wide,
        most=np.minimum(most[:, used], layout.hosted(cpu_milli / cards, memory_mib / cards)),
    )


def _lines_of(shape: Shape, layout: Layout, table: list[Floats]) -> tuple[int, int]:
    """The lines of the table that tell how many pieces a card has for this shape, and whether any."""
    pieces = layout.pieces_of_parts(shape.units)
    line = _line_of(pieces, table)
    return line, _line_of(np.minimum(pieces, 1.0), table) if shape.cards > 1 else line


def _line_of(line: Floats, table: list[Floats]) -> int:
    """Where this line is in the table, added to it where it is not."""
    for number, known in enumerate(table):
        if np.array_equal(known, line):
            return number
    table.append(line)
    return len(table) - 1
