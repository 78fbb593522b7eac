"""What the earlier runs of a container counted: each run has a region of its own, its counters go on.

kubelet starts a container that crashed again, with a fresh region. A counter that began anew each time would
stand still to one who looks now and then: 1, and after the next crash 1 again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from .reader import CardUsage, RegionError, read_region

MOST: Final = 1 << 62
"""The tenant can write what it likes; beyond this it is not counted on."""


class Counts(msgspec.Struct, frozen=True):
    """Of one card: refused allocations, and how long launches were made to wait."""

    refused: int = 0
    throttled_ns: int = 0

    def plus(self, usage: CardUsage | None) -> Counts:
        """With what another run counted, if it has come to the card."""
        if usage is None:
            return self
        refused, throttled_ns = self.refused + usage.refused, self.throttled_ns + usage.throttled_ns
        return Counts(min(refused, MOST), min(throttled_ns, MOST))


NOTHING: Final = Counts()


def with_region(earlier: Mapping[str, Counts], path: Path) -> dict[str, Counts]:
    """`earlier`, by card uuid, with what the region in `path` has: nothing where it cannot be read."""
    try:
        reading = read_region(path)
    except (OSError, RegionError):
        reading = None
    run = {card.uuid: card for card in reading.cards} if reading is not None else {}
    sums = {uuid: earlier.get(uuid, NOTHING).plus(run.get(uuid)) for uuid in {*earlier, *run}}
    return {uuid: counts for uuid, counts in sums.items() if counts != NOTHING}
