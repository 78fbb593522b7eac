"""One DCGM field from one NVML call: the table of what a card is asked for call by call.

Keys are DCGM field ids. Values come in DCGM's units, which are not base units: MHz, W, mJ, MiB, percent.
Source of the conversions: DCGM's cache manager, version 4.6. A field that is missing here may still have an
NVML field value (``NVML_FI_*``), all of which `telemetry` asks for at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from gpuslice.core.units import MIB

T = TypeVar("T")
Reading = float | str
Read = Callable[[Any], Reading | None]

_MILLI = 1e-3
_HOTTEST_C = 200  # a missing sensor reads 255 or more


def _power_limit(which: int) -> Read:
    return lambda card: pynvml.nvmlDeviceGetPowerManagementLimitConstraints(card)[which] * _MILLI


def _clock(kind: int) -> Read:
    return lambda card: float(pynvml.nvmlDeviceGetClockInfo(card, kind))


def threshold(kind: int) -> Read:
    """A temperature in degrees Celsius."""
    return lambda card: float(pynvml.nvmlDeviceGetTemperatureThreshold(card, kind))


def _ecc(error: int, counter: int) -> Read:
    return lambda card: float(pynvml.nvmlDeviceGetTotalEccErrors(card, error, counter))


def _retired(cause: int) -> Read:
    return lambda card: float(len(pynvml.nvmlDeviceGetRetiredPages(card, cause)))


def _remapped(which: int) -> Read:
    return lambda card: float(pynvml.nvmlDeviceGetRemappedRows(card)[which])


def _bar1(part: str) -> Read:
    return lambda card: float(int(getattr(pynvml.nvmlDeviceGetBAR1MemoryInfo(card), part)) // MIB)


def _inforom(kind: int) -> Read:
    return lambda card: text(pynvml.nvmlDeviceGetInforomVersion(card, kind))


def memory_info(card: Any) -> Any:
    """Memory of a card; the second version, new drivers only, also tells what the driver reserves."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(card, version=pynvml.nvmlMemory_v2)
    except (pynvml.NVMLError, AttributeError):
        return pynvml.nvmlDeviceGetMemoryInfo(card)


def own_memory_info(card: Any) -> Any | None:
    """Like `memory_info`; None for a card without memory of its own, such as GB10's and Jetson's."""
    try:
        return memory_info(card)
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        return None


def text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def optional(read: Callable[[], T], fallback: T) -> T:
    """What a card may be unable to tell without being lost. Raises NVMLError if it is lost."""
    try:
        return read()
    except (pynvml.NVMLError, AttributeError) as error:
        raise_if_lost(error)
        return fallback


def is_final(error: Exception) -> bool:
    """Whether the driver will repeat this answer: the card has no such figure, or we may not see it."""
    final = (
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    )
    return not isinstance(error, pynvml.NVMLError) or error.value in final


def raise_if_lost(error: Exception) -> None:
    """Raises `error` again if it means that the card, or the driver, is gone."""
    lost = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_RESET_REQUIRED)
    if isinstance(error, pynvml.NVMLError) and error.value in lost:
        raise error


def _temperature(card: Any) -> Reading | None:
    celsius = float(pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU))
    return celsius if celsius <= _HOTTEST_C else None


def of_memory(memory: Any) -> dict[int, Reading]:
    """The fields that one memory reading gives; only newer drivers tell what they reserve."""
    total, used, reserved = int(memory.total), int(memory.used), getattr(memory, "reserved", None)
    usable = total - int(reserved or 0)
    parts = {250: total, 251: int(memory.free), 252: used, 253: reserved}
    found: dict[int, Reading] = {n: float(int(part) // MIB) for n, part in parts.items() if part is not None}
    return found | ({254: used / usable} if usable > 0 else {})


def of_utilization(card: Any) -> dict[int, Reading]:
    """Both fields from one call."""
    rates = pynvml.nvmlDeviceGetUtilizationRates(card)
    return {203: float(rates.gpu), 204: float(rates.memory)}


MEMORY_FIELDS = frozenset({250, 251, 252, 253, 254})
UTILIZATION_FIELDS = frozenset({203, 204})


def _clock_events(card: Any) -> Reading | None:
    try:
        return float(pynvml.nvmlDeviceGetCurrentClocksEventReasons(card))
    except (pynvml.NVMLError, AttributeError):
        return float(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))


def _inforom_valid(card: Any) -> Reading | None:
    try:
        pynvml.nvmlDeviceValidateInforom(card)
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_CORRUPTED_INFOROM:
            raise
        return 0.0
    return 1.0


def _licensed(card: Any) -> Reading | None:
    licensable = pynvml.nvmlDeviceGetGridLicensableFeatures(card)
    states = [bool(feature.featureState) for feature in licensable.gridLicensableFeatures]
    return float(any(states)) if states else None


READERS: dict[int, Read] = {
    1: lambda card: text(pynvml.nvmlSystemGetDriverVersion()),
    2: lambda card: text(pynvml.nvmlSystemGetNVMLVersion()),
    4: lambda card: float(pynvml.nvmlDeviceGetCount()),
    50: lambda card: text(pynvml.nvmlDeviceGetName(card)),
    51: lambda card: str(pynvml.nvmlDeviceGetBrand(card)),
    53: lambda card: text(pynvml.nvmlDeviceGetSerial(card)),
    54: lambda card: text(pynvml.nvmlDeviceGetUUID(card)),
    55: lambda card: float(pynvml.nvmlDeviceGetMinorNumber(card)),
    56: _inforom(getattr(pynvml, "NVML_INFOROM_OEM", 0)),
    57: lambda card: text(pynvml.nvmlDeviceGetPciInfo(card).busId),
    80: _inforom(getattr(pynvml, "NVML_INFOROM_ECC", 1)),
    81: _inforom(getattr(pynvml, "NVML_INFOROM_POWER", 2)),
    82: lambda card: text(pynvml.nvmlDeviceGetInforomImageVersion(card)),
    84: _inforom_valid,
    85: lambda card: text(pynvml.nvmlDeviceGetVbiosVersion(card)),
    90: _bar1("bar1Total"),
    92: _bar1("bar1Used"),
    93: _bar1("bar1Free"),
    100: _clock(pynvml.NVML_CLOCK_SM),
    101: _clock(pynvml.NVML_CLOCK_MEM),
    102: _clock(pynvml.NVML_CLOCK_VIDEO),
    110: lambda card: float(pynvml.nvmlDeviceGetApplicationsClock(card, pynvml.NVML_CLOCK_SM)),
    111: lambda card: float(pynvml.nvmlDeviceGetApplicationsClock(card, pynvml.NVML_CLOCK_MEM)),
    112: _clock_events,
    150: _temperature,
    155: lambda card: pynvml.nvmlDeviceGetPowerUsage(card) * _MILLI,
    156: lambda card: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(card)),
    158: threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
    159: threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
    160: lambda card: pynvml.nvmlDeviceGetPowerManagementLimit(card) * _MILLI,
    161: _power_limit(0),
    162: _power_limit(1),
    163: lambda card: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(card) * _MILLI,
    164: lambda card: pynvml.nvmlDeviceGetEnforcedPowerLimit(card) * _MILLI,
    190: lambda card: float(pynvml.nvmlDeviceGetPerformanceState(card)),
    191: lambda card: float(pynvml.nvmlDeviceGetFanSpeed(card)),
    202: lambda card: float(pynvml.nvmlDeviceGetPcieReplayCounter(card)),
    206: lambda card: float(pynvml.nvmlDeviceGetEncoderUtilization(card)[0]),
    207: lambda card: float(pynvml.nvmlDeviceGetDecoderUtilization(card)[0]),
    235: lambda card: float(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(card)),
    236: lambda card: float(pynvml.nvmlDeviceGetMaxPcieLinkWidth(card)),
    237: lambda card: float(pynvml.nvmlDeviceGetCurrPcieLinkGeneration(card)),
    238: lambda card: float(pynvml.nvmlDeviceGetCurrPcieLinkWidth(card)),
    310: _ecc(pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC),
    311: _ecc(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
    312: _ecc(pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_AGGREGATE_ECC),
    313: _ecc(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_AGGREGATE_ECC),
    390: _retired(pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS),
    391: _retired(pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR),
    392: lambda card: float(pynvml.nvmlDeviceGetRetiredPagesPendingStatus(card)),
    393: _remapped(1),
    394: _remapped(0),
    395: _remapped(3),
    396: _remapped(2),
    526: _licensed,
}
