"""Where a request fits, where not, and why: `placement.why_not` for many nodes at once, as arrays.

Whatever rules a node out is a column of the `Fleet` and is checked here, for policies, filter, events and
replays alike. What is held for pods that come first is for the ledger to add (`Ledger.why_not`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gpuslice.core.placement import Fit
from gpuslice.core.policy.fleet import Flags, Fleet, Rows, Shape

Fits = npt.NDArray[np.int8]
"""The value of a `Fit` for each of some nodes."""


def fitting_rows(fleet: Fleet, shape: Shape, rows: Rows) -> Rows:
    """Those of `rows` that can hold a pod of this shape now."""
    fits = (
        _have_cards(card_fits(fleet, shape, rows), shape) if shape.cards else fleet.cpu_left.take(rows) >= 0
    )
    for _, barred in _barriers(fleet, shape, rows):
        fits &= ~barred
    if fleet.host_limits:
        fits &= (fleet.cpu_left.take(rows) >= shape.cpu_milli) & (
            fleet.memory_left.take(rows) >= shape.memory_mib
        )
    return rows[fits]


def why_not(fleet: Fleet, shape: Shape, rows: Rows, *, host_limits: bool) -> Fits:
    """For each of `rows`, whether it holds a pod of this shape, and the first reason why not."""
    found = np.full(len(rows), Fit.YES, dtype=np.int8)
    if host_limits:
        found[fleet.memory_left.take(rows) < shape.memory_mib] = Fit.NO_MEMORY
        found[fleet.cpu_left.take(rows) < shape.cpu_milli] = Fit.NO_CPU
    full = ~_have_cards(card_fits(fleet, shape, rows), shape)
    found[full] = Fit.NO_ROOM
    if shape.compute_percent:
        found[full & (fleet.left.take(rows, axis=0) >= shape.units).any(axis=1)] = Fit.NO_COMPUTE
        found[full & (fleet.terms["compute_percent"].take(rows) < shape.compute_percent)] = (
            Fit.TOO_MUCH_COMPUTE
        )
    found[full & ~_have_cards(fleet.size.take(rows, axis=0) >= max(shape.units, 1), shape)] = (
        Fit.TOO_FEW_CARDS
    )
    for fit, barred in reversed([*_barriers(fleet, shape, rows)]):
        found[barred] = fit
    found[fleet.slots.take(rows) == 0 if shape.cards else fleet.cpu_left.take(rows) < 0] = Fit.NOT_SHARED
    return found


def card_fits(fleet: Fleet, shape: Shape, rows: Rows) -> Flags:
    """Which cards [row, slot] have what the shape requests per card."""
    fits: Flags = fleet.left.take(rows, axis=0) >= max(shape.units, 1)
    if shape.compute_percent:
        fits &= fleet.compute_left.take(rows, axis=0) >= shape.compute_percent
    return fits


def _have_cards(fits: Flags, shape: Shape) -> Flags:
    enough: Flags = fits.any(axis=1) if shape.cards == 1 else fits.sum(axis=1) >= shape.cards  # type: ignore[assignment]
    return enough


def _barriers(fleet: Fleet, shape: Shape, rows: Rows) -> Iterator[tuple[Fit, Flags]]:
    """What keeps a pod of this kind from a node, whatever is free on its cards; in order of `Fit`."""
    if shape.names and not fleet.name_sets.keys() <= {"", shape.names}:
        known = [fleet.name_sets.get(name, -1) for name in ("", shape.names)]
        yield Fit.OTHER_NAMES, ~np.isin(fleet.terms["names"].take(rows), known)
    if shape.min_tier:
        yield Fit.TIER_TOO_LOW, fleet.terms["tier"].take(rows) < shape.min_tier
    if fleet.demanding:
        if shape.cards and not shape.compute_percent:
            yield Fit.COMPUTE_REQUIRED, fleet.terms["compute_required"].take(rows)
        yield Fit.KUBELET_AWAY, fleet.terms["kubelet_away"].take(rows)
    if (allowed := fleet.allowed(shape.models)) is not None:
        yield Fit.OTHER_MODEL, ~allowed[fleet.model.take(rows)]
