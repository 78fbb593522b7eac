"""What the ranks of nodes come to: the best of them, scores, and why the others were refused."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpuslice.apps.extender.asked import Asked, Places, Reason
from gpuslice.core.model import Request
from gpuslice.core.placement import CORE_REQUIRED, NO_CORE, NO_ROOM, NO_ROOM_IN_SEVERAL
from gpuslice.core.policy import NEVER
from gpuslice.core.policy.fleet import Flags, Fleet, Ints
from gpuslice.core.policy.ranking import TIE_BITS

TOP_SCORE = 10  # MaxExtenderPriority
SAMPLE_EVERY = 16


def reasons(fleet: Fleet, asked: Asked, refused: Places, request: Request) -> list[Reason]:
    """Why the known ones of the `refused` were refused."""
    known = asked.known(refused)
    if not len(known):
        return []
    cards = 1 if request.core_percent else request.gpu_count
    roomy = _with_cards(fleet.left, asked.rows.take(known), request.units_per_gpu, cards)
    text = NO_ROOM if request.gpu_count == 1 else NO_ROOM_IN_SEVERAL.format(count=request.gpu_count)
    found = [(known[~roomy], text), (known[roomy], NO_CORE if request.core_percent else CORE_REQUIRED)]
    return [reason for reason in found if len(reason[0])]


def impossible(fleet: Fleet, asked: Asked, refused: Places, request: Request) -> Places:
    """Which of the `refused` could not hold the request if nobody else were there."""
    large = _with_cards(fleet.size, asked.rows.take(refused), request.units_per_gpu, request.gpu_count)
    return refused[~large]


def _with_cards(amounts: npt.NDArray[np.int32], rows: Ints, units: int, cards: int) -> Flags:
    """Which of `rows` have at least `cards` cards with at least `units` of `amounts`."""
    enough: Flags = (amounts.take(rows, axis=0) >= units).sum(axis=1) >= cards
    return enough


def best_of(keys: Ints, fitting: Places, count: int) -> tuple[Places, Places]:
    """The `count` best of the `fitting`, and the others; each in order."""
    fit = keys.take(fitting)
    chosen = fit <= np.partition(_some_best(fit, count), count - 1)[count - 1]  # no two keys are equal
    return fitting[chosen], fitting[~chosen]


def _some_best(keys: Ints, count: int) -> Ints:
    """The `count` best, with few others: a sample tells, since to part all costs ten times that."""
    sample = keys[::SAMPLE_EVERY]
    rank = 3 * count // SAMPLE_EVERY  # so that three times as many as wanted are to be expected
    if rank < len(sample):
        few: Ints = keys[keys <= np.partition(sample, rank)[rank]]
        if len(few) >= count:
            return few
    return keys


def scores(keys: Ints) -> Ints:
    """Best key 10, the others by their cost between 9 and 0, what does not fit 0."""
    costs, never = keys >> TIE_BITS, keys == NEVER  # the policy's own cost, without the order among equals
    refused = never.any()
    if refused and never.all():
        return np.zeros(len(keys), dtype=np.int64)
    best = keys.argmin()
    least = costs[best]
    most = costs[~never].max() if refused else costs.max()
    scores: Ints = np.rint((most - costs) * ((TOP_SCORE - 1) / max(1, most - least))).astype(np.int64)
    scores[never] = 0
    scores[best] = TOP_SCORE
    return scores
