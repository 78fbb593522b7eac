"""The simulated machine's shared file, field by field as `native/sim/state/layout.h` lays it out.

A test compares this mirror with what the C compiler made of the header; change both together.
"""

import ctypes
from typing import Final, TypeVar

MAGIC: Final = int.from_bytes(b"SLISGPU1", "little")
LAYOUT_VERSION: Final = 14
CARDS: Final = 32
PROCESSES: Final = 1024
RECORDS: Final = 1 << 18
EVENTS: Final = 256
GHOSTS: Final = 32
SAMPLES: Final = 32
SAMPLE_PROCESSES: Final = 30
CONNECTIONS: Final = 32
QUEUES: Final = 4096
QUEUE_ITEMS: Final = 1024
STRIPES: Final = 16
CGROUPS: Final = 12
LIMITS: Final = 512
PATH: Final = 384
ACCOUNTING: Final = ("off", "misc", "dmem")
"""How the driver accounts memory by cgroup, by number."""
SAMPLE_PERIOD_NS: Final = 166_666_667
ABSENT: Final = 0xFFFFFFFF
"""A gauge that the card does not have."""
ABSENT64: Final = 0xFFFFFFFFFFFFFFFF

KINDS: Final = (
    "context", "plain", "managed", "pool", "physical", "array", "graph", "module", "limit", "import",
)  # fmt: skip
"""What took the memory, by number; the file has room for KIND_ROOM of them."""
KIND_ROOM: Final = 12

_Kind = TypeVar("_Kind")
u32, u64, i32, char = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_char


def _fields(kind: _Kind, names: str) -> list[tuple[str, _Kind]]:
    return [(name, kind) for name in names.split()]


class SampleProcess(ctypes.Structure):
    _fields_ = [("pid", i32), ("percent", ctypes.c_uint16), ("slot", ctypes.c_uint16)]


class Sample(ctypes.Structure):
    _fields_ = [
        ("timestamp_us", u64),
        ("percent", u32),
        ("process_count", u32),
        ("processes", SampleProcess * SAMPLE_PROCESSES),
    ]


class Card(ctypes.Structure):
    _fields_ = [
        ("name", char * 96),
        ("uuid", char * 96),
        ("serial", char * 32),
        ("part_number", char * 32),
        ("vbios", char * 32),
        ("mig_profile", char * 32),
        ("parent", i32),
        *_fields(u32, "minor pci_domain pci_bus pci_device pci_device_id pci_subsystem_id mig_mode"),
        *_fields(
            u32, "gpu_instance compute_instance mig_gpu_slices mig_compute_slices mig_index mig_profile_id"
        ),
        *_fields(u32, "capability_major capability_minor multiprocessor_count cores_per_multiprocessor"),
        *_fields(
            u32, "architecture brand shared_per_multiprocessor l2_bytes memory_bus_bits copy_engines gpm"
        ),
        *_fields(u64, "total_bytes reserved_bytes idle_bytes context_bytes bar1_bytes"),
        *_fields(u32, "temperature_c memory_temperature_c slowdown_c shutdown_c"),
        *_fields(u32, "power_mw power_limit_mw power_default_limit_mw power_min_limit_mw power_max_limit_mw"),
        *_fields(u32, "fan_percent performance_state sm_clock_mhz memory_clock_mhz video_clock_mhz"),
        *_fields(u32, "max_sm_clock_mhz max_memory_clock_mhz max_video_clock_mhz"),
        *_fields(u32, "persistence ecc compute_mode display_active display_mode"),
        *_fields(u32, "pcie_generation pcie_width pcie_max_generation pcie_max_width nvlink_count"),
        *_fields(u32, "lost resets failing refused_with"),
        ("refused_call", char * 60),
        *_fields(u32, "sampled_turn_us gpu_percent memory_percent encoder_percent decoder_percent"),
        *_fields(u32, "retired_pending remap_pending remap_failure recovery_action"),
        *_fields(u64, "clock_event_reasons ecc_corrected_volatile ecc_uncorrected_volatile"),
        *_fields(u64, "ecc_corrected_aggregate ecc_uncorrected_aggregate"),
        *_fields(u64, "retired_single retired_double remapped_corrected remapped_uncorrected"),
        *_fields(u64, "pcie_replays pcie_tx_bytes pcie_rx_bytes nvlink_tx_kib nvlink_rx_kib"),
        *_fields(u64, "throttled_power_ns throttled_thermal_ns kernel_ns context_ns module_ns"),
        *_fields(u64, "used_bytes engine_ns busy_ns sample_end_ns sample_busy_ns sample_count"),
        ("samples", Sample * SAMPLES),
    ]


class Item(ctypes.Structure):
    _fields_ = [
        ("remaining_ns", ctypes.c_double),
        *_fields(u64, "awaited finished_ns"),
        ("stream", u32),
        ("width", ctypes.c_uint16),
        ("held", ctypes.c_uint8),
        ("sealed", ctypes.c_uint8),
    ]


class Queue(ctypes.Structure):
    _fields_ = [
        *_fields(u32, "live process card padding"),
        *_fields(u64, "made finished"),
        ("items", Item * QUEUE_ITEMS),
    ]


class Launches(ctypes.Structure):
    """Counts of one stripe of threads, in a cache line of its own."""

    _fields_ = [*_fields(u64, "legacy per_thread graphs"), ("padding", u64 * 5)]


class Process(ctypes.Structure):
    _fields_ = [
        ("live", u32),
        ("pid", i32),
        ("start_time", u64),
        ("pid_namespace", u64),
        ("cgroups", u64 * CGROUPS),
        ("contained", u32),
        ("context_count", u32 * CARDS),
        ("checkpoint", u32),
        ("host_address", u64),
        ("host_bytes", u64),
        ("used_bytes", (u64 * KIND_ROOM) * CARDS),
        ("done_ns", ctypes.c_double * CARDS),
        ("sample_ns", ctypes.c_double * CARDS),
        ("sampled_until_ns", u64 * CARDS),
        ("queues", (u32 * CONNECTIONS) * CARDS),
        ("launches", Launches * STRIPES),
    ]


class Record(ctypes.Structure):
    _fields_ = [
        ("live", u32),
        ("card", ctypes.c_uint16),
        ("kind", ctypes.c_uint16),
        ("process", u32),
        ("generation", u32),
        ("bytes", u64),
        ("address", u64),
        *_fields(u32, "target shared next_free padding"),
    ]


class Event(ctypes.Structure):
    _fields_ = [*_fields(u64, "sequence type data"), *_fields(u32, "card padding")]


class Ghost(ctypes.Structure):
    _fields_ = [
        ("live", u32),
        ("pid", i32),
        ("card", u32),
        ("percent", u32),
        ("bytes", u64),
        ("name", char * 96),
    ]


class Limit(ctypes.Structure):
    _fields_ = [*_fields(u32, "live card"), *_fields(u64, "cgroup soft hard"), ("path", char * PATH)]


class State(ctypes.Structure):
    _fields_ = [
        ("magic", u64),
        ("layout_bytes", u64),
        *_fields(u32, "layout_version card_count cuda_version process_high driver_unloaded accounting"),
        ("driver_version", char * 32),
        ("nvml_version", char * 32),
        *_fields(u64, "created_ns granularity_bytes pool_chunk_bytes"),
        *_fields(u64, "lock sequence recoveries reaped pid_namespace attached exported exports"),
        *_fields(u32, "record_high record_free ghost_high queue_high limit_high padding"),
        ("cgroup_root", char * PATH),
        ("event_count", u64),
        ("events", Event * EVENTS),
        ("ghosts", Ghost * GHOSTS),
        ("limits", Limit * LIMITS),
        ("cards", Card * CARDS),
        ("processes", Process * PROCESSES),
        ("records", Record * RECORDS),
        ("queues", Queue * QUEUES),
    ]
