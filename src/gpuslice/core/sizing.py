"""How much of a card a container ought to ask for, by the most that it used."""

from __future__ import annotations

from dataclasses import dataclass

from gpuslice.core.units import limit_mib

HEADROOM = 1.1
"""What is suggested holds the peak and a tenth more: the next run is not byte for byte the same."""
MOST_USED_OF_TOO_MUCH = 0.7
"""A smaller size is suggested if the peak was less than this part of the limit."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """`units` instead of those now; `more` where that is not enough now."""

    units: int
    limit_mib: int
    more: bool


def suggested_size(
    *, units: int, card_units: int, card_mib: int, peak_mib: float, refused: bool
) -> Suggestion | None:
    """None where the size is right, or nothing is known.

    Where memory was refused the peak is no more than the limit, so how much would be enough is not known: a
    unit more than now, and at least what the peak with its headroom takes.
    """
    if not (0 < units <= card_units and card_mib > 0):
        return None
    enough = next(
        (
            each
            for each in range(1, card_units + 1)
            if limit_mib(card_mib, each, card_units) >= peak_mib * HEADROOM
        ),
        card_units,
    )
    if refused:
        wanted = min(card_units, max(units + 1, enough))
        if wanted <= units:
            return None  # it has the whole card already
        return Suggestion(wanted, limit_mib(card_mib, wanted, card_units), more=True)
    now_mib = limit_mib(card_mib, units, card_units)
    if peak_mib <= 0 or peak_mib >= MOST_USED_OF_TOO_MUCH * now_mib or enough >= units:
        return None
    return Suggestion(enough, limit_mib(card_mib, enough, card_units), more=False)
