"""NVML's field values: many figures of a card for one call; and NVLink's rates, which are made of them.

Asked each second for each card, so not through NVIDIA's wrapper, which makes a slow object of every figure:
here the array is kept and unpacked at once. Source of the layout: nvml.h, ``nvmlFieldValue_t``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any

import pynvml

from gpuslice.adapters.gpu.readings import raise_if_lost

_VALUE = Struct("@II16xii8s")  # field, scope, type and result of the figure, and the union it is in
_TYPES = tuple(Struct(f"@{letter}") for letter in "dILQqiH")
"""By ``nvmlValueType_t``, the member of the union that the driver filled."""

FieldId = tuple[int, int]  # number and scope


class FieldValues:
    """Asks one card for field values, mostly the same ones again."""

    def __init__(self, card: Any) -> None:
        self._card = card
        self._ids: Sequence[FieldId] = ()
        self._array = ctypes.create_string_buffer(0)

    def read(self, ids: Sequence[FieldId]) -> list[tuple[int, float]]:
        """For each field the driver's verdict on it, an ``nvmlReturn_t``, and the figure: 0 without one.

        A driver that does not know the question says no to each. Raises NVMLError for a card that is lost.
        """
        if ids != self._ids:
            self._ids = ids
            self._array = ctypes.create_string_buffer(b"".join(_VALUE.pack(*i, 0, 0, b"") for i in ids))
        try:
            ask = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetFieldValues")
            pynvml._nvmlCheckReturn(ask(self._card, ctypes.c_int32(len(ids)), self._array))
        except pynvml.NVMLError as error:
            raise_if_lost(error)
            return [(error.value, 0.0)] * len(ids)
        room = _VALUE.size * len(ids)
        answers = _VALUE.iter_unpack(memoryview(self._array)[:room])
        return [
            (result, 0.0 if result else float(_TYPES[kind].unpack_from(union)[0]))
            for _, _, kind, result, union in answers
        ]


@lru_cache(maxsize=1000)
def field_id(name: str, scope: int = 0) -> FieldId | None:
    """An NVML field by name; None when this binding does not know it."""
    number: int | None = getattr(pynvml, name, None)
    return None if number is None else (number, scope)


ALL_LINKS = 0xFFFFFFFF
LINKS = 18
_KIB = 1024
_MEGA = 1e6
# The first numbers of both directions together lie in pieces, as links were added to the cards.
_OF_LINK = (*range(440, 446), *range(475, 481), *range(446, 449), *range(494, 497))

Source = tuple[str, int]  # direction and link


RATES: Mapping[int, tuple[Source, ...]] = {
    449: (("TX", ALL_LINKS), ("RX", ALL_LINKS)),
    843: (("TX", ALL_LINKS),),
    897: (("RX", ALL_LINKS),),
    **{number: (("TX", link), ("RX", link)) for link, number in enumerate(_OF_LINK)},
    **{825 + link: (("TX", link),) for link in range(LINKS)},
    **{879 + link: (("RX", link),) for link in range(LINKS)},
}


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
