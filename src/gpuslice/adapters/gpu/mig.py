"""MIG devices of a card: how much memory each has, and what its hardware counters say.

A MIG device is a compute instance of a GPU instance; its memory and its counters are the GPU instance's. NVML
reports what belongs to the card as a whole (power, temperature, clocks) for the card only, and reports no
utilisation at all while MIG is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pynvml

from gpuslice.adapters.gpu import gpm
from gpuslice.adapters.gpu.readings import Reading, memory_info, of_memory, text
from gpuslice.adapters.gpu.source import DriverCard, GpuUnavailableError

BUSY_FIELDS = (1001, 1002)
"""Always read: on a divided card nothing else tells how busy it is."""
LOOK_EVERY_S = 10.0
"""How soon a change of a card's partition is noticed: looking costs one call for each possible device."""


@dataclass(frozen=True, slots=True)
class MigSample:
    """One MIG device at one moment. `fields`: DCGM field id → value, the instance's own fields only."""

    uuid: str
    profile: str
    gpu_instance: int
    compute_instance: int
    total_bytes: int
    used_bytes: int
    fields: Mapping[int, Reading] = field(default_factory=dict)


@dataclass(slots=True)
class _Device:
    handle: Any
    uuid: str
    profile: str
    gpu_instance: int
    compute_instance: int


class MigReader:
    """Reads one card's MIG devices; a card without MIG costs one call every `LOOK_EVERY_S`."""

    def __init__(self, card: Any) -> None:
        self._card = card
        self._devices: list[_Device] = []
        self._look_due_s = 0.0
        self._counters: dict[int, gpm.GpmReader] = {}  # by GPU instance
        self.refused = ""  # why hardware counters of instances cannot be read; "" while they can
        self.without: dict[int, str] = {}  # counters that no instance can give, and why
        self.enabled = False

    def read(self, counters: list[int], now_s: float) -> tuple[MigSample, ...]:
        """Every MIG device. `counters`: the DCGM profiling fields wanted. Raises NVMLError."""
        if now_s >= self._look_due_s:
            self._look_due_s = now_s + LOOK_EVERY_S
            devices = _devices(self._card)
            self.enabled = devices is not None
            if [each.uuid for each in devices or []] != [each.uuid for each in self._devices]:
                self._forget_counters()
            self._devices = devices or []
        if not self._devices:
            return ()
        counted = self._count(sorted({*counters, *BUSY_FIELDS} - gpm.RECENT_FIELDS))
        samples = []
        for device in self._devices:
            memory = memory_info(device.handle)
            sample = MigSample(
                uuid=device.uuid,
                profile=device.profile,
                gpu_instance=device.gpu_instance,
                compute_instance=device.compute_instance,
                total_bytes=int(memory.total),
                used_bytes=int(memory.used),
                fields=of_memory(memory) | dict(counted.get(device.gpu_instance, {})),
            )
            samples.append(sample)
        return tuple(samples)

    def close(self) -> None:
        """Free the counters."""
        for reader in self._counters.values():
            reader.close()
        self._counters = {}

    def _count(self, counters: list[int]) -> dict[int, dict[int, float]]:
        """GPU instance → field → value; empty where this card has no such counters."""
        if not counters or self.refused:
            return {}
        try:
            if not self._counters and not gpm.supported(self._card):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            for instance in sorted({device.gpu_instance for device in self._devices} - self._counters.keys()):
                self._counters[instance] = gpm.GpmReader(self._card, instance)
            found = {instance: reader.read(counters) for instance, reader in self._counters.items()}
        except (pynvml.NVMLError, AttributeError) as error:
            self._forget_counters()
            self.refused = f"hardware counters: {error}"
            return {}
        given = {field for values in found.values() for field in values}
        reasons = {field: why for reader in self._counters.values() for field, why in reader.without.items()}
        self.without = {
            field: f"hardware counters: {why}" for field, why in reasons.items() if field not in given
        }
        return found

    def _forget_counters(self) -> None:
        self.close()
        self.refused, self.without = "", {}


def given_out(card: DriverCard) -> tuple[DriverCard, ...]:
    """What programs can be given: the card, or its MIG devices where it is divided. NVML must be open.

    Raises GpuUnavailableError.
    """
    try:
        devices = _devices(pynvml.nvmlDeviceGetHandleByUUID(card.uuid))
        if devices is None:
            return (card,)
        cards = []
        for device in devices:
            memory_mib = int(memory_info(device.handle).total) >> 20
            model = f"{card.model} MIG {device.profile}"
            cards.append(replace(card, uuid=device.uuid, memory_mib=memory_mib, model=model))
        return tuple(cards)
    except pynvml.NVMLError as error:
        raise GpuUnavailableError(f"card {card.uuid}: {error}") from error


def _devices(card: Any) -> list[_Device] | None:
    """The card's MIG devices; None where MIG is off or the card has no MIG."""
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(card)
        if current != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        most = int(pynvml.nvmlDeviceGetMaxMigDeviceCount(card))
    except (pynvml.NVMLError, AttributeError):
        return None
    found = []
    for place in range(most):
        try:
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, place)
        except pynvml.NVMLError:
            continue  # an index may be unused
        name = text(pynvml.nvmlDeviceGetName(handle))
        found.append(
            _Device(
                handle=handle,
                uuid=text(pynvml.nvmlDeviceGetUUID(handle)),
                profile=name.rpartition(" MIG ")[2] if " MIG " in name else "",
                gpu_instance=int(pynvml.nvmlDeviceGetGpuInstanceId(handle)),
                compute_instance=int(pynvml.nvmlDeviceGetComputeInstanceId(handle)),
            )
        )
    return found
