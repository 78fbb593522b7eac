"""Cards as reported by NVML, through NVIDIA's own binding.

NVML's calls block and may hang together with the driver, so they run in two threads: one asks questions, the
other waits for events. A card that fails alone is reported as lost; the others stay readable.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import AsyncGenerator, Callable
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from gpuslice.adapters.gpu.memory_limits import MemoryLimits, read_limits, write_limits
from gpuslice.adapters.gpu.processes import ProcessReader
from gpuslice.adapters.gpu.readings import optional, text
from gpuslice.adapters.gpu.source import (
    DriverCard,
    GpuUnavailableError,
    Inventory,
    LostCard,
    PairLink,
    XidEvent,
)
from gpuslice.adapters.gpu.worker import BlockingWorker
from gpuslice.core.attribution import ProcessReading
from gpuslice.core.card_links import Link
from gpuslice.core.errors import GpusliceError
from gpuslice.core.units import MIB

T = TypeVar("T")

EVENT_WAIT_MS = 1000


class NvmlSource:
    """`GpuSource` over ``libnvidia-ml.so.1``; `library` names the file if the loader would not find it."""

    def __init__(self, *, library: str = "", timeout_s: float = 10.0) -> None:
        self._driver = _Driver(library)
        self._timeout_s = timeout_s
        self._questions = BlockingWorker("NVML")
        self._waiting = BlockingWorker("NVML events")

    async def inventory(self) -> Inventory:
        return await self._questions.call(_translated(self._driver.inventory), self._timeout_s)

    async def processes(self) -> tuple[ProcessReading, ...]:
        return await self._questions.call(_translated(self._driver.processes), self._timeout_s)

    async def free_bytes(self, uuid: str) -> int:
        return await self._questions.call(_translated(lambda: self._driver.free_bytes(uuid)), self._timeout_s)

    async def events(self) -> AsyncGenerator[XidEvent]:
        """Xid errors of all cards that can report them; none is lost between two calls."""
        events = await self._questions.call(_translated(self._driver.subscribe), self._timeout_s)
        wait = _translated(lambda: self._driver.wait(events))
        try:
            while self._driver.follows(events):
                event = await self._waiting.call(wait, EVENT_WAIT_MS / 1000 + self._timeout_s)
                if event is not None:
                    yield event
        finally:
            with contextlib.suppress(GpuUnavailableError):
                await self._waiting.call(_translated(lambda: self._driver.unsubscribe(events)), 3.0)

    async def memory_limits(self, uuid: str, cgroup: Path) -> MemoryLimits:
        """As `MemoryLimiter`."""
        return await self._questions.call(
            _translated(lambda: self._driver.ask(lambda: read_limits(uuid, cgroup))), self._timeout_s
        )

    async def set_memory_limits(self, uuid: str, cgroup: Path, limits: MemoryLimits) -> None:
        """As `MemoryLimiter`."""
        await self._questions.call(
            _translated(lambda: self._driver.ask(lambda: write_limits(uuid, cgroup, limits))), self._timeout_s
        )

    async def close(self) -> None:
        with contextlib.suppress(GpuUnavailableError):
            await self._questions.call(_translated(self._driver.close), 3.0)


def _translated(function: Callable[[], T]) -> Callable[[], T]:
    def call() -> T:
        try:
            return function()
        except pynvml.NVMLError as error:
            raise GpuUnavailableError(f"NVML: {error}") from error

    return call


class DriverReplacedError(GpusliceError):
    """The NVML library in this process is that of an earlier driver; only a new process can load another."""


class Nvml:
    """NVML, open or not. It enumerates the cards when its first user in a process opens it, and not again
    before the last one has closed it. `library` names the file if the loader would not find it."""

    def __init__(self, library: str = "") -> None:
        self._library = library
        self._is_open = self._was_open = False

    def open(self) -> None:
        """Does nothing if it is open. Raises `GpuUnavailableError` if the library cannot be loaded,
        `DriverReplacedError`, else NVML's own errors."""
        if self._is_open:
            return
        if self._library:
            # The binding opens the library by its soname, which finds a library that is already loaded.
            try:
                ctypes.CDLL(self._library, mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise GpuUnavailableError(f"NVML library {self._library}: {error}") from error
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            if self._was_open and error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
                sentence = "the driver was replaced, and this process still has the earlier one's NVML"
                raise DriverReplacedError(f"{sentence} ({error}): it must be started again") from error
            raise
        self._is_open = self._was_open = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()


class _Driver:
    """The blocking side. Opened at the first question, and again after the driver itself failed."""

    def __init__(self, library: str) -> None:
        self._nvml = Nvml(library)
        self._events: Any = None  # the event set that is followed
        self._waits = threading.Lock()  # held while NVML waits for an event, so that it is not closed
        self._processes: dict[str, ProcessReader] = {}  # by uuid
        self._links: dict[tuple[str, str], Link] = {}  # by two uuids
        self._uuids: dict[int, str] = {}  # by handle: an event of a dead card can still be attributed

    def inventory(self) -> Inventory:
        self._nvml.open()
        try:
            count = pynvml.nvmlDeviceGetCount()
            version = text(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError:
            self.close()  # e.g. after the driver was reloaded: initialise again next time
            raise
        found = [self._read(position) for position in range(count)]
        cards = sorted((one for one in found if isinstance(one, DriverCard)), key=lambda card: card.index)
        lost = tuple(one for one in found if isinstance(one, LostCard))
        for (first, one), (second, other) in combinations(enumerate(found), 2):
            if isinstance(one, LostCard) or isinstance(other, LostCard):
                continue
            pair = min(one.uuid, other.uuid), max(one.uuid, other.uuid)
            if pair not in self._links:  # asked once: no card moves while the driver is loaded
                with contextlib.suppress(pynvml.NVMLError):
                    self._links[pair] = _link_between(first, second)
        here = {card.uuid for card in cards}
        links = tuple(PairLink(*pair, link) for pair, link in self._links.items() if here.issuperset(pair))
        return Inventory(tuple(cards), lost, version, links)

    def processes(self) -> tuple[ProcessReading, ...]:
        self._nvml.open()
        found: list[ProcessReading] = []
        for position in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # lost, or it cannot tell
                handle = pynvml.nvmlDeviceGetHandleByIndex(position)
                uuid = text(pynvml.nvmlDeviceGetUUID(handle))
                if uuid not in self._processes:
                    self._processes[uuid] = ProcessReader(handle, uuid)
                found += self._processes[uuid].read(time.monotonic())
        return tuple(found)

    def free_bytes(self, uuid: str) -> int:
        self._nvml.open()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).free)

    def ask(self, question: Callable[[], T]) -> T:
        self._nvml.open()
        return question()

    def subscribe(self) -> Any:
        """An event set with every card in it that can report Xid errors."""
        self.inventory()  # fills in the handles
        events = pynvml.nvmlEventSetCreate()
        for position in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # lost, or too old to report
                handle = pynvml.nvmlDeviceGetHandleByIndex(position)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
        self._events = events
        return events

    def follows(self, events: Any) -> bool:
        """Whether NVML has not been closed since."""
        return events is self._events

    def wait(self, events: Any) -> XidEvent | None:
        with self._waits:
            if not self.follows(events):
                return None
            try:
                data = pynvml.nvmlEventSetWait_v2(events, EVENT_WAIT_MS)
            except pynvml.NVMLError as error:
                if error.value == pynvml.NVML_ERROR_TIMEOUT:
                    return None
                raise
        if data.eventType != pynvml.nvmlEventTypeXidCriticalError:
            return None
        address = _address(data.device)
        uuid = self._uuids.get(address, "")
        if address and not uuid:
            with contextlib.suppress(pynvml.NVMLError):
                uuid = text(pynvml.nvmlDeviceGetUUID(data.device))
        return XidEvent(int(data.eventData), uuid)

    def unsubscribe(self, events: Any) -> None:
        with self._waits:
            if self.follows(events):
                self._events = None
                pynvml.nvmlEventSetFree(events)

    def close(self) -> None:
        if not self._waits.acquire(timeout=2 * EVENT_WAIT_MS / 1000):
            return  # the wait hangs, and NVML must not be closed under it
        try:
            if self._events is not None:
                events, self._events = self._events, None
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlEventSetFree(events)
            self._processes.clear()
            self._links.clear()
            self._nvml.close()
        finally:
            self._waits.release()

    def _read(self, position: int) -> DriverCard | LostCard:
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(position)
            card = DriverCard(
                index=optional(lambda: int(pynvml.nvmlDeviceGetMinorNumber(handle)), position),
                uuid=text(pynvml.nvmlDeviceGetUUID(handle)),
                memory_mib=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // MIB,
                model=optional(lambda: text(pynvml.nvmlDeviceGetName(handle)), ""),
                pci_bus_id=optional(lambda: text(pynvml.nvmlDeviceGetPciInfo(handle).busId), ""),
                divided=optional(lambda: bool(pynvml.nvmlDeviceGetMigMode(handle)[0]), fallback=False),
            )
        except pynvml.NVMLError as error:
            return LostCard(position, str(error))
        self._uuids[_address(handle)] = card.uuid
        return card


def _link_between(first: int, second: int) -> Link:
    """The link between two cards, by their places in the driver's enumeration. Raises `pynvml.NVMLError`."""
    one, other = pynvml.nvmlDeviceGetHandleByIndex(first), pynvml.nvmlDeviceGetHandleByIndex(second)
    over_nvlink = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
    with contextlib.suppress(pynvml.NVMLError):  # the PCI bus is reported even if NVLink is missing
        if pynvml.nvmlDeviceGetP2PStatus(one, other, over_nvlink) == pynvml.NVML_P2P_STATUS_OK:
            return Link.NVLINK
    level = pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    if level <= pynvml.NVML_TOPOLOGY_MULTIPLE:
        return Link.SWITCH
    return Link.NUMA if level <= pynvml.NVML_TOPOLOGY_NODE else Link.SYSTEM


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
