"""Every policy ranks the nodes for a shape; this keeps the ranks and renews only those of changed nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gpuslice.core.policy.fleet import Flags, Fleet, Ints, Rows, Shape

NEVER = np.iinfo(np.int64).max
TIE_BITS = 32  # of a key, below the score: the fixed order among equals
CARDS_SHIFT = 24
CACHE_BYTES = 24 << 20  # all cached ranks of one policy together
NO_SLOT = -1


@dataclass(slots=True)
class Ranks:
    """One shape's rank of every row: the smallest key wins, NEVER where the shape does not fit.

    `slot` is the card of a one-card pod. `clock` is the fleet's at the last renewal, `version` the
    policy's own (see `Policy.version`).
    """

    keys: Ints
    slot: Ints
    clock: int
    version: int


class Policy(ABC):
    """Decides which node and which cards a pod gets.

    The caller tells what happens (`arrived`, `placed`, `departed`, `refused`, each once for a pod) and
    changes the fleet; a policy never does. All answers depend on the fleet and on what was told, so they
    are the same for the same history.
    """

    name: ClassVar[str]

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.version = 0  # a new value makes all ranks void
        self._ranks: OrderedDict[Shape, Ranks] = OrderedDict()

    @abstractmethod
    def rank(self, shape: Shape, rows: Rows) -> tuple[Ints, Ints]:
        """Key and slot of each of `rows`, on all of which the shape fits."""

    # What follows is told to all policies; those that look at the nodes alone have no use for it.

    def prepare(self) -> None:  # noqa: B027
        """Bring up to date what the ranks rest on, before any rank is asked for; may change `version`."""

    def arrived(self, shape: Shape) -> None:  # noqa: B027
        """A pod was seen for the first time."""

    def placed(self, shape: Shape) -> None:  # noqa: B027
        """A pod got its cards."""

    def departed(self, shape: Shape) -> None:  # noqa: B027
        """A pod that held cards is gone."""

    def refused(self, shape: Shape) -> None:  # noqa: B027
        """A pod fits nowhere at present."""

    def keys(self, shape: Shape) -> Ints:
        """The rank of every row of the fleet; NEVER where the shape does not fit. Do not change it."""
        return self._renewed(shape).keys

    def choose(self, shape: Shape, rows: Rows | None = None) -> int | None:
        """The best row of the fleet, or of `rows`; None when the shape fits on none."""
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
        """The cards of `row` for this shape, in index order; ValueError when it does not fit."""
        ranks = self._renewed(shape)
        if ranks.keys[row] == NEVER:
            raise ValueError(f"{shape} does not fit on row {row}")
        if shape.cards == 0:
            return ()
        if shape.cards == 1:
            return (int(ranks.slot[row]),)
        return several_cards(self.fleet, shape, row)

    def _renewed(self, shape: Shape) -> Ranks:
        self.prepare()
        ranks = self._ranks.get(shape)
        if ranks is None or ranks.version != self.version or len(ranks.keys) != self.fleet.rows:
            ranks = self._fresh(shape)
        else:
            self._catch_up(ranks, shape, self.fleet.changed_since(ranks.clock))
        self._ranks.move_to_end(shape)
        return ranks

    def _fresh(self, shape: Shape) -> Ranks:
        size = self.fleet.rows
        ranks = Ranks(np.full(size, NEVER), np.full(size, NO_SLOT), self.fleet.clock, self.version)
        self._ranks[shape] = ranks
        while len(self._ranks) > max(8, CACHE_BYTES // (16 * size + 1)):
            self._ranks.popitem(last=False)
        self._catch_up(ranks, shape, np.arange(size))
        return ranks

    def _catch_up(self, ranks: Ranks, shape: Shape, rows: Rows) -> None:
        if not len(rows):
            return
        ranks.clock = self.fleet.clock
        ranks.keys[rows] = NEVER
        fitting = fitting_rows(self.fleet, shape, rows)
        if len(fitting):
            ranks.keys[fitting], ranks.slot[fitting] = self.rank(shape, fitting)


def fitting_rows(fleet: Fleet, shape: Shape, rows: Rows) -> Rows:
    """Those of `rows` that can hold a pod of this shape now."""
    fits = (fleet.cpu_left[rows] >= shape.cpu_milli) & (fleet.memory_left[rows] >= shape.memory_mib)
    allowed = fleet.allowed(shape.models)
    if allowed is not None:
        fits &= allowed[fleet.model[rows]]
    rows = rows[fits]
    if not shape.cards or not len(rows):
        return rows
    enough = card_fits(fleet, shape, rows)
    return rows[enough.any(axis=1) if shape.cards == 1 else enough.sum(axis=1) >= shape.cards]


def card_fits(fleet: Fleet, shape: Shape, rows: Rows) -> Flags:
    """Which cards [row, slot] have what the shape asks of one."""
    fits: Flags = fleet.left[rows] >= max(shape.units, 1)
    if shape.core_percent:
        fits &= fleet.core_left[rows] >= shape.core_percent
    return fits


def several_cards(fleet: Fleet, shape: Shape, row: int) -> tuple[int, ...]:
    """The cards for a pod of several: those with least left that have enough, the lowest numbers first."""
    fits = np.flatnonzero(card_fits(fleet, shape, np.array([row]))[0])
    order = np.argsort(fleet.left[row, fits], kind="stable")
    return tuple(sorted(int(slot) for slot in fits[order[: shape.cards]]))


def keys_of(score: Ints, rows: Rows) -> Ints:
    """Keys of whole-number costs, the lower the better; the first row wins among equals."""
    return (score << TIE_BITS) + rows


def keys_small_first(score: Ints, rows: Rows, cards: Ints) -> Ints:
    """Keys of whole-number costs; among equals nodes with fewer cards win, then the first row."""
    return (score << TIE_BITS) + (cards << CARDS_SHIFT) + rows
