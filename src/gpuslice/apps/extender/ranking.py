"""From ranks to answers: the best nodes, scores, and why the others were refused."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpuslice.apps.extender.node_query import NodeQuery, Positions, Reason
from gpuslice.core.model import Request
from gpuslice.core.placement import CORE_REQUIRED, NO_CORE, NO_ROOM, NO_ROOM_IN_SEVERAL
from gpuslice.core.policy import NEVER
from gpuslice.core.policy.fleet import Flags, Fleet, Ints
from gpuslice.core.policy.ranking import TIE_BITS

TOP_SCORE = 10  # MaxExtenderPriority
SAMPLE_EVERY = 16
KEPT_SHAPES = 256


def best_of(keys: Ints, count: int) -> Positions:
    """The positions of the `count` best, in order. At least that many must fit."""
    few = keys
    # a sample shows below which key there are enough nodes and few more; partitioning all takes ten times as
    # long
    sample = keys[::SAMPLE_EVERY]
    rank = 3 * count // SAMPLE_EVERY  # so that three times as many as needed are expected
    if rank < len(sample):
        found = keys[keys <= np.partition(sample, rank)[rank]]
        if len(found) >= count:
            few = found
    least = np.partition(few, count - 1)[count - 1]  # no two keys are equal
    best: Positions = (keys <= least).nonzero()[0]
    return best


def scores(keys: Ints) -> Ints:
    """10 for the best key, 9 to 0 for the others by their cost, 0 for what does not fit."""
    if not len(keys) or keys[best := keys.argmin()] == NEVER:
        return np.zeros(len(keys), dtype=np.int64)
    costs = keys >> TIE_BITS  # the policy's cost, without the order among equals
    least, most = int(costs[best]), int(costs.max())
    if most == NEVER >> TIE_BITS:
        never = keys == NEVER
        most = int(costs[~never].max())
        costs[never] = most
    scores: Ints = np.rint((most - costs) * ((TOP_SCORE - 1) / max(1, most - least))).astype(np.int64)
    scores[best] = TOP_SCORE
    return scores


def reasons(
    fleet: Fleet, query: NodeQuery, refused: Positions, request: Request, *, compute_counts: bool
) -> list[Reason]:
    """Why the known nodes among `refused` were refused; only for lack of memory unless `compute_counts`."""
    known = query.known(refused)
    text = NO_ROOM if request.card_count == 1 else NO_ROOM_IN_SEVERAL.format(count=request.card_count)
    found = [(known, text)]
    if compute_counts and len(known):
        cards = 1 if request.compute_percent else request.card_count
        left = fleet.left.take(query.rows.take(known), axis=0)
        roomy = have_cards(left, request.units_per_card, cards)
        why = NO_CORE if request.compute_percent else CORE_REQUIRED
        why = why.format(name=request.names.compute)  # the name under which these nodes offer it
        found = [(known[~roomy], text), (known[roomy], why)]
    return [reason for reason in found if len(reason[0])]


def have_cards(amounts: npt.NDArray[np.int32], units: int, cards: int) -> Flags:
    """Which nodes have at least `cards` cards with at least `units` of `amounts`: [node, slot]."""
    enough: Flags = (amounts >= units).sum(axis=1) >= cards
    return enough


class ImpossibleNodes:
    """Which nodes could not hold a request even if they were empty; computed again when cards change."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._version = -1
        self._small: dict[tuple[int, int], Flags | None] = {}  # rows by units and cards; None for none

    def of(self, query: NodeQuery, refused: Positions, request: Request) -> Positions:
        """Those of `refused`, all of which must have a row."""
        shape = request.units_per_card, request.card_count
        if self._version != self._fleet.cards_version or len(self._small) >= KEPT_SHAPES:
            self._small, self._version = {}, self._fleet.cards_version
        if shape not in self._small:
            small = ~have_cards(self._fleet.size, *shape)
            self._small[shape] = small if small[self._fleet.cards > 0].any() else None
        small_rows = self._small[shape]
        return refused[:0] if small_rows is None else refused[small_rows.take(query.rows.take(refused))]
