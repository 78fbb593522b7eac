"""Creates a simulated machine: cards of given profiles, written to the file that the driver maps."""

import ctypes
import mmap
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from . import gpu_layout as layout
from .gpu_profiles import PROFILES, MigProfile, Profile

MIB: Final = 1 << 20

DRIVERS: Final[Mapping[str, tuple[str, str]]] = {
    "535.54": ("535.54.03", "12.2"),
    "535": ("535.183.01", "12.2"),
    "550": ("550.54.15", "12.4"),
    "560": ("560.35.03", "12.6"),
    "570": ("570.124.06", "12.8"),
    "580": ("580.65.06", "13.0"),
    "610": ("610.00", "13.5"),
    "615": ("615.71.05", "13.4"),
}
"""Releases that differ in what NVML tells a container, with the CUDA that came with them.

Of 610 no release was seen: the number stands for the branch, the CUDA for the newest headers known here.
"""

LIMITS_SINCE: Final = 615
"""The first branch that enforces limits of cgroups."""
CONTEXT_MS: Final = 200.0
"""A context on a card of a data centre: published figures go from 80 ms (GPU-Virt-Bench) to half a second."""
MODULE_MS: Final = 5.0
"""Loading a few MiB of finished code; compiling PTX takes far longer."""


@dataclass(frozen=True)
class CardSpec:
    """One card to create: a profile, MIG devices by name, and gauges that differ from the profile's."""

    profile: str
    mig: Sequence[str] = ()
    """Names like `3g.20gb`; a non-empty list switches MIG mode on."""
    uuid: str = ""
    """Empty: derived from the seed and the card's position."""
    gauges: Mapping[str, int] = field(default_factory=dict)
    """Fields of `gpu_layout.Card`, for example `{"temperature_c": 25}`."""


def create(
    path: Path | str,
    cards: Sequence[str | CardSpec],
    *,
    driver_version: str = "",
    cuda_version: str = "",
    seed: str = "",
    driver: str = "",
    pool_chunk_mib: int = 32,
    kernel_us: float = 0,
    context_ms: float = 0.4,
    module_ms: float = 0,
    accounting: str = "misc",
    cgroup_root: Path | str = "",
) -> Path:
    """Writes a new machine with these cards and returns its path.

    `driver` is a branch of `DRIVERS`; `driver_version` and `cuda_version` say it exactly; without any of
    them the first card's profile does. The same `seed` gives the same UUIDs; without one they follow from
    the path.
    `kernel_us`, `context_ms` and `module_ms` are how long a kernel takes by default, a context to be made and
    code to be loaded; what a card takes is CONTEXT_MS and MODULE_MS, too long for most tests.
    `accounting`: how a driver from 615 on accounts memory by cgroup, "misc", "dmem" or "off".
    `cgroup_root`: a folder that stands for /sys/fs/cgroup (`cgroups`); the kernel's own if empty.
    Raises KeyError for an unknown profile or branch, ValueError for too many cards or an unknown MIG device
    or gauge.
    """
    if driver:
        driver_version, cuda_version = DRIVERS[driver]
    specs = [CardSpec(card) if isinstance(card, str) else card for card in cards]
    first = PROFILES[specs[0].profile] if specs else PROFILES["V100-SXM2-16GB"]
    where = Path(path)
    # pages stay zero until they are written: of 150 MiB, nearly all is room for processes
    state = layout.State.from_buffer(mmap.mmap(-1, ctypes.sizeof(layout.State)))
    _fill_machine(state, driver_version or first.driver_version, cuda_version or first.cuda_version)
    state.pool_chunk_bytes = pool_chunk_mib * MIB
    if int((driver_version or first.driver_version).partition(".")[0]) >= LIMITS_SINCE:
        state.accounting = layout.ACCOUNTING.index(accounting)
    state.cgroup_root = os.fsencode(cgroup_root)
    _fill_cards(state, specs, seed or str(where.absolute()))
    for card in state.cards[: state.card_count]:
        card.kernel_ns = round(kernel_us * 1e3)
        card.context_ns, card.module_ns = round(context_ms * 1e6), round(module_ms * 1e6)
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
    state.pid_namespace = os.stat("/proc/self/ns/pid").st_ino
    state.record_high = 1


def _fill_cards(state: layout.State, specs: Sequence[CardSpec], seed: str) -> None:
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
    newer = profile.architecture >= 7  # Ampere and later remap rows; earlier ones retire pages
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
    listener = path.with_name(path.name + ".alive")
    listener.touch()
    listener.chmod(0o666)
    fresh.replace(path)
