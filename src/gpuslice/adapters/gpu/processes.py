"""Which processes are on a card: memory from the process lists, busy time from the utilisation samples."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pynvml

from gpuslice.core.attribution import ProcessReading

_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)
_MOST_PERCENT = 100  # drivers are known to report garbage above
HOLD_S = 2.5
_Busy = tuple[float, float, float, float]  # parts of the time: SM, memory, encoder, decoder
_IDLE: _Busy = (0.0, 0.0, 0.0, 0.0)


class ProcessReader:
    """Reads one card's processes; remembers up to when the utilisation samples have been seen.

    The driver answers a question "since when" from its own buffer: asking from 0 each time would bring back
    what idle and dead processes did long ago. A driver makes a sample up to once a second, and only of
    processes that were busy: the last one of a process stands for `HOLD_S`.
    """

    def __init__(self, card: Any, uuid: str) -> None:
        self._card = card
        self._uuid = uuid
        self._seen_us = 0
        self._held: dict[int, tuple[float, _Busy]] = {}  # pid → until when, what

    def read(self, now_s: float) -> list[ProcessReading]:
        """One reading for each process. A process without a sample is idle if samples can be had at all."""
        memory = self._memory()
        if not self._update(now_s):
            return [ProcessReading(pid, self._uuid, used) for pid, used in memory.items()]
        self._held = {pid: held for pid, held in self._held.items() if pid in memory and held[0] > now_s}
        return [
            ProcessReading(pid, self._uuid, used, *self._held.get(pid, (0.0, _IDLE))[1])
            for pid, used in memory.items()
        ]

    def _memory(self) -> dict[int, int | None]:
        """A process may be in two lists with the same memory: the larger figure counts, not the sum."""
        found: dict[int, int | None] = {}
        for process in self._listed():
            before, used = found.get(process.pid), process.usedGpuMemory
            known = [amount for amount in (before, used) if amount is not None]
            found[int(process.pid)] = max(known) if known else None
        return found

    def _listed(self) -> Iterator[Any]:
        answered = 0
        error: pynvml.NVMLError | None = None
        for name in _LISTS:
            try:
                processes = getattr(pynvml, name)(self._card)
            except pynvml.NVMLError as refused:
                error = error or refused
                continue
            answered += 1
            yield from processes
        if not answered and error is not None:
            raise error

    def _update(self, now_s: float) -> bool:
        """Take in what is new of how busy processes are; false where the card does not tell."""
        try:
            samples = _utilization(self._card, self._seen_us)
        except (pynvml.NVMLError, AttributeError):
            return False
        for sample in sorted(samples, key=lambda sample: int(sample.timeStamp)):
            if sample.smUtil <= _MOST_PERCENT:
                self._held[int(sample.pid)] = (now_s + HOLD_S, _busy(sample))
        self._seen_us = max([self._seen_us, *(int(sample.timeStamp) for sample in samples)])
        return True


def _busy(sample: Any) -> _Busy:
    percents = (sample.smUtil, sample.memUtil, sample.encUtil, sample.decUtil)
    sm, memory, encoder, decoder = (min(int(percent), _MOST_PERCENT) / 100 for percent in percents)
    return sm, memory, encoder, decoder


def _utilization(card: Any, since_us: int) -> list[Any]:
    """Utilisation samples after `since_us`. Not NVIDIA's wrapper: it sizes the buffer exactly, so that a
    process which starts between its two calls makes it fail, and it raises when there is nothing new."""
    function = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetProcessUtilization")
    count = ctypes.c_uint(0)
    result = function(card, None, ctypes.byref(count), ctypes.c_ulonglong(since_us))
    if result in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND):
        return []
    if result != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
        pynvml._nvmlCheckReturn(result)
    room = count.value * 2 + 16
    samples = (pynvml.c_nvmlProcessUtilizationSample_t * room)()
    count = ctypes.c_uint(room)
    result = function(card, samples, ctypes.byref(count), ctypes.c_ulonglong(since_us))
    if result == pynvml.NVML_ERROR_NOT_FOUND:
        return []
    pynvml._nvmlCheckReturn(result)
    return list(samples[: count.value])
