"""Limits of device memory that the driver itself enforces, by cgroup: R615 and later, cgroup v2, no MIG.

A limit belongs to a card and a cgroup, and counts whatever processes in it allocate, however they reach the
driver; not managed memory, which is the system's. With dmem, one of the driver's two ways to count, it is
added to every cgroup above: a soft limit that is not 0 when its cgroup goes stays there for good. So ours
are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pynvml

from gpuslice.core.errors import GpusliceError

FIRST_BRANCH = 615


class LimitRefusedError(GpusliceError):
    """The driver sets or reads no limits of this card and cgroup; `missing`: it does not count there."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Of one card for one cgroup, in bytes; `hard` None: none. `used` by all processes in it."""

    soft: int
    hard: int | None
    used: int = 0


class MemoryLimiter(Protocol):
    """Sets and reads limits. Each method raises `LimitRefusedError` and `GpuUnavailableError`."""

    async def memory_limits(self, uuid: str, cgroup: Path) -> MemoryLimits:
        """The limits in force for the cgroup; its own, or those that it inherits."""
        ...

    async def set_memory_limits(self, uuid: str, cgroup: Path, limits: MemoryLimits) -> None:
        """Set the cgroup's own. Root only."""
        ...


def read_limits(uuid: str, cgroup: Path) -> MemoryLimits:
    """Raises LimitRefusedError, and NVMLError if the card cannot be asked."""
    found = pynvml.c_nvmlGetMemoryLimits_v1_t(nameSpace=str(cgroup).encode())
    try:
        _call(pynvml.nvmlDeviceGetMemoryLimits_v1, uuid, cgroup, found)
    except LimitRefusedError as error:
        if error.missing and cgroup.is_dir():  # how R615 says that there is no limit on the way up
            return MemoryLimits(0, None)
        raise
    hard = None if found.hardLimit == pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX else int(found.hardLimit)
    return MemoryLimits(int(found.softLimit), hard, int(found.currentUsed))


def write_limits(uuid: str, cgroup: Path, limits: MemoryLimits) -> None:
    """Raises LimitRefusedError, and NVMLError if the card cannot be asked."""
    hard = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX if limits.hard is None else limits.hard
    wanted = pynvml.c_nvmlSetMemoryLimits_v1_t(
        nameSpace=str(cgroup).encode(), softLimit=limits.soft, hardLimit=hard
    )
    _call(pynvml.nvmlDeviceSetMemoryLimits_v1, uuid, cgroup, wanted)


def _call(function: Any, uuid: str, cgroup: Path, argument: Any) -> None:
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    try:
        function(handle, argument)
    except pynvml.NVMLError as error:
        missing = error.value in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NOT_SUPPORTED)
        refused = error.value in (
            pynvml.NVML_ERROR_NO_PERMISSION,
            pynvml.NVML_ERROR_INVALID_ARGUMENT,
            pynvml.NVML_ERROR_OPERATING_SYSTEM,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        )
        if missing or refused:
            raise LimitRefusedError(
                f"{function.__name__} of {uuid} for {cgroup}: {error}", missing=missing
            ) from error
        raise
