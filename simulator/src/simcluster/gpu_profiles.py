"""The cards that the simulation knows: what a program, NVML and nvidia-smi see of each.

Sizes and bus ids of the V100, T4 and RTX 2080 Ti are those of published nvidia-smi tables; the others are
data-sheet values. A context's own use depends on driver and card: the V100's makes 3 GiB of allocations show
as 3193 MiB.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from .gpu_layout import ABSENT


@dataclass(frozen=True)
class MigProfile:
    """One size of MIG device of a card."""

    gpu_slices: int
    compute_slices: int
    multiprocessor_count: int
    memory_mib: int
    profile_id: int
    """NVML's GPU instance profile number."""


@dataclass(frozen=True)
class Profile:
    """A model of card, with the driver that it usually runs with."""

    name: str
    total_mib: int
    capability: tuple[int, int]
    multiprocessor_count: int
    cores_per_multiprocessor: int
    architecture: int
    """NVML's number: 5 Volta, 6 Turing, 7 Ampere, 9 Hopper."""
    power_limit_w: int
    max_sm_clock_mhz: int
    max_memory_clock_mhz: int
    pci_device_id: int
    context_mib: int
    driver_version: str
    cuda_version: str
    reserved_mib: int = 0
    """Held by the driver, and reported separately by NVML's newer call (drivers from 510 on)."""
    idle_mib: int = 0
    """Used on the card with no process."""
    power_w: int = 25
    temperature_c: int = 30
    fan_percent: int = ABSENT
    performance_state: int = 0
    persistence: bool = True
    ecc: int = 1
    brand: int = 2
    memory_bus_bits: int = 4096
    l2_mib: float = 6.0
    shared_kib: int = 96
    pcie_generation: int = 3
    nvlink_count: int = 0
    memory_temperature_c: int = ABSENT
    gpm: bool = False
    buses: tuple[int, ...] = ()
    """PCI buses of the first cards, device 0 on each; without them all sit on bus 0 from device 7 on."""
    bar1_mib: int = 32768
    serial: bool = True
    mig: Mapping[str, MigProfile] = field(default_factory=dict)


def _ampere_mig(
    memory_mib: tuple[int, int, int, int, int], sizes_gb: tuple[int, ...]
) -> dict[str, MigProfile]:
    one, two, three, four, seven = memory_mib
    gb = sizes_gb
    return {
        f"1g.{gb[0]}gb": MigProfile(1, 1, 14, one, 0),
        f"2g.{gb[1]}gb": MigProfile(2, 2, 28, two, 1),
        f"3g.{gb[2]}gb": MigProfile(4, 3, 42, three, 2),
        f"4g.{gb[3]}gb": MigProfile(4, 4, 56, four, 3),
        f"7g.{gb[4]}gb": MigProfile(8, 7, 98, seven, 4),
    }


def _hopper_mig(
    memory_mib: tuple[int, int, int, int, int], sizes_gb: tuple[int, ...]
) -> dict[str, MigProfile]:
    counts = (16, 32, 60, 64, 132)
    return {
        name: MigProfile(mig.gpu_slices, mig.compute_slices, count, mig.memory_mib, mig.profile_id)
        for (name, mig), count in zip(_ampere_mig(memory_mib, sizes_gb).items(), counts, strict=True)
    }


PROFILES: Final[Mapping[str, Profile]] = {
    "V100-SXM2-16GB": Profile(
        "Tesla V100-SXM2-16GB",
        16130,
        (7, 0),
        80,
        64,
        5,
        300,
        1530,
        877,
        0x1DB110DE,
        121,
        "418.87.01",
        "10.1",
        idle_mib=10,
        power_w=57,
        temperature_c=37,
        nvlink_count=6,
        memory_temperature_c=36,
        bar1_mib=16384,
    ),
    "T4": Profile(
        "Tesla T4",
        15079,
        (7, 5),
        40,
        64,
        6,
        70,
        1590,
        5001,
        0x1EB810DE,
        105,
        "418.87.01",
        "10.1",
        idle_mib=10,
        power_w=29,
        temperature_c=49,
        memory_bus_bits=256,
        l2_mib=4,
        shared_kib=64,
        bar1_mib=256,
    ),
    "T4-15360": Profile(
        "Tesla T4",
        15360,
        (7, 5),
        40,
        64,
        6,
        70,
        1590,
        5001,
        0x1EB810DE,
        105,
        "535.183.01",
        "12.2",
        reserved_mib=449,
        power_w=9,
        temperature_c=33,
        performance_state=8,
        memory_bus_bits=256,
        l2_mib=4,
        shared_kib=64,
        bar1_mib=256,
    ),
    "RTX-2080-Ti": Profile(
        "GeForce RTX 2080 Ti",
        11019,
        (7, 5),
        68,
        64,
        6,
        250,
        2100,
        7000,
        0x1E0710DE,
        139,
        "460.32.03",
        "11.2",
        power_w=14,
        temperature_c=24,
        fan_percent=22,
        performance_state=8,
        persistence=False,
        ecc=ABSENT,
        brand=1,
        memory_bus_bits=352,
        l2_mib=5.5,
        shared_kib=64,
        bar1_mib=256,
        serial=False,
        buses=(0x3D, 0x41, 0xB1, 0xB5),
    ),
    "A100-SXM4-40GB": Profile(
        "NVIDIA A100-SXM4-40GB",
        40960,
        (8, 0),
        108,
        64,
        7,
        400,
        1410,
        1215,
        0x20B010DE,
        413,
        "535.183.01",
        "12.2",
        reserved_mib=618,
        power_w=52,
        temperature_c=31,
        memory_temperature_c=33,
        brand=14,
        memory_bus_bits=5120,
        l2_mib=40,
        shared_kib=164,
        pcie_generation=4,
        nvlink_count=12,
        bar1_mib=65536,
        mig=_ampere_mig((4864, 9856, 19968, 19968, 40192), (5, 10, 20, 20, 40)),
    ),
    "A100-SXM4-80GB": Profile(
        "NVIDIA A100-SXM4-80GB",
        81920,
        (8, 0),
        108,
        64,
        7,
        400,
        1410,
        1593,
        0x20B210DE,
        413,
        "535.183.01",
        "12.2",
        reserved_mib=869,
        power_w=62,
        temperature_c=32,
        memory_temperature_c=36,
        brand=14,
        memory_bus_bits=5120,
        l2_mib=40,
        shared_kib=164,
        pcie_generation=4,
        nvlink_count=12,
        bar1_mib=131072,
        mig=_ampere_mig((9728, 19968, 40192, 40192, 80896), (10, 20, 40, 40, 80)),
    ),
    "H100-80GB-HBM3": Profile(
        "NVIDIA H100 80GB HBM3",
        81559,
        (9, 0),
        132,
        128,
        9,
        700,
        1980,
        2619,
        0x233010DE,
        527,
        "550.90.07",
        "12.4",
        reserved_mib=551,
        power_w=71,
        temperature_c=28,
        memory_temperature_c=38,
        brand=14,
        memory_bus_bits=5120,
        l2_mib=50,
        shared_kib=228,
        pcie_generation=5,
        nvlink_count=18,
        gpm=True,
        bar1_mib=131072,
        mig=_hopper_mig((9984, 20096, 40448, 40448, 81152), (10, 20, 40, 40, 80)),
    ),
    "H200": Profile(
        "NVIDIA H200",
        143771,
        (9, 0),
        132,
        128,
        9,
        700,
        1980,
        3201,
        0x233510DE,
        527,
        "580.95.05",
        "13.0",
        reserved_mib=614,
        power_w=77,
        temperature_c=29,
        memory_temperature_c=40,
        brand=14,
        memory_bus_bits=6144,
        l2_mib=60,
        shared_kib=228,
        pcie_generation=5,
        nvlink_count=18,
        gpm=True,
        bar1_mib=262144,
        mig=_hopper_mig((16384, 33280, 71424, 71424, 143360), (18, 35, 71, 71, 141)),
    ),
}
