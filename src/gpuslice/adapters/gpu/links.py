"""NVLink traffic as DCGM shows it: a rate in MB/s, over all links or one, from counters of KiB.

Source of the field numbers: DCGM 4.6; of the two counters and their scope: nvml.h.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pynvml

from gpuslice.adapters.gpu.values import FieldValues

ALL_LINKS = 0xFFFFFFFF
LINKS = 18
_KIB = 1024
_MEGA = 1e6
_BOTH, _SENT, _RECEIVED = ("TX", "RX"), ("TX",), ("RX",)
# The first numbers of both directions together lie in pieces, as links were added to the cards.
_OF_LINK = (*range(440, 446), *range(475, 481), *range(446, 449), *range(494, 497))

Source = tuple[str, int]  # direction and link


def _table() -> Iterator[tuple[int, tuple[Source, ...]]]:
    for number, directions in ((449, _BOTH), (843, _SENT), (897, _RECEIVED)):
        yield number, tuple((direction, ALL_LINKS) for direction in directions)
    for link in range(LINKS):
        yield _OF_LINK[link], tuple((direction, link) for direction in _BOTH)
        yield 825 + link, (("TX", link),)
        yield 879 + link, (("RX", link),)


RATES: Mapping[int, tuple[Source, ...]] = dict(_table())


class LinkRates:
    """Remembers one card's counters from sample to sample."""

    def __init__(self, card: Any) -> None:
        self._values = FieldValues(card)
        self._before: dict[Source, tuple[float, float]] = {}  # KiB and when

    def read(self, wanted: list[int], now_s: float) -> tuple[dict[int, float], list[int]]:
        """MB/s since the last time by field; and the fields that this card has no counters for."""
        sources = sorted({source for number in wanted for source in RATES[number]})
        ids = [
            (getattr(pynvml, f"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_{direction}"), link)
            for direction, link in sources
        ]
        answers = zip(sources, self._values.read(ids), strict=True)
        counted = {source: value for source, (verdict, value) in answers if verdict == pynvml.NVML_SUCCESS}
        rates: dict[Source, float] = {}
        for source, value in counted.items():
            before_kib, before_s = self._before.get(source, (value, now_s))
            if now_s > before_s and value >= before_kib:
                rates[source] = (value - before_kib) * _KIB / (now_s - before_s) / _MEGA
        found = {
            number: sum(rates[source] for source in RATES[number])
            for number in wanted
            if rates.keys() >= set(RATES[number])
        }
        self._before = {source: (value, now_s) for source, value in counted.items()}
        return found, [n for n in wanted if not counted.keys() >= set(RATES[n])]
