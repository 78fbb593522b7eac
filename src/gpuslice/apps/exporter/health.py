"""Health of a card from what NVML tells: the part of DCGM's health watches that needs no host engine.

Watches, results and error codes are DCGM's. A watch without any reading to judge by is left out, and those
for which NVML has nothing (PMU, MCU, SM, DRIVER) always are: DCGM itself shows a pass there.
Source: DCGM 4.6, its health monitor and the list of its error codes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from gpuslice.adapters.gpu.readings import Reading

WINDOW_S = 60.0
MOST_REPLAYS = 8  # PCIe replays within a minute that DCGM puts up with

_REPLAYS, _POWER, _POWER_CAP, _THERMAL = 202, 155, 240, 241
_INFOROM, _DOUBLE_BIT, _RETIRE_PENDING, _REMAP_FAILED, _REMAP_PENDING = 84, 311, 392, 395, 396
_LINK_ERRORS, _LINK_RECOVERY = (409, 419, 429), 439
RISING = (_REPLAYS, _POWER_CAP, _THERMAL, *_LINK_ERRORS, _LINK_RECOVERY)
"""Counters of which the rise within the last minute counts."""
READ = (*RISING, _POWER, _INFOROM, _DOUBLE_BIT, _RETIRE_PENDING, _REMAP_FAILED, _REMAP_PENDING)
"""All fields that are judged."""

DEVASTATING = frozenset({48, 62, 74, 79, 95, 119, 120})
"""Xid codes after which the card must be reset or replaced."""


class Result(IntEnum):
    PASS = 0
    WARN = 10
    FAIL = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One watch's state."""

    watch: str
    result: Result = Result.PASS
    code: str = "DCGM_FR_OK"


def judge(fields: Mapping[int, Reading], rises: Mapping[int, float], xids: set[int]) -> Iterator[Finding]:
    """One finding for each watch that can be judged. `rises`: counter → by how much within a minute."""
    for watch, checks in _CHECKS.items():
        known = [check for check in checks if check.field in (rises if check.rising else fields)]
        if not known:
            continue
        values = [(check, _number((rises if check.rising else fields)[check.field])) for check in known]
        bad = [check for check, value in values if value is not None and check.is_bad(value)]
        worst = max(bad, key=lambda check: check.result, default=None)
        yield Finding(watch) if worst is None else Finding(watch, worst.result, worst.code)
    if DEVASTATING & xids:
        yield Finding("ALL", Result.FAIL, "DCGM_FR_XID_ERROR")
    else:
        yield Finding("ALL")


@dataclass(frozen=True, slots=True)
class _Check:
    field: int
    result: Result
    code: str
    rising: bool = False
    is_bad: Callable[[float], bool] = lambda value: value > 0


_CHECKS: Mapping[str, tuple[_Check, ...]] = {
    "PCIE": (
        _Check(
            _REPLAYS, Result.WARN, "DCGM_FR_PCI_REPLAY_RATE", rising=True, is_bad=lambda n: n > MOST_REPLAYS
        ),
    ),
    "NVLINK": (
        *(_Check(n, Result.WARN, "DCGM_FR_NVLINK_ERROR_THRESHOLD", rising=True) for n in _LINK_ERRORS),
        _Check(_LINK_RECOVERY, Result.FAIL, "DCGM_FR_NVLINK_ERROR_CRITICAL", rising=True),
    ),
    "MEM": (
        _Check(_DOUBLE_BIT, Result.FAIL, "DCGM_FR_VOLATILE_DBE_DETECTED"),
        _Check(_REMAP_FAILED, Result.FAIL, "DCGM_FR_ROW_REMAP_FAILURE"),
        _Check(_REMAP_PENDING, Result.WARN, "DCGM_FR_PENDING_ROW_REMAP"),
        _Check(_RETIRE_PENDING, Result.WARN, "DCGM_FR_PENDING_PAGE_RETIREMENTS"),
    ),
    "INFOROM": (_Check(_INFOROM, Result.WARN, "DCGM_FR_CORRUPT_INFOROM", is_bad=lambda valid: not valid),),
    "THERMAL": (_Check(_THERMAL, Result.WARN, "DCGM_FR_CLOCKS_EVENT_THERMAL", rising=True),),
    "POWER": (_Check(_POWER_CAP, Result.WARN, "DCGM_FR_CLOCKS_EVENT_POWER", rising=True),),
}


def _number(value: Reading) -> float | None:
    return None if isinstance(value, str) else value


class Rises:
    """By how much counters of each card rose within the last minute."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], deque[tuple[float, float]]] = defaultdict(deque)

    def add(self, uuid: str, fields: Mapping[int, Reading], now_s: float) -> None:
        for number in RISING:
            value = _number(fields.get(number, ""))
            if value is None:
                continue
            seen = self._seen[uuid, number]
            if seen and value < seen[-1][1]:  # the driver was loaded anew
                seen.clear()
            seen.append((now_s, value))
            while len(seen) > 1 and seen[1][0] <= now_s - WINDOW_S:
                seen.popleft()

    def by_card(self) -> dict[str, dict[int, float]]:
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for (uuid, number), seen in self._seen.items():
            found[uuid][number] = seen[-1][1] - seen[0][1]
        return found
