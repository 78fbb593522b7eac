"""Simulated GPUs: creates the machine's shared file, reads its accounts, and injects faults into its cards.

The file is mapped by `libcuda.so.1` and `libnvidia-ml.so.1` of `native/sim`; set GPUSLICE_SIM_STATE to its
path, or start programs with `environment()`. Creating a machine replaces the file; everything else works
while processes use it.
"""

import ctypes
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from . import gpu_layout as layout
from .gpu_creation import MIB, CardSpec, create, make_uuid

__all__ = [
    "CardReading",
    "CardSpec",
    "HeldMemory",
    "Machine",
    "create",
    "environment",
    "make_uuid",
]

STATE_VARIABLE: Final = "GPUSLICE_SIM_STATE"
XID_EVENT: Final = 0x8
_EXPORT_BYTES: Final = 4096
"""Of the file of exported descriptors, for each: as `native/sim/state/state.c` has it."""
"""NVML's event type of a critical XID."""


@dataclass(frozen=True)
class HeldMemory:
    """Bytes of one kind that a live process holds of a card, according to the driver's accounts.

    The pid is that in the process's own namespace; 0 stands for memory that only an exported descriptor
    keeps.
    """

    pid: int
    card: int
    kind: str
    bytes: int


@dataclass(frozen=True)
class CardReading:
    """A card's accounts at one moment. A MIG device is an entry of its own; `parent` is its card's index."""

    index: int
    name: str
    uuid: str
    parent: int | None
    total_mib: int
    idle_mib: int
    used_bytes: int
    busy_ns: int
    lost: bool


def environment(
    state: Path | str, build: Path | str, visible: str | None = None, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment in which a program finds the simulated driver.

    `build` is the folder `native/build/sim`; `visible` is what a container runtime would put into
    NVIDIA_VISIBLE_DEVICES, None for a process of the host.
    """
    variables = dict(os.environ if base is None else base)
    variables[STATE_VARIABLE] = str(state)
    for name in ("LD_LIBRARY_PATH", "PATH"):
        variables[name] = os.pathsep.join(filter(None, (str(build), variables.get(name, ""))))
    variables.pop("NVIDIA_VISIBLE_DEVICES", None)
    if visible is not None:
        variables["NVIDIA_VISIBLE_DEVICES"] = visible
    return variables


# ------------------------------------------------------------------------------------ looking and injecting


class Machine:
    """An existing machine, opened to read its accounts and to change what the cards report.

    Use as a context manager or call `close()`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(layout.State))
        self._state = layout.State.from_buffer(self._map)
        if self._state.magic != layout.MAGIC or self._state.layout_bytes != ctypes.sizeof(layout.State):
            raise ValueError(f"{path} is no simulated machine of layout {layout.LAYOUT_VERSION}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the file."""
        del self._state
        self._map.close()

    # ---- looking

    @property
    def driver_version(self) -> str:
        return bytes(self._state.driver_version).decode()

    @property
    def recoveries(self) -> int:
        """How often a lock was taken over from a process that died holding it."""
        return int(self._state.recoveries)

    def cards(self) -> tuple[CardReading, ...]:
        """Every card and MIG device, with what live processes and ghosts hold of it."""
        held = [0] * layout.CARDS
        for holding in self.holdings():
            held[holding.card] += holding.bytes
        cards = enumerate(self._state.cards[: self._state.card_count])
        return tuple(
            CardReading(
                index=index,
                name=card.name.decode(),
                uuid=card.uuid.decode(),
                parent=card.parent if card.parent >= 0 else None,
                total_mib=card.total_bytes // MIB,
                idle_mib=card.idle_bytes // MIB,
                used_bytes=held[index],
                busy_ns=card.busy_ns,
                lost=bool(card.lost),
            )
            for index, card in cards
        )

    def holdings(self, pid: int | None = None) -> tuple[HeldMemory, ...]:
        """What each live process holds of each card by kind, summed from the records; then the ghosts."""
        sums: dict[tuple[int, int, str], int] = {}
        for record, process in self._consistent_records():
            key = (process, record.card, layout.KINDS[record.kind])
            sums[key] = sums.get(key, 0) + record.bytes
        ghosts = [
            HeldMemory(ghost.pid, ghost.card, "context", ghost.bytes)
            for ghost in self._state.ghosts
            if ghost.live
        ]
        found = [HeldMemory(*key, amount) for key, amount in sorted(sums.items())] + ghosts
        return tuple(holding for holding in found if pid is None or holding.pid == pid)

    def used_bytes(self, card: int | None = None, pid: int | None = None) -> int:
        """The sum of `holdings`, of one card and one process if given."""
        return sum(each.bytes for each in self.holdings(pid) if card is None or each.card == card)

    def launches(self, pid: int) -> tuple[int, int, int]:
        """Kernels launched by a process on legacy streams, on per-thread ones, and graphs."""
        for process in self._state.processes[: self._state.process_high]:
            if process.live and process.pid == pid:
                stripes = list(process.launches)
                return (
                    sum(each.legacy for each in stripes),
                    sum(each.per_thread for each in stripes),
                    sum(each.graphs for each in stripes),
                )
        return 0, 0, 0

    def worked_ns(self, pid: int) -> int:
        """Device time that a process has used, on all cards, as of the last query by anybody."""
        for process in self._state.processes[: self._state.process_high]:
            if process.live and process.pid == pid:
                return int(sum(process.done_ns))
        return 0

    def _consistent_records(self) -> list[tuple[layout.Record, int]]:
        """Live records with their process's pid, read while no process changed them."""
        for _ in range(1000):
            before = self._state.sequence
            found = self._live_records()
            if before == self._state.sequence and before % 2 == 0:
                return found
            time.sleep(0.001)
        return found  # a process died while it changed them: the records are still the truth

    def _live_records(self) -> list[tuple[layout.Record, int]]:
        state = self._state
        alive = {slot: state.processes[slot].pid for slot in self._live_slots()}
        alive[layout.PROCESSES] = 0
        high = state.record_high
        copy = (layout.Record * high).from_buffer_copy(self._map, layout.State.records.offset)
        held = [
            record
            for record in copy
            if record.live == 1
            and record.process in alive
            and (record.process != layout.PROCESSES or self._is_exported(record.address))
        ]
        return [(record, alive[record.process]) for record in held]

    def _is_exported(self, number: int) -> bool:
        """Whether a descriptor of that memory is open in any process, or being passed to one."""
        try:
            file = os.open(f"{self.path}.exports", os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return _is_locked(file, number * _EXPORT_BYTES)
        finally:
            os.close(file)

    def _live_slots(self) -> Iterator[int]:
        """Slots whose process still holds its byte of the witness file locked, as the driver sees it."""
        listener = os.open(f"{self.path}.alive", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            for slot in range(self._state.process_high):
                if self._state.processes[slot].live and _is_locked(listener, slot):
                    yield slot
        finally:
            os.close(listener)

    # ---- injecting

    def set_gauge(self, card: int, **gauges: int) -> None:
        """Changes fields of a card as `gpu_layout.Card` names them, e.g. `temperature_c=88`."""
        for name, value in gauges.items():
            setattr(self._state.cards[card], name, value)

    def lose(self, card: int) -> None:
        """The card falls off the bus: NVML answers GPU_IS_LOST, CUDA fails with an unknown error."""
        self.set_gauge(card, lost=1)

    def restore(self, card: int) -> None:
        """The card is back, as after a reset, for programs that open NVML from now on."""
        self.set_gauge(card, lost=0, resets=self._state.cards[card].resets + 1)

    def unload_driver(self) -> None:
        """NVML cannot be opened any more; programs that have it open keep it, as the kernel keeps a module in
        use.
        """
        self._state.driver_unloaded = 1

    def load_driver(self, version: str = "") -> None:
        """The module is back; if `version` differs, no library that is already loaded matches it."""
        self._state.driver_unloaded = 0
        if version:
            self._state.driver_version = version.encode()

    def fail(self, card: int, error: int) -> None:
        """Every context on the card gets this CUresult from now on; 0 stops that."""
        self.set_gauge(card, failing=error)

    def refuse(self, card: int, call: str, error: int) -> None:
        """NVML's calls whose names begin with `call` return `error`, an ``nvmlReturn_t``, for this card.

        One such prefix per card at a time; 0 stops that.
        """
        one = self._state.cards[card]
        one.refused_with, one.refused_call = error, call.encode()

    def inject_xid(self, card: int, xid: int) -> None:
        """An XID occurs: every process registered for critical XIDs of this card sees it once."""
        self.inject_event(card, XID_EVENT, xid)

    def inject_event(self, card: int, event_type: int, data: int) -> None:
        """Any event, by NVML's type bit."""
        with self._injecting():
            count = self._state.event_count
            event = self._state.events[count % layout.EVENTS]
            event.sequence = 0
            event.type, event.data, event.card = event_type, data, card
            event.sequence = count + 1
            self._state.event_count = count + 1

    def add_ghost(self, card: int, pid: int, used_mib: int, name: str, percent: int = 0) -> None:
        """A process that exists only in the accounts: NVML lists its memory and utilisation; the card has
        that much less.
        """
        with self._injecting():
            free = [place for place, ghost in enumerate(self._state.ghosts) if not ghost.live]
            if not free:
                raise ValueError(f"at most {layout.GHOSTS} ghosts fit into one machine")
            ghost = self._state.ghosts[free[0]]
            ghost.pid, ghost.card, ghost.percent = pid, card, percent
            ghost.bytes, ghost.name = used_mib * MIB, name.encode()
            ghost.live = 1
            self._state.ghost_high = max(self._state.ghost_high, free[0] + 1)

    def remove_ghost(self, pid: int) -> None:
        """The process that existed only in the accounts ends."""
        for ghost in self._state.ghosts:
            if ghost.live and ghost.pid == pid:
                ghost.live = 0

    @contextmanager
    def _injecting(self) -> Iterator[None]:
        with self.path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


_FLOCK: Final = "hhqqi4x"


def _is_locked(listener: int, slot: int) -> bool:
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
    (found,) = struct.unpack_from("h", fcntl.fcntl(listener, fcntl.F_OFD_GETLK, asked))
    return bool(found != fcntl.F_UNLCK)
