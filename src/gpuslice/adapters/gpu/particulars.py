"""Fields that few ask for and that hardly ever change: modes, identities, errors by place, spare rows.

Like `readings`: DCGM field id → one NVML call, in DCGM's units; all are read at the slow pace. Sources:
DCGM's cache manager, version 4.6; nvml.h.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from typing import Any

import pynvml

from gpuslice.adapters.gpu.readings import Read, Reading, threshold

_CORRECTED, _UNCORRECTED = 0, 1  # nvmlMemoryErrorType_t
_VOLATILE, _AGGREGATE = 0, 1  # nvmlEccCounterType_t
_L1, _L2, _DRAM, _REGISTERS, _TEXTURE, _SHARED, _CBU, _SRAM = range(8)  # nvmlMemoryLocation_t


def _ecc(error: int, counter: int, place: int) -> Read:
    return lambda card: float(pynvml.nvmlDeviceGetMemoryErrorCounter(card, error, counter, place))


_ECC_BLOCKS = (
    (314, _VOLATILE, (_L1, _L2, _DRAM, _REGISTERS, _TEXTURE)),
    (324, _AGGREGATE, (_L1, _L2, _DRAM, _REGISTERS, _TEXTURE)),
    (334, _VOLATILE, (_SHARED, _CBU)),
    (338, _AGGREGATE, (_SHARED, _CBU)),
    (342, _VOLATILE, (_SRAM,)),
    (344, _AGGREGATE, (_SRAM,)),
)
"""DCGM numbers them in blocks: by counter, then by place, corrected before uncorrected."""


def _most(kind: int) -> Read:
    return lambda card: float(pynvml.nvmlDeviceGetMaxClockInfo(card, kind))


def _spare_rows(part: str) -> Read:
    return lambda card: float(getattr(pynvml.nvmlDeviceGetRowRemapperHistogram(card), part))


def _capability(card: Any) -> Reading:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(card)
    return float(major << 16 | minor)


def _sram_exceeded(card: Any) -> Reading:
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    status.version = pynvml.nvmlEccSramErrorStatus_v1
    pynvml.nvmlDeviceGetSramEccErrorStatus(card, ctypes.byref(status))
    return float(status.bThresholdExceeded)


def _throughput(counter: int) -> Read:
    return lambda card: float(pynvml.nvmlDeviceGetPcieThroughput(card, counter))  # KB/s over 20 ms


def _fabric(tell: Callable[[Any], Reading]) -> Read:
    def read(card: Any) -> Reading:
        info = pynvml.c_nvmlGpuFabricInfo_v3_t()
        info.version = pynvml.nvmlGpuFabricInfo_v3
        pynvml.nvmlDeviceGetGpuFabricInfoV(card, ctypes.byref(info))
        return tell(info)

    return read


PARTICULARS: dict[int, Read] = {
    5: lambda card: float(pynvml.nvmlSystemGetCudaDriverVersion_v2()),
    52: lambda card: float(pynvml.nvmlDeviceGetIndex(card)),
    58: lambda card: float(pynvml.nvmlDeviceGetPciInfo(card).pciDeviceId),
    59: lambda card: float(pynvml.nvmlDeviceGetPciInfo(card).pciSubSystemId),
    63: _capability,
    65: lambda card: float(pynvml.nvmlDeviceGetComputeMode(card)),
    66: lambda card: float(pynvml.nvmlDeviceGetPersistenceMode(card)),
    67: lambda card: float(pynvml.nvmlDeviceGetMigMode(card)[0]),
    69: lambda card: float(pynvml.nvmlDeviceGetMaxMigDeviceCount(card)),
    94: lambda card: float(pynvml.nvmlGpmQueryDeviceSupport(card).isSupportedDevice),
    113: _most(pynvml.NVML_CLOCK_SM),
    114: _most(pynvml.NVML_CLOCK_MEM),
    115: _most(pynvml.NVML_CLOCK_VIDEO),
    120: lambda card: float(pynvml.nvmlDeviceGetAutoBoostedClocksEnabled(card)[0]),
    151: threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX),
    152: threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX),
    153: lambda card: float(pynvml.nvmlDeviceGetMarginTemperature(card)),
    170: _fabric(lambda info: float(info.state)),
    171: _fabric(lambda info: float(info.status)),
    172: _fabric(lambda info: str(uuid.UUID(bytes=bytes(info.clusterUuid)))),
    173: _fabric(lambda info: float(info.cliqueId)),
    174: _fabric(lambda info: float(info.healthMask)),
    175: _fabric(lambda info: float(info.healthSummary)),
    200: _throughput(pynvml.NVML_PCIE_UTIL_TX_BYTES),
    201: _throughput(pynvml.NVML_PCIE_UTIL_RX_BYTES),
    346: _sram_exceeded,
    385: _spare_rows("max"),
    386: _spare_rows("high"),
    387: _spare_rows("partial"),
    388: _spare_rows("low"),
    389: _spare_rows("none"),
    500: lambda card: float(pynvml.nvmlDeviceGetVirtualizationMode(card)),
    **{
        first + 2 * number + error: _ecc(error, counter, place)
        for first, counter, places in _ECC_BLOCKS
        for number, place in enumerate(places)
        for error in (_CORRECTED, _UNCORRECTED)
    },
}
