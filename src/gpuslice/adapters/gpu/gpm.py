"""Hardware counters through NVML's GPM (Hopper and later): DCGM's ``DCGM_FI_PROF_*`` without DCGM.

A figure is an average between two samples, so the first reading of a card has none. One call reads all
metrics of a card. The metric ids come from nvml.h, ``nvmlGpmMetricId_t``; which DCGM field each belongs to
from DCGM 4.6's own table.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from struct import Struct
from typing import Any

import pynvml

from gpuslice.core.units import MIB

_PERCENT = 0.01
_GPM: dict[int, tuple[int, float]] = {
    1001: (1, _PERCENT),  # graphics engine active
    1002: (2, _PERCENT),  # SM active
    1003: (3, _PERCENT),  # SM occupancy
    1004: (5, _PERCENT),  # any tensor pipe
    1005: (10, _PERCENT),  # DRAM bandwidth
    1006: (11, _PERCENT),  # FP64
    1007: (12, _PERCENT),  # FP32
    1008: (13, _PERCENT),  # FP16
    1009: (20, MIB),  # PCIe sent, MiB/s
    1010: (21, MIB),  # PCIe received
    1011: (61, MIB),  # NVLink sent
    1012: (60, MIB),  # NVLink received
    1013: (9, _PERCENT),  # integer tensor
    1014: (7, _PERCENT),  # half tensor
    1015: (6, _PERCENT),  # double tensor
    1016: (4, _PERCENT),  # integer
    **{1017 + engine: (30 + engine, _PERCENT) for engine in range(8)},  # NVDEC
    **{1025 + engine: (40 + engine, _PERCENT) for engine in range(8)},  # NVJPG
    **{1033 + engine: (50 + engine, _PERCENT) for engine in range(2)},  # NVOFA
    1076: (100, MIB),  # chip to chip sent
    1077: (102, MIB),  # of which payload
    1078: (101, MIB),  # received
    1079: (103, MIB),
    **{1040 + 2 * link: (63 + 2 * link, MIB) for link in range(18)},  # NVLink n sent
    **{1041 + 2 * link: (62 + 2 * link, MIB) for link in range(18)},  # NVLink n received
    **{1080 + part: (160 + part, 1) for part in range(4)},  # hits and misses of caches, percent
    **{1084 + counter: (248 + counter, 1) for counter in range(13)},  # cycles and bytes since the start
}

PROFILING_FIELDS = frozenset(_GPM)
TOTALS: Mapping[int, int] = {-1009: 1009, -1010: 1010}
"""Bytes over PCIe since the reader was made, summed from the field's rates. NVML's own counters
(``NVML_FI_DEV_PCIE_COUNT_TX_BYTES``) wrap around after 4 GiB, which a card moves in a tenth of a second."""
_FIRST_METRICS = 98
RECENT_FIELDS = frozenset(field for field, (metric, _) in _GPM.items() if metric >= _FIRST_METRICS)
"""Metrics that the first drivers with GPM do not know. They are asked for separately, in case such a driver
refuses the whole request. They exist for whole cards only, never for an instance.
"""
_CANNOT = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT})
_METRIC = Struct("@Iid24x")  # number, result and value of each metric in the request: c_nvmlGpmMetric_t


def supported(card: Any) -> bool:
    """Whether the card has these counters and this driver can read them."""
    try:
        return bool(pynvml.nvmlGpmQueryDeviceSupport(card).isSupportedDevice)
    except (pynvml.NVMLError, AttributeError):
        return False


class GpmReader:
    """Two samples of one card, or of one of its GPU instances, used in turn.

    Raises NVMLError when the counters may not be read.
    """

    def __init__(self, card: Any, gpu_instance: int | None = None) -> None:
        self._card = card
        self._gpu_instance = gpu_instance
        self._older, self._newer = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        self._at_s = math.nan  # when the newer sample was taken, monotonic
        self._sums = dict.fromkeys(TOTALS, 0.0)
        self._fields: list[int] = []
        self._request: Any = None  # a request for the fields of the last reading
        self.without: Mapping[int, str] = {}  # fields of the last reading that this card cannot give, and why

    def read(self, fields: list[int]) -> dict[int, float]:
        """DCGM field id → value since the last call, of `TOTALS` since the first; empty at the first."""
        self._older, self._newer = self._newer, self._older
        began_s = time.monotonic()
        if self._gpu_instance is None:
            pynvml.nvmlGpmSampleGet(self._card, self._newer)
        else:
            pynvml.nvmlGpmMigSampleGet(self._card, self._gpu_instance, self._newer)
        at_s = (began_s + time.monotonic()) / 2
        since_s, self._at_s = at_s - self._at_s, at_s
        if math.isnan(since_s):
            return {}
        if fields != self._fields:
            self._fields, self._request = list(fields), pynvml.c_nvmlGpmMetricsGet_t()
            self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
            self._request.numMetrics = len(fields)
            for place, field in enumerate(fields):
                self._request.metrics[place].metricId = _GPM[TOTALS.get(field, field)][0]
        request = self._request
        request.sample1, request.sample2 = self._older, self._newer
        pynvml.nvmlGpmMetricsGet(request)
        start = pynvml.c_nvmlGpmMetricsGet_t.metrics.offset
        room = slice(start, start + _METRIC.size * len(self._fields))
        metrics = _METRIC.iter_unpack(memoryview(request).cast("B")[room])
        answers = dict(zip(self._fields, metrics, strict=True))
        self.without = {
            field: str(pynvml.NVMLError(verdict))
            for field, (_, verdict, _) in answers.items()
            if verdict in _CANNOT
        }
        found = {
            field: value * _GPM[TOTALS.get(field, field)][1]
            for field, (_, verdict, value) in answers.items()
            if verdict == pynvml.NVML_SUCCESS and not math.isnan(value)
        }
        for field in TOTALS.keys() & found.keys():
            self._sums[field] += found[field] * since_s
            found[field] = self._sums[field]
        return found

    def close(self) -> None:
        """Free the samples. Never raises: the card may be gone."""
        for sample in (self._older, self._newer):
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(sample)
