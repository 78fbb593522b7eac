"""Everything an exporter wants to know about the cards, sampled in one pass over NVML.

What a card cannot give is asked for once and then not again for a while: some calls take milliseconds only to
fail. A card that fails alone leaves the others readable.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pynvml

from gpuslice.adapters.gpu import gpm
from gpuslice.adapters.gpu.mig import MigReader, MigSample
from gpuslice.adapters.gpu.nvml import Nvml
from gpuslice.adapters.gpu.particulars import PARTICULARS
from gpuslice.adapters.gpu.processes import ProcessReader
from gpuslice.adapters.gpu.readings import (
    MEMORY_FIELDS,
    READERS,
    UTILIZATION_FIELDS,
    Read,
    Reading,
    is_final,
    of_memory,
    of_utilization,
    optional,
    own_memory_info,
    raise_if_lost,
    text,
)
from gpuslice.adapters.gpu.source import GpuUnavailableError
from gpuslice.adapters.gpu.values import ALL_LINKS, RATES, FieldValues, LinkRates, field_id
from gpuslice.adapters.gpu.worker import BlockingWorker
from gpuslice.core.attribution import ProcessReading

RETRY_UNSUPPORTED_S = 600.0
RETRY_FAILED_S = 10.0
"""How long until a field is asked for again: one that the card cannot give, and one that failed just now."""
PEERS = -100_000
"""Wanted like a field: whether cards reach each other over NVLink (`NodeSample.peers`)."""
SLOW_EVERY_S = 10.0
SLOW_FIELDS = frozenset(
    {
        *(1, 2, 4, 50, 51, 53, 54, 55, 56, 57, 80, 81, 82, 85),  # what the card is
        *(110, 111, 158, 159, 160, 161, 162, 163, 164, 235, 236, 237, 238),  # what is set
        *PARTICULARS,
        *(84, 202, 310, 311, 312, 313, 390, 391, 392, 393, 394, 395, 396, 526),  # faults
    }
)

_CALLS: Mapping[int, Read] = {**READERS, **PARTICULARS}

# DCGM fields that are NVML field values although DCGM's own table does not say so: name and factor.
_FIELD_VALUES: dict[int, tuple[str, float]] = {
    140: ("NVML_FI_DEV_MEMORY_TEMP", 1.0),
    157: ("NVML_FI_DEV_POWER_INSTANT", 1e-3),
}
_TRIES = 3
_OVER_ALL_LINKS = frozenset(
    {"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX"}
)
_COUNTERS = {*gpm.PROFILING_FIELDS, *gpm.TOTALS}
_KNOWN_WAYS = {*RATES, *MEMORY_FIELDS, *UTILIZATION_FIELDS, *_CALLS, *_COUNTERS, *_FIELD_VALUES}


@dataclass(frozen=True, slots=True)
class CardSample:
    """One card at one moment. `fields`: DCGM field id → value in DCGM's unit; unknown fields are missing.

    `unsupported` are wanted fields that this card or driver cannot give, with the driver's reason. `mig`: its
    MIG devices, empty unless it is divided; `mig_enabled` is true even before a device has been made.
    """

    position: int
    index: int
    uuid: str
    model: str = ""
    pci_bus_id: str = ""
    total_bytes: int | None = None
    used_bytes: int | None = None
    reserved_bytes: int | None = None
    fields: Mapping[int, Reading] = field(default_factory=dict)
    processes: tuple[ProcessReading, ...] | None = None
    unsupported: Mapping[int, str] = field(default_factory=dict)
    mig: tuple[MigSample, ...] = ()
    mig_enabled: bool = False


@dataclass(frozen=True, slots=True)
class NodeSample:
    """All cards at one moment; `lost` names those that do not answer: position and reason.

    `peers`: pairs of card numbers → ``nvmlGpuP2PStatus_t`` over NVLink, 0 means they can; empty unless
    wanted.
    """

    cards: tuple[CardSample, ...]
    lost: tuple[tuple[int, str], ...] = ()
    driver_version: str = ""
    taken_at_s: float = 0.0  # monotonic
    took_s: float = 0.0
    peers: Mapping[tuple[int, int], int] = field(default_factory=dict)


class Telemetry(Protocol):
    """Samples a node's cards; bounded in time whatever the driver does."""

    async def sample(self, wanted: Mapping[int, str]) -> NodeSample:
        """`wanted`: DCGM field id → name of its NVML field value, "" where it has none.

        Raises `GpuUnavailableError` when the driver cannot be asked at all.
        """
        ...

    async def renew(self) -> None:
        """Close the driver; the next sample reopens it and counts its cards again."""
        ...


class NvmlTelemetry:
    """`Telemetry` over ``libnvidia-ml.so.1``."""

    def __init__(
        self, *, library: str = "", timeout_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml = Nvml(library)
        self._worker = BlockingWorker("NVML sampling")
        self._timeout_s = timeout_s
        self._clock = clock
        self._cards: dict[int, _Card] = {}
        self._peers: Mapping[tuple[int, int], int] = {}
        self._peers_due_s = 0.0

    async def sample(self, wanted: Mapping[int, str]) -> NodeSample:
        return await self._worker.call(lambda: self._sample(wanted), self._timeout_s)

    async def renew(self) -> None:
        with contextlib.suppress(GpuUnavailableError):  # a driver that hangs cannot be closed
            await self._worker.call(self._forget, self._timeout_s)

    def _sample(self, wanted: Mapping[int, str]) -> NodeSample:
        began = self._clock()
        try:
            self._nvml.open()
            count, version = int(pynvml.nvmlDeviceGetCount()), text(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError as error:
            self._forget()
            raise GpuUnavailableError(f"NVML: {error}") from error
        cards, lost = [], []
        of_cards = {number: name for number, name in wanted.items() if number != PEERS}
        for position in range(count):
            try:
                if position not in self._cards:
                    self._cards[position] = _Card(position)
                cards.append(self._cards[position].sample(of_cards, began))
            except pynvml.NVMLError as error:
                self._drop(position)
                lost.append((position, str(error)))
        if PEERS in wanted and began >= self._peers_due_s:  # as seldom as everything that hardly ever changes
            self._peers_due_s = began + SLOW_EVERY_S
            self._peers = {
                (one.index, other.index): status
                for one in self._cards.values()
                for other in self._cards.values()
                if one is not other and (status := one.reaches(other)) is not None
            }
        peers = self._peers if PEERS in wanted else {}
        return NodeSample(tuple(cards), tuple(lost), version, began, self._clock() - began, peers)

    def _drop(self, position: int) -> None:
        if (card := self._cards.pop(position, None)) is not None:
            card.close()

    def _forget(self) -> None:
        """After the driver failed as a whole: initialise again at the next call."""
        for position in list(self._cards):
            self._drop(position)
        self._nvml.close()


class _Card:
    """One card's handle and what is remembered from one sample of it to the next."""

    def __init__(self, position: int) -> None:
        self._position = position
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(position)
        self._uuid = text(pynvml.nvmlDeviceGetUUID(self._handle))
        self._index = optional(lambda: int(pynvml.nvmlDeviceGetMinorNumber(self._handle)), position)
        self._model = optional(lambda: text(pynvml.nvmlDeviceGetName(self._handle)), "")
        self._bus = optional(lambda: text(pynvml.nvmlDeviceGetPciInfo(self._handle).busId), "")
        self._processes = ProcessReader(self._handle, self._uuid)
        self._unsupported: dict[int, tuple[str, float]] = {}  # field → reason, when to ask again
        self._gpm: dict[str, gpm.GpmReader] = {}
        self._mig = MigReader(self._handle)
        self._links = LinkRates(self._handle)
        self._values = FieldValues(self._handle)
        self._slow: dict[int, Reading] = {}
        self._slow_for: set[int] = set()  # what was wanted at that reading
        self._slow_due_s = 0.0
        self._rest: int | None = None  # bytes that no process held at the last sample

    @property
    def index(self) -> int:
        return self._index

    def reaches(self, other: _Card) -> int | None:
        """NVML's word on NVLink between the two; None where it has none."""
        try:
            link = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
            return int(pynvml.nvmlDeviceGetP2PStatus(self._handle, other._handle, link))
        except (pynvml.NVMLError, AttributeError):
            return None

    def sample(self, wanted: Mapping[int, str], now_s: float) -> CardSample:
        memory, processes = self._memory_and_processes(now_s)  # a lost card fails here
        for number in [n for n, (_, until_s) in self._unsupported.items() if now_s >= until_s]:
            del self._unsupported[number]  # it is asked again now and then
        asked = [number for number in wanted if number not in self._unsupported]
        fields = self._at_once(asked, memory, now_s)
        fields |= self._slow_ones(wanted, asked, now_s)
        fields |= self._by_call([n for n in asked if n in _CALLS and n not in SLOW_FIELDS], now_s)
        fields |= self._by_field_value([n for n in asked if n not in fields], wanted, now_s)
        mig = self._mig.read([n for n in wanted if n in gpm.PROFILING_FIELDS], now_s)
        self._refuse_on_mig(asked, now_s)
        if not self._mig.enabled:  # counters are an instance's then
            counters = [n for n in asked if n in _COUNTERS]
            first = [number for number in counters if number not in gpm.RECENT_FIELDS]
            recent = [number for number in counters if number in gpm.RECENT_FIELDS]
            fields |= self._counters_of("first", first, now_s) | self._counters_of("recent", recent, now_s)
        if links := [n for n in asked if n in RATES]:
            rates, without = self._links.read(links, now_s)
            fields |= rates
            for number in without:
                self._refuse(number, "no NVLink throughput counters", now_s)
        for number in asked:
            known = number in _KNOWN_WAYS or bool(getattr(pynvml, wanted[number] or "-", None))
            if number not in fields and not known:
                self._refuse(number, "NVML does not give this field", now_s)
        return CardSample(
            position=self._position,
            index=self._index,
            uuid=self._uuid,
            model=self._model,
            pci_bus_id=self._bus,
            total_bytes=None if memory is None else int(memory.total),
            used_bytes=None if memory is None else int(memory.used),
            reserved_bytes=None if memory is None else optional(lambda: int(memory.reserved), None),
            fields=fields,
            processes=processes,
            unsupported={number: reason for number, (reason, _) in self._unsupported.items()},
            mig=mig,
            mig_enabled=self._mig.enabled,
        )

    def _refuse_on_mig(self, asked: list[int], now_s: float) -> None:
        """Counters that neither the divided card nor its instances give."""
        for number in gpm.PROFILING_FIELDS.intersection(asked) if self._mig.enabled else ():
            of_cards = "asked of undivided cards only" if number in gpm.RECENT_FIELDS else ""
            if reason := self._mig.refused or self._mig.without.get(number) or of_cards:
                self._refuse(number, reason, now_s)
        for number in gpm.TOTALS.keys() & asked if self._mig.enabled else ():
            self._refuse(number, "asked of undivided cards only", now_s)

    def _slow_ones(self, wanted: Mapping[int, str], asked: list[int], now_s: float) -> dict[int, Reading]:
        """Fields that hardly ever change, or cost the driver much: from a reading of their own pace."""
        if now_s >= self._slow_due_s or not self._slow_for >= wanted.keys():
            found = self._by_call([n for n in asked if n in _CALLS and n in SLOW_FIELDS], now_s)
            self._slow, self._slow_for, self._slow_due_s = found, set(wanted), now_s + SLOW_EVERY_S
        return {number: value for number, value in self._slow.items() if number in wanted}

    def _memory_and_processes(self, now_s: float) -> tuple[Any | None, tuple[ProcessReading, ...] | None]:
        """Both of one moment, as far as that can be had: both are read again if memory moved meanwhile.

        It did not where what no process holds, which is the driver's own, is as large as last time.
        """
        memory = own_memory_info(self._handle)
        if memory is None:
            return None, optional(lambda: tuple(self._processes.read(now_s)), None)
        for _ in range(_TRIES):
            before = int(memory.used)
            processes = optional(lambda: tuple(self._processes.read(now_s)), None)
            rest = before - sum(each.memory_bytes or 0 for each in processes or ())
            if rest == self._rest:
                break
            self._rest = rest
            memory = own_memory_info(self._handle)
            if memory is None or int(memory.used) == before:
                break
        return memory, processes

    def _refuse(self, number: int, reason: str, now_s: float, retry_s: float = RETRY_UNSUPPORTED_S) -> None:
        self._unsupported[number] = (reason, now_s + retry_s)

    def _failed(self, numbers: Iterable[int], error: Exception, now_s: float, of: str = "") -> None:
        """A call without an answer. Raises it again where it is the end of the card."""
        raise_if_lost(error)
        self._note_failure(numbers, error, now_s, of)

    def _note_failure(self, numbers: Iterable[int], error: Exception, now_s: float, of: str = "") -> None:
        retry_s = RETRY_UNSUPPORTED_S if is_final(error) else RETRY_FAILED_S
        for number in numbers:
            self._refuse(number, f"{of}{error}", now_s, retry_s)

    def _at_once(self, asked: list[int], memory: Any | None, now_s: float) -> dict[int, Reading]:
        """Fields that come several from one call."""
        of_card = {} if memory is None else of_memory(memory)
        found = {number: value for number, value in of_card.items() if number in asked}
        for number in MEMORY_FIELDS.intersection(asked) - found.keys():
            self._refuse(number, "the driver does not tell", now_s)
        wanted = UTILIZATION_FIELDS.intersection(asked)
        if wanted:
            try:
                rates = of_utilization(self._handle)
                found |= {number: rates[number] for number in wanted}
            except pynvml.NVMLError as error:
                self._failed(wanted, error, now_s)
        return found

    def _by_call(self, numbers: list[int], now_s: float) -> dict[int, Reading]:
        found: dict[int, Reading] = {}
        for number in numbers:
            try:
                value = _CALLS[number](self._handle)
            except (pynvml.NVMLError, AttributeError, ValueError) as error:
                self._failed((number,), error, now_s)
                continue
            if value is not None:
                found[number] = value
        return found

    def _by_field_value(
        self, numbers: list[int], names: Mapping[int, str], now_s: float
    ) -> dict[int, Reading]:
        """All field values in one call; each item has its own verdict."""
        known = {n: _FIELD_VALUES.get(n, (names[n], 1.0)) for n in numbers}
        ids = [
            (n, field_id(name, ALL_LINKS if name in _OVER_ALL_LINKS else 0), factor)
            for n, (name, factor) in known.items()
        ]
        askable = [(n, identifier, factor) for n, identifier, factor in ids if identifier is not None]
        if not askable:
            return {}
        found: dict[int, Reading] = {}
        answers = self._values.read([identifier for _, identifier, _ in askable])
        for (n, _, factor), (verdict, value) in zip(askable, answers, strict=True):
            if verdict == pynvml.NVML_SUCCESS:
                found[n] = value * factor
            else:
                self._note_failure((n,), pynvml.NVMLError(verdict), now_s)
        return found

    def _counters_of(self, kind: str, numbers: list[int], now_s: float) -> dict[int, Reading]:
        if not numbers:
            return {}
        try:
            if kind not in self._gpm:
                if not gpm.supported(self._handle):
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
                self._gpm[kind] = gpm.GpmReader(self._handle)
            found = self._gpm[kind].read(numbers)
        except (pynvml.NVMLError, AttributeError) as error:
            self._close_counters(kind)
            self._failed(numbers, error, now_s, "hardware counters: ")
            return {}
        for number, reason in self._gpm[kind].without.items():
            self._refuse(number, f"hardware counters: {reason}", now_s)
        return dict(found)

    def _close_counters(self, *kinds: str) -> None:
        for kind in kinds:
            if (reader := self._gpm.pop(kind, None)) is not None:
                reader.close()

    def close(self) -> None:
        """Let go of what the driver keeps for this card."""
        self._close_counters(*self._gpm)
        self._mig.close()
