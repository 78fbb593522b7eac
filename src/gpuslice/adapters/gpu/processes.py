"""Which processes are on a card: memory from the process lists, busy time from the utilisation samples.

This is asked every second for every card, so it does not use NVIDIA's wrappers: they ask twice, once for the
size, and build slow objects. Here the buffers are kept, and grow when a card has more to report.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from struct import Struct
from typing import Any, Protocol

import pynvml

from gpuslice.core.attribution import ProcessReading

_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)
_UTILIZATION = "nvmlDeviceGetProcessUtilization"
_FORMS = (("_v2", Struct("@I4xQII")), ("", Struct("@I4xQ")))
"""How an entry begins: pid, used bytes. Drivers before 450 have only the short form.

The second version and not the third, whose entries are the same: drivers 535.43 to 535.86 write longer ones
there.
"""
_SAMPLE = Struct("@I4xQIIII")  # pid, time in us, percents of SM, memory, encoder, decoder
_NOT_AVAILABLE = {0, 2**64 - 1}  # bytes, where unknown; some drivers write 0 inside PID namespaces
_ROOM = 64
_MOST_PERCENT = 100  # drivers are known to report garbage above it
HOLD_S = 2.5
_Busy = tuple[float, float, float, float]  # fractions of the time: SM, memory, encoder, decoder
_IDLE: _Busy = (0.0, 0.0, 0.0, 0.0)


class Array(Protocol):
    """A function of NVML that fills its caller's array. Raises NVMLError."""

    def read(self, card: Any, *more: Any) -> list[tuple[int, ...]]: ...


class ProcessReader:
    """Reads one card's processes; remembers how far the utilisation samples have been read.

    The driver answers "what since then" from its own buffer: asking from 0 each time would bring back what
    idle and dead processes did long ago. A driver takes a sample at most once a second (580 on an H100: every
    0.2 s), and only of processes that were busy: the last sample of a process counts for `HOLD_S`.

    Samples carry the time of day. If the clock was set back, or one sample is wrong, every process would look
    idle until the clock has caught up; therefore nobody asks from a time later than now. Samples from the
    future are then returned by every call, and each is counted once.
    """

    def __init__(
        self,
        card: Any,
        uuid: str,
        *,
        array: Callable[[str, Struct], Array] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        array = array or _Array
        self._card = card
        self._uuid = uuid
        self._seen_us = 0
        self._ahead: set[tuple[int, int]] = set()  # samples from the future already counted: pid, time
        self._held: dict[int, tuple[float, _Busy]] = {}  # pid → until when, what
        self._wall = wall
        self._lists = tuple(_List(name, array) for name in _LISTS)
        self._samples = array(_UTILIZATION, _SAMPLE)
        self._last: dict[int, ProcessReading] = {}  # a reading with the same content is the same object

    def read(self, now_s: float) -> list[ProcessReading]:
        """One reading for each process. A process without a sample is idle, if samples can be had at all."""
        memory = self.memory()
        has_samples = self._update(now_s)
        self._held = {pid: held for pid, held in self._held.items() if pid in memory and held[0] > now_s}
        readings: dict[int, ProcessReading] = {}
        for pid, used in memory.items():
            held, last = self._held.get(pid), self._last.get(pid)
            busy = (None, None, None, None) if not has_samples else _IDLE if held is None else held[1]
            if (
                last is not None
                and last.memory_bytes == used
                and (last.sm_ratio, last.memory_ratio, last.encoder_ratio, last.decoder_ratio) == busy
            ):
                readings[pid] = last
            else:
                readings[pid] = ProcessReading(pid, self._uuid, used, *busy)
        self._last = readings
        return list(readings.values())

    def memory(self) -> dict[int, int | None]:
        """A process may be in two lists with the same memory: the larger figure counts, not the sum."""
        found: dict[int, int | None] = {}
        refusals = []
        for each in self._lists:
            try:
                listed = each.read(self._card)
            except pynvml.NVMLError as error:
                refusals.append(error)
                continue
            for pid, bytes_used, *_ in listed:
                before, used = found.get(pid), None if bytes_used in _NOT_AVAILABLE else int(bytes_used)
                known = [amount for amount in (before, used) if amount is not None]
                found[pid] = max(known) if known else None
        if refusals and len(refusals) == len(self._lists):
            raise refusals[0]
        return found

    def _update(self, now_s: float) -> bool:
        """Take in new samples of how busy processes are; false where the card does not tell."""
        wall_us = int(self._wall() * 1e6)
        self._seen_us = min(self._seen_us, wall_us)
        try:
            samples = self._samples.read(self._card, ctypes.c_ulonglong(self._seen_us))
        except pynvml.NVMLError:
            return False
        ahead = {(pid, time_us) for pid, time_us, *_ in samples if time_us > wall_us}
        for pid, time_us, *percents in sorted(samples, key=lambda sample: sample[1]):
            if percents[0] <= _MOST_PERCENT and (pid, time_us) not in self._ahead:
                sm, memory, encoder, decoder = (min(percent, _MOST_PERCENT) / 100 for percent in percents)
                self._held[pid] = (now_s + HOLD_S, (sm, memory, encoder, decoder))
            self._seen_us = max(self._seen_us, min(time_us, wall_us))
        self._ahead = ahead
        return True


class _List:
    """A list of processes, in the newest form that this driver has."""

    def __init__(self, name: str, array: Callable[[str, Struct], Array]) -> None:
        self._forms = [array(name + suffix, entry) for suffix, entry in _FORMS]

    def read(self, card: Any) -> list[tuple[int, ...]]:
        while len(self._forms) > 1:
            try:
                return self._forms[0].read(card)
            except pynvml.NVMLError as error:
                if error.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                    raise
            self._forms.pop(0)
        return self._forms[0].read(card)


class _Array:
    """A function of NVML that fills an array of its caller's, together with that array."""

    def __init__(self, name: str, item: Struct) -> None:
        self._name = name
        self._item = item
        self._function: Callable[..., int] | None = None
        self._room = _ROOM
        self._buffer = ctypes.create_string_buffer(item.size * _ROOM)
        self._count = ctypes.c_uint()

    def read(self, card: Any, *more: Any) -> list[tuple[int, ...]]:
        """All items now. Raises NVMLError, also where this driver lacks the function."""
        if self._function is None:
            self._function = pynvml._nvmlGetFunctionPointer(self._name)
        while True:
            self._count.value = self._room
            count = ctypes.byref(self._count)  # lists take the count first, samples the array
            room = (self._buffer, count) if self._item is _SAMPLE else (count, self._buffer)
            result = self._function(card, *room, *more)
            if result == pynvml.NVML_SUCCESS:
                used = self._item.size * min(self._count.value, self._room)
                return list(self._item.iter_unpack(memoryview(self._buffer)[:used]))
            if result == pynvml.NVML_ERROR_NOT_FOUND:  # nothing new
                return []
            if result != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                raise pynvml.NVMLError(result)
            # room for what the driver named, and for processes that start before the next call
            self._room = max(self._count.value, self._room) * 2
            self._buffer = ctypes.create_string_buffer(self._item.size * self._room)
