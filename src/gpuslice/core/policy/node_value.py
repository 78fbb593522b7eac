"""What a node is worth: the GPU that can still be sold on it, given the expected workload.

    U(node) = Σ_j w_j · room_j

over the shapes j of the workload, with all amounts in cards of mean size. ``room_j`` is the room for shape j:
at most the value of the free cards (V, where a part of a card counts by its price), at most what CPU and
memory can still serve, and in whole slots if the shape requests several cards. ``w_j`` is its fraction of the
demand, higher where few cards may serve it. Where CPU or memory runs out before the cards do, `host_value`
says what a node is worth instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gpuslice.core.policy.cutting_stock import CuttingStock, value_of_space
from gpuslice.core.policy.fleet import Floats, Ints, Rows, Shape
from gpuslice.core.policy.host_value import HostValue
from gpuslice.core.policy.layout import CardClass, Layout
from gpuslice.core.policy.slot_price import SlotDemand

COVERED_DEMAND = 0.98  # of the GPU demand, by the shapes that are considered
PACKED_PART, NEXT_PART = 0.7, 0.3  # of a free part's value: if packed well; for the very next pod
NEWS_PART = 0.2  # of what a new workload says about packing; the rest stays, as do the pods already packed
MOST_PIECE_SIZES = 128  # of one class of cards, priced separately
LARGE_DEARER = 0.3  # more for a whole card, proportionally for a part of one: see `PackedValue`
NEAR_SLOT = 0.6  # value of a slot that is not free yet, for each card that is still missing
WHOLE_FREE = 0.05  # of the room for one whole card: by wholly free cards; the rest by value
WHOLE_FREE_TURNOVER = 0.5  # the same of that rest, if as many pods leave as come
ROUNDING = 1e-9
BLOCK_ROWS = 128  # evaluated at a time, so that intermediate results stay in the processor's cache


@dataclass(frozen=True, slots=True)
class Columns:
    """Shapes side by side. `weight`: [kind, shape]. A node with `cpu` CPU serves `cpu · cards_per_cpu` cards.

    `value`, `pieces`, `wide` are lines of the table: what the free part of a card is worth to the shape, how
    many pieces of what the shape requests per card can be cut from it, and whether any can. For shares and
    single cards, room is at most `by_value · value + by_free · pieces`, [kind, shape]. For several cards it
    comes in slots of `cards` pieces on as many cards, which together count `gpu`. `most`: [kind, shape] how
    many pieces an empty node has.
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

    `amounts`: [quantity, line] free CPU, free memory, and from `VALUES` on the sums over the free parts of
    the cards, by each line of the table.
    """

    rows: Rows
    amounts: Floats

    def part(self, lines: slice | Rows) -> States:
        """A subset of these states."""
        return States(self.rows[lines], self.amounts[:, lines])

    def followed_by(self, others: States) -> States:
        """These states followed by others, to be evaluated together."""
        return States(
            np.concatenate([self.rows, others.rows]), np.concatenate([self.amounts, others.amounts], axis=1)
        )


class NodeValue:
    """Values of free parts of cards and of nodes under one workload; immutable."""

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
        """U, in cards, of nodes in the given states."""
        if self._host_value is not None:
            cpu_milli, memory_mib, value = states.amounts[: VALUES + 1]
            return self._host_value.of(value, cpu_milli, memory_mib)
        if len(states.rows) <= BLOCK_ROWS:
            return self._of_block(states)
        starts = range(0, len(states.rows), BLOCK_ROWS)
        return np.concatenate([self._of_block(states.part(slice(at, at + BLOCK_ROWS))) for at in starts])

    def _of_block(self, states: States) -> Floats:
        """Room for each shape times its weight: first for shares and single cards, then for several."""
        cpu_milli, memory_mib = states.amounts[:VALUES]
        value = states.amounts[VALUES:]
        kind, parts = self.layout.kind.take(states.rows), len(self._parts)
        room: Floats = cpu_milli[:, None] * self._per_cpu  # cards that free CPU and memory can serve
        np.minimum(room, memory_mib[:, None] * self._per_memory, out=room)
        np.maximum(room, 0.0, out=room)  # others may use more of a node than we know of
        pick = slice(0, 1) if self._one_kind else kind
        on_cards: Floats = _of_lines(value, self._parts.value) * self._parts.by_value[pick]
        on_cards += _of_lines(value, self._parts.pieces) * self._parts.by_free[pick]
        np.minimum(room[:, :parts], on_cards, out=room[:, :parts])
        if len(self._slots):
            room[:, parts:] = self._slot_room(value, room[:, parts:], kind)
        worth: Floats = np.einsum("ij,ij->i", room, self._weight.take(kind, axis=0))
        return worth

    def _slot_room(self, value: Floats, hosted: Floats, kind: Ints) -> Floats:
        """Whole slots for each shape of several cards, plus the chance of those that may become free next.

        A piece without the CPU or memory for it does not count: a pod that takes these from a node breaks a
        slot, too.
        """
        columns = self._slots
        pieces = np.minimum(_of_lines(value, columns.pieces), hosted * (columns.cards / columns.gpu))
        if (columns.wide != columns.pieces).any():
            wide = _of_lines(value, columns.wide)
            np.minimum(pieces, wide, out=pieces, where=wide < columns.cards)
        np.floor(pieces + ROUNDING, out=pieces)
        slots: Floats = np.floor(pieces / columns.cards + ROUNDING)
        if self._turnover:  # a slot that is not free yet counts less for each missing piece
            asked = (slots + 1.0) * columns.cards
            possible = asked <= columns.most.take(kind, axis=0)
            slots += self._turnover * (NEAR_SLOT ** (asked - pieces) * possible)
        slots *= columns.gpu
        return slots


def _of_lines(value: Floats, lines: Ints) -> Floats:
    """[node, shape] The sum over the free parts of a node's cards, by each shape's line of the table."""
    same = len(lines) and (lines == lines[0]).all()
    of_each: Floats = value[lines[0]][:, None] if same else value.take(lines, axis=0).T
    return of_each


@dataclass(frozen=True, slots=True)
class Demand:
    """The mix as demand: the shapes that cover most of it, largest first, with their fraction q of all GPU.

    `arrived`: the part of `counts` that does not come from the prior; `seen`: its fraction of the pods.
    `several_seen`: the GPU requested by those of them that request several cards, relative to the prior's, at
    most 1.
    """

    counts: Mapping[Shape, float]
    arrived: Mapping[Shape, float]
    kept: tuple[tuple[Shape, float], ...]
    seen: float
    several_seen: float


def demand_of(counts: Mapping[Shape, float], seen: Mapping[Shape, float] | None = None) -> Demand:
    """Leave out pods without GPU, and keep the shapes of largest demand until 98 % are covered.

    `seen`: the part of `counts` that does not come from the prior; by default all of them.
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
        arrived,
        tuple(kept),
        seen=sum(arrived.values()) / pods if pods else 0.0,
        several_seen=min(1.0, several / assumed) if assumed > 0 else 1.0,
    )


def _units_of_several(counts: Mapping[Shape, float]) -> float:
    return sum(count * shape.total_units for shape, count in counts.items() if shape.cards > 1)


class PackedValue:
    """What free parts of one class of cards are worth when packed well, under a workload that keeps changing.

    Prices jump from one vertex of a linear program to another when the workload changes a little, while pods
    packed by the old prices stay. Therefore new prices are applied gradually, at first in proportion to the
    pods seen. Before any are seen, each part is worth its fraction of a card: of the prior's optimal prices,
    those that favour no size.

    If several prices explain the demand equally well, or nearly so, large pieces are given the higher ones.
    With about as many pieces of 0.51 as of 0.34 cards, half a card for each would be as optimal as a whole
    card for the larger and nothing for the smaller. But then two of 0.34 would be put together as readily as
    one beside a 0.51, and the third of a card that they leave is lost for good; what is kept for the larger
    piece is not.
    """

    def __init__(self, parts: int) -> None:
        self._cutter = CuttingStock(parts)
        self._worth: Floats | None = None

    def renew(self, pieces: Floats, seen: float) -> Floats:
        """Values of 0 … parts, as fractions of a card, for `pieces[size]` in demand, of which the fraction
        `seen` was seen.
        """
        asked = in_few_sizes(pieces) * (1.0 + LARGE_DEARER * np.arange(len(pieces)) / self._cutter.length)
        prices = self._cutter.prices({int(size): float(asked[size]) for size in np.flatnonzero(asked)})
        worth = np.minimum(1.0, value_of_space(self._cutter.length, prices))
        before, news = self._worth, NEWS_PART
        if before is None:
            before, news = np.arange(len(pieces)) / (len(pieces) - 1), seen
        self._worth = news * worth + (1.0 - news) * before
        return self._worth


def in_few_sizes(pieces: Floats) -> Floats:
    """The demand in at most `MOST_PIECE_SIZES` sizes: half of them those of most demand, half in equal steps.

    Pieces of any other size count as the next larger of these. The time of the linear program grows faster
    than the number of sizes, and where a unit is a MiB one tenant may ask for a thousand.
    """
    asked, half = np.flatnonzero(pieces), MOST_PIECE_SIZES // 2
    if len(asked) <= MOST_PIECE_SIZES:
        return pieces
    by_demand = np.argsort(-pieces[asked] * asked, kind="stable")
    steps = -(-np.arange(1, half + 1) * (len(pieces) - 1) // half)  # the last is a whole card
    kept = np.union1d(asked[by_demand[:half]], steps)
    few = np.zeros_like(pieces)
    np.add.at(few, kept[np.searchsorted(kept, asked)], pieces[asked])
    return few


PackedValues = dict[int, PackedValue]


def card_values(layout: Layout, demand: Demand, stock: PackedValues) -> Floats:
    """The table of the values of free parts of cards, in mean cards; one section for each class."""
    tables = []
    for card in layout.classes:
        packed = stock.setdefault(card.size, PackedValue(card.parts))
        # v(x), x = 0 … parts: 0.7 × its value when packed well + 0.3 × what the next pod alone can use of it
        # assumed sizes are not priced once others were seen: they would make gaps that nobody fills valuable
        pieces, arrived = pieces_of(card, demand.counts), pieces_of(card, demand.arrived)
        values = np.zeros(card.parts + 1)
        if pieces.any():
            served = np.cumsum(pieces) / pieces.sum()
            values = (
                PACKED_PART * packed.renew(arrived if arrived.any() else pieces, demand.seen)
                + NEXT_PART * np.arange(card.parts + 1) / card.parts * served
            )
        values[0], values[-1] = 0.0, 1.0
        tables.append(values * (card.size / layout.mean_units))
    return np.concatenate(tables)


def pieces_of(card: CardClass, counts: Mapping[Shape, float]) -> Floats:
    """How many pieces of 0 … parts the shapes that want part of such a card request."""
    pieces = np.zeros(card.parts + 1)
    for shape, count in counts.items():
        if 0 < shape.units < card.size:
            pieces[card.pieces(shape.units)] += count * shape.cards
    return pieces


def banded(layout: Layout, values: Floats) -> Floats:
    """[band, place in the table] Values for requests larger than the largest 0, 1 … of the classes.

    Such a request cannot use a part that would fit on a smaller card. Otherwise it would make what remains
    beside it on its cards as valuable as whole cards, and pods that could fill that would break smaller cards
    instead.
    """
    sizes = [card.size for card in layout.classes]
    units = np.concatenate([np.arange(card.parts + 1) * (card.size / card.parts) for card in layout.classes])
    return np.array([values * (units > least) for least in (0, *sizes[:-1])])


@dataclass(frozen=True, slots=True)
class DemandModel:
    """The demand applied to the existing kinds of nodes: weights of all shapes; slots are not priced yet.

    `turnover`: departures for each pod placed; 0 while a cluster fills up, 1 if as many leave as come.
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

    A shape that may use only some of the cards weighs proportionally more there: if each model is requested
    in proportion to its cards, all nodes are worth the same, and pods that may use any model do not fill up
    the rare ones.
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
    """The shapes with some weight; the lines of the table that they need are added to `table`."""
    used = np.flatnonzero(weight.any(axis=0))
    chosen = [shapes[column] for column in used]
    smaller = [card.size for card in layout.classes[:-1]]
    units = np.array([shape.units for shape in chosen], dtype=np.int64)
    cards = np.array([shape.cards for shape in chosen], dtype=np.float64)
    gpu = units * cards / layout.mean_units
    cpu_milli = np.array([max(shape.cpu_milli, 1) for shape in chosen], dtype=np.float64)
    memory_mib = np.array([max(shape.memory_mib, 1) for shape in chosen], dtype=np.float64)
    whole = units == np.array([max(kind.sizes, default=0) for kind in layout.kinds])[:, None]
    # where pods come and go, filling holes does not turn them into whole cards; still, those of a rare model
    # are kept for the pods bound to it, or others would fill them up
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
    """The lines of the table for how many pieces of this shape a card has, and for whether it has any."""
    pieces = layout.pieces_of_parts(shape.units)
    line = _line_of(pieces, table)
    return line, _line_of(np.minimum(pieces, 1.0), table) if shape.cards > 1 else line


def _line_of(line: Floats, table: list[Floats]) -> int:
    """The position of this line in the table; it is added if missing."""
    for number, known in enumerate(table):
        if np.array_equal(known, line):
            return number
    table.append(line)
    return len(table) - 1
