"""Every policy ranks the nodes for a shape; this module caches the ranks and updates only changed nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from gpuslice.core.card_links import closest, links_lost
from gpuslice.core.policy.fit import card_fits, fitting_rows
from gpuslice.core.policy.fleet import Fleet, Ints, Rows, Shape

NEVER = np.iinfo(np.int64).max
NO_SLOT = -1
TIE_BITS = 32  # of a key, below the score: the order among equals
NODE_SIZE_SHIFT, PART_SHIFT = 24, 21  # of a tie; below them the row
MOST_NODE_SIZES = 1 << (TIE_BITS - NODE_SIZE_SHIFT)
PART_BITS = NODE_SIZE_SHIFT - PART_SHIFT
STEP_PARTS = 1 << PART_BITS
LOST_SHIFT = 60  # of a key: above every score, which has 27 bits and a sign
CACHE_BYTES = 24 << 20  # of all ranks that one policy keeps
BYTES_PER_ROW = 16
LEAST_SHAPES = 8
ROWS_AT_A_TIME = 1024  # ranked at a time between requests, so that none waits long


class Ranker(Protocol):
    """Computes ranks, which may depend only on the fleet and on what the ranker was created with."""

    def rank(self, shape: Shape, rows: Rows) -> tuple[Ints, Ints]:
        """Key and slot for each of `rows`, on all of which the shape fits. The smallest key is the best.

        The slot is the card of a one-card pod and has no meaning for others.
        """


@dataclass(slots=True)
class Ranks:
    """One shape's key and slot for every row, as of the fleet's `clock`; NEVER where it does not fit."""

    keys: Ints
    slot: Ints
    clock: int


class RankCache:
    """Ranks of the most recently requested shapes, each updated where the fleet has changed since."""

    def __init__(
        self, fleet: Fleet, ranker: Ranker, most_bytes: int = CACHE_BYTES, *, joins: bool = True
    ) -> None:
        self.fleet = fleet
        self.joins = joins
        self.ranker = ranker
        self._most_bytes = most_bytes
        self._ranks: OrderedDict[Shape, Ranks] = OrderedDict()

    def ranks(self, shape: Shape) -> Ranks:
        """The current ranks."""
        ranks = self._ranks.get(shape)
        if ranks is None or len(ranks.keys) != self.fleet.rows:
            ranks = self._new(shape)
        if ranks.clock != self.fleet.clock:
            changed = self.fleet.changed_since(ranks.clock)
            ranks.clock = self.fleet.clock
            self._renew(ranks, shape, changed)
        self._ranks.move_to_end(shape)
        return ranks

    def prepare(self, shape: Shape) -> Iterator[None]:
        """Rank a shape that is not known yet, a few rows at a time; yields in between."""
        ranks = self._new(shape)
        ranks.clock = self.fleet.clock  # rows that change from now on are updated when it is requested
        for start in range(0, len(ranks.keys), ROWS_AT_A_TIME):
            self._renew(ranks, shape, np.arange(start, min(start + ROWS_AT_A_TIME, len(ranks.keys))))
            yield

    def shapes(self) -> list[Shape]:
        """The shapes whose ranks are kept, the most recently requested last."""
        return list(self._ranks)

    def _new(self, shape: Shape) -> Ranks:
        size = self.fleet.rows
        self._ranks[shape] = ranks = Ranks(np.full(size, NEVER), np.full(size, NO_SLOT), -1)
        while len(self._ranks) > max(LEAST_SHAPES, self._most_bytes // (BYTES_PER_ROW * size + 1)):
            self._ranks.popitem(last=False)
        return ranks

    def _renew(self, ranks: Ranks, shape: Shape, rows: Rows) -> None:
        ranks.keys[rows] = NEVER
        fitting = fitting_rows(self.fleet, shape, rows)
        if len(fitting):
            ranks.keys[fitting], ranks.slot[fitting] = self.ranker.rank(shape, fitting)
            if shape.cards > 1 and self.fleet.links and self.joins:
                ranks.keys[fitting] += far_apart(self.fleet, shape, fitting)


class Policy(ABC):
    """Decides which node and which cards a pod gets.

    The caller reports events (`arrived`, `placed`, `departed`, each once per pod) and changes the fleet; a
    policy never changes it. All answers depend only on the fleet and on the events, so the same history gives
    the same answers.
    """

    name: ClassVar[str]
    joins: ClassVar[bool] = True  # pods of several cards get cards that are well connected

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    @abstractmethod
    def cache(self) -> RankCache:
        """The ranks currently in force."""

    # All policies receive the following events; those that look only at the nodes ignore them.

    def arrived(self, shape: Shape) -> None:  # noqa: B027
        """A pod was seen for the first time."""

    def placed(self, shape: Shape) -> None:  # noqa: B027
        """A pod got its cards."""

    def departed(self, shape: Shape) -> None:  # noqa: B027
        """A pod that held cards is gone."""

    def maintain(self) -> bool:
        """Do a small piece of pending work between requests; returns whether there is more."""
        return False

    def keys(self, shape: Shape) -> Ints:
        """The rank of every row, the smallest is the best; NEVER where the shape does not fit. Read only."""
        return self.cache().ranks(shape).keys

    def choose(self, shape: Shape, rows: Rows | None = None) -> int | None:
        """The best row of the fleet, or of `rows`; None if the shape fits on none."""
        keys = self.keys(shape)
        if rows is not None:
            keys = keys[rows]
        if not len(keys):
            return None
        best = int(keys.argmin())
        if keys[best] == NEVER:
            return None
        return best if rows is None else int(rows[best])

    def slots(self, shape: Shape, row: int) -> tuple[int, ...]:
        """The cards of `row` for this shape, in index order; ValueError if it does not fit.

        Where the node's label asks for one way of packing, that rule decides instead of the policy.
        """
        slots = self.fitting_slots(shape, row)
        if slots is None:
            raise ValueError(f"{shape} does not fit on row {row}")
        return slots

    def fitting_slots(self, shape: Shape, row: int) -> tuple[int, ...] | None:
        """The same; None if it does not fit."""
        ranks = self.cache().ranks(shape)
        if ranks.keys[row] == NEVER:
            return None
        if shape.cards == 0:
            return ()
        if (spreads := self.fleet.terms["spreads"][row]) or self.fleet.terms["packs"][row]:
            return self._by_fullness(shape, row, emptiest_first=bool(spreads))
        if shape.cards == 1:
            return (int(ranks.slot[row]),)
        return self.several(shape, row)

    def several(self, shape: Shape, row: int) -> tuple[int, ...]:
        """The cards for a pod of several: among those with enough room the best connected, then the fullest,
        then the lowest numbers.
        """
        return self._by_fullness(shape, row)

    def _by_fullness(self, shape: Shape, row: int, *, emptiest_first: bool = False) -> tuple[int, ...]:
        fits = np.flatnonzero(card_fits(self.fleet, shape, np.array([row]))[0])
        left = self.fleet.left[row, fits]
        return self.best_joined(
            shape, row, fits[np.argsort(-left if emptiest_first else left, kind="stable")]
        )

    def best_joined(self, shape: Shape, row: int, slots: Rows) -> tuple[int, ...]:
        """Of these cards, best first, those that are best connected."""
        links = self.fleet.links.get(row, ()) if self.joins else ()
        return tuple(sorted(closest(links, slots.tolist(), shape.cards)))


def far_apart(fleet: Fleet, shape: Shape, rows: Rows) -> Ints:
    """What to add to the keys of nodes on which a pod of several cards would get less well connected cards
    than on the same node when empty: more than any two scores of a policy can differ by.
    """
    added = np.zeros(len(rows), dtype=np.int64)
    fits = card_fits(fleet, shape, rows)
    for at, row in enumerate(rows.tolist()):
        if (links := fleet.links.get(row)) is not None:
            fitting = int.from_bytes(np.packbits(fits[at], bitorder="little").tobytes(), "little")
            added[at] = links_lost(links, fitting, shape.cards) << LOST_SHIFT
    return added


def keys_of(score: Ints, rows: Rows) -> Ints:
    """Keys from whole-number costs, the lower the better; the first row wins among equals."""
    return (score << TIE_BITS) + rows


def keys_small_first(parts: Ints, rows: Rows, node_size: Ints) -> Ints:
    """Keys from costs in parts of a step, `STEP_PARTS` of which are one score.

    Among equal scores smaller nodes win (by their place in `Layout.node_size`), among equally large ones the
    lower part of the step, then the first row.
    """
    tie = (node_size << NODE_SIZE_SHIFT) + ((parts & (STEP_PARTS - 1)) << PART_SHIFT) + rows
    return (parts >> PART_BITS << TIE_BITS) + tie
