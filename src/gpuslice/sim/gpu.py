"""Simulated GPUs: makes the machine's shared file, looks into its books, and plays fate to its cards.

The file is what `libcuda.so.1` and `libnvidia-ml.so.1` of `native/sim` map; name it in GPUSLICE_SIM_STATE, or
start programs with `environment()`. Creating replaces the file; everything else works while processes use it.
"""

import ctypes
import fcntl
import mmap
import os
import struct
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from . import gpu_layout as layout
from .gpu_profiles import PROFILES, MigProfile, Profile

MIB: Final = 1 << 20
STATE_VARIABLE: Final = "GPUSLICE_SIM_STATE"
XID_EVENT: Final = 0x8
"""NVML's event type of a critical XID."""


@dataclass(frozen=True)
class CardSpec:
    """One card to create: a profile, MIG devices by name, and gauges that differ from the profile's."""

    profile: str
    mig: Sequence[str] = ()
    """Names like `3g.20gb`; a non-empty list switches MIG mode on."""
    uuid: str = ""
    """Empty for one made of the seed and the card's place."""
    gauges: Mapping[str, int] = field(default_factory=dict)
    """Fields of `gpu_layout.Card`, for example `{"temperature_c": 25}`."""


@dataclass(frozen=True)
class Holding:
    """Bytes of one kind that a live process holds of a card, as the driver's books have it."""

    pid: int
    card: int
    kind: str
    bytes: int


@dataclass(frozen=True)
class CardReading:
    """One card's books at one moment. A MIG device is an entry of its own; `parent` is its card's index."""

    index: int
    name: str
    uuid: str
    parent: int | None
    total_mib: int
    idle_mib: int
    used_bytes: int
    busy_ns: int
    lost: bool


# ----------------------------------------------------------------------------------------------- creating


def create(
    path: Path | str,
    cards: Sequence[str | CardSpec],
    *,
    driver_version: str = "",
    cuda_version: str = "",
    seed: str = "",
    pool_chunk_mib: int = 32,
    kernel_us: float = 0,
) -> Path:
    """Writes a new machine with these cards and returns its path.

    `driver_version` and `cuda_version` default to the first card's profile. The same `seed` gives the
    same UUIDs; without one they follow from the path. `kernel_us` is how long a kernel takes by default.
    Raises KeyError for an unknown profile, ValueError for too many cards or an unknown MIG device or gauge.
    """
    specs = [CardSpec(card) if isinstance(card, str) else card for card in cards]
    first = PROFILES[specs[0].profile] if specs else PROFILES["V100-SXM2-16GB"]
    where = Path(path)
    state = layout.State()
    _fill_machine(state, driver_version or first.driver_version, cuda_version or first.cuda_version)
    state.pool_chunk_bytes = pool_chunk_mib * MIB
    _fill_cards(state, specs, seed or str(where.absolute()), round(kernel_us * 1000))
    _write_sparse(where, state)
    return where


def _fill_machine(state: layout.State, driver_version: str, cuda_version: str) -> None:
    major, _, minor = cuda_version.partition(".")
    state.magic, state.layout_version = layout.MAGIC, layout.LAYOUT_VERSION
    state.layout_bytes = ctypes.sizeof(layout.State)
    state.cuda_version = int(major) * 1000 + int(minor or 0) * 10
    state.driver_version = driver_version.encode()
    state.nvml_version = f"{major}.{driver_version}".encode()
    state.created_ns = time.monotonic_ns()
    state.granularity_bytes = 2 * MIB
    state.record_high = 1


def _fill_cards(state: layout.State, specs: Sequence[CardSpec], seed: str, kernel_ns: int) -> None:
    if sum(1 + len(spec.mig) for spec in specs) > layout.CARDS:
        raise ValueError(f"at most {layout.CARDS} cards and MIG devices fit into one machine")
    place = 0
    for minor, spec in enumerate(specs):
        sames = sum(1 for earlier in specs[:minor] if earlier.profile == spec.profile)
        parent = place
        _fill_card(state.cards[parent], spec, minor, sames, spec.uuid or make_uuid("GPU", seed, minor))
        place += 1
        for number, name in enumerate(spec.mig):
            _fill_mig(state.cards[place], state.cards[parent], spec, name, number)
            state.cards[place].parent = parent
            state.cards[place].uuid = make_uuid("MIG", seed, minor, number).encode()
            place += 1
    state.card_count = place
    for card in state.cards[:place]:
        card.kernel_ns = kernel_ns
        card.engine_ns = time.monotonic_ns()
        card.sample_end_ns = card.engine_ns + layout.SAMPLE_PERIOD_NS


def make_uuid(prefix: str, seed: str, *place: int) -> str:
    """`GPU-…` or `MIG-…`, the same for the same seed and place."""
    return f"{prefix}-{uuid.uuid5(uuid.NAMESPACE_OID, '/'.join((seed, *map(str, place))))}"


def _fill_card(card: layout.Card, spec: CardSpec, minor: int, sames: int, card_uuid: str) -> None:
    profile = PROFILES[spec.profile]
    card.name, card.uuid = profile.name.encode(), card_uuid.encode()
    card.parent, card.minor = -1, minor
    card.pci_bus = profile.buses[sames] if sames < len(profile.buses) else 0
    card.pci_device = 0 if sames < len(profile.buses) else 7 + minor
    card.pci_device_id, card.pci_subsystem_id = profile.pci_device_id, 0x121210DE
    if profile.serial:
        card.serial = str(1_320_000_000_000 + minor).encode()
    card.part_number, card.vbios = b"900-00000-0000-000", b"88.00.41.00.01"
    card.mig_mode = (1 if spec.mig else 0) if profile.mig else layout.ABSENT
    _fill_size(card, profile)
    _fill_gauges(card, profile)
    known = {name for name, *_ in layout.Card._fields_}
    for name, value in spec.gauges.items():
        if name not in known:
            raise ValueError(f"a card has no gauge {name!r}")
        setattr(card, name, value)


def _fill_size(card: layout.Card, profile: Profile) -> None:
    card.capability_major, card.capability_minor = profile.capability
    card.multiprocessor_count = profile.multiprocessor_count
    card.cores_per_multiprocessor = profile.cores_per_multiprocessor
    card.architecture, card.brand = profile.architecture, profile.brand
    card.shared_per_multiprocessor = profile.shared_kib * 1024
    card.l2_bytes = int(profile.l2_mib * MIB)
    card.memory_bus_bits, card.copy_engines = profile.memory_bus_bits, 3
    card.gpm = profile.gpm
    card.total_bytes = profile.total_mib * MIB
    card.reserved_bytes = profile.reserved_mib * MIB
    card.idle_bytes = profile.idle_mib * MIB
    card.context_bytes = profile.context_mib * MIB
    card.bar1_bytes = profile.bar1_mib * MIB
    card.nvlink_count = profile.nvlink_count


def _fill_gauges(card: layout.Card, profile: Profile) -> None:
    card.temperature_c, card.memory_temperature_c = profile.temperature_c, profile.memory_temperature_c
    card.slowdown_c, card.shutdown_c = 87, 90
    card.power_mw = profile.power_w * 1000
    card.power_limit_mw = card.power_default_limit_mw = card.power_max_limit_mw = profile.power_limit_w * 1000
    card.power_min_limit_mw = profile.power_limit_w * 500
    card.fan_percent, card.performance_state = profile.fan_percent, profile.performance_state
    card.sm_clock_mhz = card.max_sm_clock_mhz = profile.max_sm_clock_mhz
    card.memory_clock_mhz = card.max_memory_clock_mhz = profile.max_memory_clock_mhz
    card.video_clock_mhz = card.max_video_clock_mhz = profile.max_sm_clock_mhz * 9 // 10
    card.persistence, card.ecc = profile.persistence, profile.ecc
    card.pcie_generation = card.pcie_max_generation = profile.pcie_generation
    card.pcie_width = card.pcie_max_width = 16
    card.gpu_percent = card.memory_percent = layout.ABSENT
    newer = profile.architecture >= 7  # Ampere and later remap rows; before, pages were retired
    if newer or profile.ecc == layout.ABSENT:
        card.retired_single = card.retired_double = layout.ABSENT64
        card.retired_pending = layout.ABSENT
    if not newer:
        card.remapped_corrected = card.remapped_uncorrected = layout.ABSENT64


def _fill_mig(card: layout.Card, parent: layout.Card, spec: CardSpec, name: str, number: int) -> None:
    profile = PROFILES[spec.profile]
    if name not in profile.mig:
        raise ValueError(
            f"{spec.profile} has no MIG device {name!r}, only {', '.join(profile.mig) or 'none'}"
        )
    mig: MigProfile = profile.mig[name]
    ctypes.memmove(ctypes.byref(card), ctypes.byref(parent), ctypes.sizeof(layout.Card))
    card.mig_profile = name.encode()
    card.mig_mode, card.mig_index = layout.ABSENT, number
    card.gpu_instance, card.compute_instance = number + 1, 0
    card.mig_gpu_slices, card.mig_compute_slices = mig.gpu_slices, mig.compute_slices
    card.mig_profile_id, card.multiprocessor_count = mig.profile_id, mig.multiprocessor_count
    card.total_bytes = mig.memory_mib * MIB
    card.reserved_bytes = card.idle_bytes = 0
    card.context_bytes = parent.context_bytes // 4


def _write_sparse(path: Path, state: layout.State) -> None:
    """Replaces the file; processes that mapped an older one keep it. Pages that are all zero take no disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    written = layout.State.processes.offset
    with fresh.open("wb") as file:
        file.write(memoryview(state).cast("B")[:written])
        file.truncate(ctypes.sizeof(layout.State))
    fresh.chmod(0o666)
    path.with_name(path.name + ".alive").unlink(missing_ok=True)
    witness = path.with_name(path.name + ".alive")
    witness.touch()
    witness.chmod(0o666)
    fresh.replace(path)


def environment(
    state: Path | str, build: Path | str, visible: str | None = None, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment in which a program meets the simulated driver.

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
    """An existing machine, open for looking at its books and for changing what the cards report.

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
        """Lets go of the file."""
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
        return tuple(self._reading(index, held[index]) for index in range(self._state.card_count))

    def _reading(self, index: int, used_bytes: int) -> CardReading:
        card = self._state.cards[index]
        return CardReading(
            index=index,
            name=card.name.decode(),
            uuid=card.uuid.decode(),
            parent=card.parent if card.parent >= 0 else None,
            total_mib=card.total_bytes // MIB,
            idle_mib=card.idle_bytes // MIB,
            used_bytes=used_bytes,
            busy_ns=card.busy_ns,
            lost=bool(card.lost),
        )

    def holdings(self, pid: int | None = None) -> tuple[Holding, ...]:
        """What each live process holds of each card by kind, summed from the records; then the ghosts."""
        sums: dict[tuple[int, int, str], int] = {}
        for record, process in self._consistent_records():
            key = (process, record.card, layout.KINDS[record.kind])
            sums[key] = sums.get(key, 0) + record.bytes
        ghosts = [
            Holding(ghost.pid, ghost.card, "context", ghost.bytes)
            for ghost in self._state.ghosts
            if ghost.live
        ]
        found = [Holding(*key, amount) for key, amount in sorted(sums.items())] + ghosts
        return tuple(holding for holding in found if pid is None or holding.pid == pid)

    def used_bytes(self, card: int | None = None, pid: int | None = None) -> int:
        """The sum of `holdings`, of one card and one process if given."""
        return sum(each.bytes for each in self.holdings(pid) if card is None or each.card == card)

    def launches(self, pid: int) -> tuple[int, int, int]:
        """Kernels launched by a process on legacy streams, on per-thread ones, and graphs."""
        for process in self._state.processes[: self._state.process_high]:
            if process.live and process.pid == pid:
                return process.launches_legacy, process.launches_per_thread, process.graph_launches
        return 0, 0, 0

    def _consistent_records(self) -> list[tuple[layout.Record, int]]:
        """Live records with their process's pid, read while no process changed them."""
        for _ in range(1000):
            before = self._state.sequence
            found = self._live_records()
            if before == self._state.sequence and before % 2 == 0:
                return found
            time.sleep(0.001)
        return found  # a process died while it changed them: the records are the truth all the same

    def _live_records(self) -> list[tuple[layout.Record, int]]:
        state = self._state
        alive = {slot: state.processes[slot].pid for slot in self._live_slots()}
        high = state.record_high
        copy = (layout.Record * high).from_buffer_copy(self._map, layout.State.records.offset)
        return [(record, alive[record.process]) for record in copy if record.live and record.process in alive]

    def _live_slots(self) -> Iterator[int]:
        """Slots whose process still holds its byte of the witness file locked, as the driver sees it."""
        witness = os.open(f"{self.path}.alive", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            for slot in range(self._state.process_high):
                if self._state.processes[slot].live and _is_locked(witness, slot):
                    yield slot
        finally:
            os.close(witness)

    # ---- injecting

    def set_gauge(self, card: int, **gauges: int) -> None:
        """Changes fields of a card as `gpu_layout.Card` names them, e.g. `temperature_c=88`."""
        for name, value in gauges.items():
            setattr(self._state.cards[card], name, value)

    def lose(self, card: int) -> None:
        """The card falls off the bus: NVML answers GPU_IS_LOST, CUDA fails with an unknown error."""
        self.set_gauge(card, lost=1)

    def restore(self, card: int) -> None:
        """The card is back, as after a reset."""
        self.set_gauge(card, lost=0)

    def fail(self, card: int, error: int) -> None:
        """Every context on the card gets this CUresult from now on; 0 ends it."""
        self.set_gauge(card, failing=error)

    def inject_xid(self, card: int, xid: int) -> None:
        """An XID occurs: whoever registered for critical XIDs of this card sees it once."""
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
        """A process on paper: NVML lists it with its memory and utilisation; the card has that much less."""
        with self._injecting():
            free = [ghost for ghost in self._state.ghosts if not ghost.live]
            if not free:
                raise ValueError(f"at most {layout.GHOSTS} ghosts fit into one machine")
            ghost = free[0]
            ghost.pid, ghost.card, ghost.percent = pid, card, percent
            ghost.bytes, ghost.name = used_mib * MIB, name.encode()
            ghost.live = 1

    def remove_ghost(self, pid: int) -> None:
        """The process on paper ends."""
        for ghost in self._state.ghosts:
            if ghost.live and ghost.pid == pid:
                ghost.live = 0

    @contextmanager
    def _injecting(self) -> Iterator[None]:
        with self.path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


_FLOCK: Final = "hhqqi4x"


def _is_locked(witness: int, slot: int) -> bool:
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
    (found,) = struct.unpack_from("h", fcntl.fcntl(witness, fcntl.F_OFD_GETLK, asked))
    return bool(found != fcntl.F_UNLCK)
