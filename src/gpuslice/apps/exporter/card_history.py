"""Recent events on each card, and DCGM's health verdict derived from them.

Xid faults are counted for ever; reasons for reduced clocks and increases of counters within a window. The
verdict is the part of DCGM's health watches that needs no host engine. Watches, results and error codes are
DCGM's. A watch without any reading is omitted, and so are always those for which NVML has nothing (PMU, MCU,
SM, DRIVER): DCGM itself shows a pass there. Sources: DCGM 4.6, its health monitor and the list of its error
codes; NVIDIA's Xid catalogue.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from gpuslice.adapters.gpu.readings import Reading

# Shown as 0 from the start, so that the first event of a code is an increase: faults of the card, of memory,
# of links and of the firmware, and those that an application causes.
KNOWN_XIDS = (13, 31, 43, 45, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120)
XIDS_KEPT = 1000
CLOCK_EVENTS = {
    0x1: "gpu_idle",
    0x2: "clocks_setting",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
WINDOW_S = 60.0
MOST_REPLAYS = 8  # PCIe replays within a minute that DCGM tolerates

_REPLAYS, _POWER, _POWER_CAP, _THERMAL = 202, 155, 240, 241
_INFOROM, _DOUBLE_BIT, _RETIRE_PENDING, _REMAP_FAILED, _REMAP_PENDING = 84, 311, 392, 395, 396
_LINK_ERRORS, _LINK_RECOVERY = (409, 419, 429), 439
RISING = (_REPLAYS, _POWER_CAP, _THERMAL, *_LINK_ERRORS, _LINK_RECOVERY)
"""Counters whose increase within the last minute matters."""
HEALTH_FIELDS = (*RISING, _POWER, _INFOROM, _DOUBLE_BIT, _RETIRE_PENDING, _REMAP_FAILED, _REMAP_PENDING)
"""All fields used for the verdict."""

DEVASTATING = frozenset({48, 62, 74, 79, 95, 119, 120})
"""Xid codes after which the card must be reset or replaced."""


@dataclass(frozen=True, slots=True)
class XidTally:
    """One code on one card. `last_s` is 0 before the first."""

    count: int
    last_s: float


class XidCounts:
    """Increases with each event; a card is identified by its uuid, "" if the driver did not name one."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[int]] = defaultdict(Counter)
        self._last_s: dict[tuple[str, int], float] = {}
        self._newest: dict[str, int] = {}
        self._events: deque[tuple[float, str, int]] = deque(maxlen=XIDS_KEPT)

    def add(self, uuid: str, xid: int, now_s: float) -> None:
        self._counts[uuid][xid] += 1
        self._last_s[uuid, xid] = now_s
        self._newest[uuid] = xid
        self._events.append((now_s, uuid, xid))

    def of(self, uuid: str) -> Mapping[int, XidTally]:
        """Every known code, and every one that occurred."""
        counts = self._counts[uuid]
        codes = sorted({*KNOWN_XIDS, *counts})
        return {xid: XidTally(counts[xid], self._last_s.get((uuid, xid), 0.0)) for xid in codes}

    def newest(self, uuid: str) -> int:
        """The last code, 0 if there was none."""
        return self._newest.get(uuid, 0)

    def within(self, uuid: str, since_s: float) -> Mapping[int, int]:
        """Codes that occurred after `since_s`, with their counts."""
        return Counter(xid for when_s, card, xid in self._events if card == uuid and when_s > since_s)


class ClockEvents:
    """Reasons for reduced clocks: in how many recent samples each appeared, and how often it began.

    These are DCGM_EXP_CLOCK_EVENTS_COUNT and, since dcgm-exporter 4.8.3, DCGM_EXP_CLOCK_EVENTS_TOTAL.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: dict[str, deque[tuple[float, int]]] = defaultdict(deque)
        self._begun: dict[str, Counter[str]] = defaultdict(Counter)

    def add(self, uuid: str, bits: int, taken_at_s: float) -> None:
        """What a sample showed; the same sample is counted once."""
        seen = self._seen[uuid]
        if not seen or seen[-1][0] != taken_at_s:
            before = seen[-1][1] if seen else bits  # a reason in the first sample began before it
            self._begun[uuid].update(_reasons(bits & ~before))
            seen.append((taken_at_s, bits))
        while seen[0][0] < taken_at_s - self._window_s:
            seen.popleft()

    def counts(self, uuid: str) -> Mapping[str, int] | None:
        """Reason → samples, without reasons that never appeared; None if the card does not report them."""
        if uuid not in self._seen:
            return None
        return Counter(name for _, bits in self._seen[uuid] for name in _reasons(bits))

    def begun(self, uuid: str) -> Mapping[str, int] | None:
        """Reason → how often it began since the first sample; None if the card does not report them."""
        if uuid not in self._seen:
            return None
        return {name: self._begun[uuid][name] for name in CLOCK_EVENTS.values()}


def _reasons(bits: int) -> Iterator[str]:
    return (name for bit, name in CLOCK_EVENTS.items() if bits & bit)


class CounterRises:
    """How much counters of each card increased within the last minute."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[int, deque[tuple[float, float]]]] = defaultdict(dict)

    def add(self, uuid: str, fields: Mapping[int, Reading], now_s: float) -> None:
        for number in RISING:
            value = fields.get(number)
            if value is None or isinstance(value, str):
                continue
            seen = self._seen[uuid].setdefault(number, deque())
            if seen and value < seen[-1][1]:  # the driver was reloaded
                seen.clear()
            seen.append((now_s, value))
            while len(seen) > 1 and seen[1][0] <= now_s - WINDOW_S:
                seen.popleft()

    def of(self, uuid: str) -> Mapping[int, float]:
        """Field → increase; fields that the card does not report are left out."""
        return {number: seen[-1][1] - seen[0][1] for number, seen in self._seen.get(uuid, {}).items()}


class CardHistory:
    """All of these together, updated with samples and faults."""

    def __init__(self, clock_window_s: float) -> None:
        self.xids = XidCounts()
        self.clocks = ClockEvents(clock_window_s)
        self.rises = CounterRises()


# -- DCGM's verdict ------------------------------------------------------------------------------------------


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
    """One finding for each watch that can be judged. `rises`: counter → increase within a minute."""
    for watch, checks in _CHECKS.items():
        known = [check for check in checks if check.field in (rises if check.rising else fields)]
        if not known:
            continue
        values = [(check, (rises if check.rising else fields)[check.field]) for check in known]
        bad = [check for check, value in values if not isinstance(value, str) and check.is_bad(value)]
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
