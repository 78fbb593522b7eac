"""Every metric of our own: name, type, labels, meaning. The one place where a metric is written down.

The page, the documentation, the dashboards and the alerts all name metrics from here; tests compare them.
Units are base units and the last part of the name; ``_ratio`` is 0…1.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuslice.adapters.web.exposition import Family, MetricKind

NODE = ("node",)
CARD = ("node", "gpu", "gpu_uuid")
MIG = (*CARD, "mig_uuid")
CONTAINER = (*CARD, "namespace", "pod", "container")

_GAUGE, _COUNTER = MetricKind.GAUGE, MetricKind.COUNTER


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. `source` says in a few words where the figure comes from, for the documentation."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str
    source: str = "the exporter"

    def family(self) -> Family:
        return Family(self.name, self.kind, self.help)


# -- the card --------------------------------------------------------------------------------------------
GPU_UP = Metric(
    "gpuslice_gpu_up", _GAUGE, CARD, "Whether the card answers; 0 when it is there and does not.", "NVML"
)
GPU_INFO = Metric(
    "gpuslice_gpu_info",
    _GAUGE,
    (*CARD, "model", "pci_bus_id", "driver_version"),
    "What the card is; always 1.",
    "NVML",
)
GPU_MEMORY_TOTAL = Metric(
    "gpuslice_gpu_memory_total_bytes", _GAUGE, CARD, "Memory of the card.", "NVML, memory info"
)
GPU_MEMORY_USED = Metric(
    "gpuslice_gpu_memory_used_bytes",
    _GAUGE,
    CARD,
    "Memory in use on the card, without what the driver reserves for itself.",
    "NVML, memory info",
)
GPU_MEMORY_RESERVED = Metric(
    "gpuslice_gpu_memory_reserved_bytes",
    _GAUGE,
    CARD,
    "Memory that the driver and firmware keep for themselves.",
    "NVML, memory info v2 (driver 510 and later)",
)
GPU_MEMORY_ALLOCATED = Metric(
    "gpuslice_gpu_memory_allocated_bytes",
    _GAUGE,
    CARD,
    "Memory of the card that is given out to containers; a whole card is all of it.",
    "kubelet's pod-resources",
)
GPU_ALLOCATE_MODE = Metric(
    "gpuslice_gpu_allocate_mode",
    _GAUGE,
    CARD,
    "How the card is given out: 0 to nobody, 1 whole, 2 in parts (shares or MIG devices).",
    "kubelet's pod-resources",
)
GPU_UTILIZATION = Metric(
    "gpuslice_gpu_utilization_ratio",
    _GAUGE,
    CARD,
    "Part of the last driver period in which any kernel ran on the card.",
    "NVML, utilization rates",
)
GPU_TEMPERATURE = Metric("gpuslice_gpu_temperature_celsius", _GAUGE, CARD, "Temperature of the card.", "NVML")
GPU_TEMPERATURE_MARGIN = Metric(
    "gpuslice_gpu_temperature_margin_celsius",
    _GAUGE,
    CARD,
    "How far the card is from the temperature at which it slows down.",
    "NVML, slowdown threshold less temperature",
)
GPU_POWER = Metric("gpuslice_gpu_power_watts", _GAUGE, CARD, "Power draw of the card.", "NVML")
GPU_POWER_LIMIT = Metric(
    "gpuslice_gpu_power_limit_watts", _GAUGE, CARD, "Power limit in force.", "NVML, enforced limit"
)
GPU_ENERGY = Metric(
    "gpuslice_gpu_energy_joules_total",
    _COUNTER,
    CARD,
    "Energy used since the driver was loaded.",
    "NVML (Volta and later)",
)
GPU_THROTTLED = Metric(
    "gpuslice_gpu_throttle_seconds_total",
    _COUNTER,
    (*CARD, "reason"),
    "Time the card's clocks were held down, by reason.",
    "NVML field values",
)
GPU_PCIE = Metric(
    "gpuslice_gpu_pcie_bytes_total",
    _COUNTER,
    (*CARD, "direction"),
    "Bytes moved over PCIe since the exporter began, seen from the card: tx or rx.",
    "NVML's hardware counters (Hopper and later), summed: its own totals wrap around after 4 GiB",
)
GPU_NVLINK = Metric(
    "gpuslice_gpu_nvlink_bytes_total",
    _COUNTER,
    (*CARD, "direction"),
    "Bytes moved over all NVLinks, seen from the card: tx or rx.",
    "NVML field values",
)
GPU_RECOVERY = Metric(
    "gpuslice_gpu_recovery_action",
    _GAUGE,
    CARD,
    "What the driver asks for: 0 nothing, 1 reset, 2 reboot, 3 drain peers, 4 drain and reset.",
    "NVML field value",
)
GPU_UNCORRECTED = Metric(
    "gpuslice_gpu_uncorrected_memory_errors_total",
    _COUNTER,
    CARD,
    "Memory errors that could not be corrected, since the driver was loaded or the card was reset.",
    "NVML, volatile ECC counts",
)
GPU_REMAP_FAILED = Metric(
    "gpuslice_gpu_row_remap_failed",
    _GAUGE,
    CARD,
    "Whether a bad row of memory could not be replaced.",
    "NVML, remapped rows (Ampere and later)",
)
XID_ERRORS = Metric(
    "gpuslice_gpu_xid_errors_total",
    _COUNTER,
    (*CARD, "xid"),
    "Xid faults the driver reported since the exporter started; known codes start at 0.",
    "NVML events",
)
XID_LAST = Metric(
    "gpuslice_gpu_xid_last_timestamp_seconds",
    _GAUGE,
    (*CARD, "xid"),
    "When the code was reported last, seconds since the epoch; absent before the first.",
    "NVML events",
)

# -- a MIG device of a card --------------------------------------------------------------------------------
MIG_INFO = Metric(
    "gpuslice_mig_info",
    _GAUGE,
    (*MIG, "mig_profile", "gpu_instance", "compute_instance"),
    "What a MIG device of the card is; always 1.",
    "NVML",
)
MIG_MEMORY_TOTAL = Metric(
    "gpuslice_mig_memory_total_bytes",
    _GAUGE,
    MIG,
    "Memory of the MIG device's GPU instance; several devices of one instance share it.",
    "NVML, memory info of the device",
)
MIG_MEMORY_USED = Metric(
    "gpuslice_mig_memory_used_bytes",
    _GAUGE,
    MIG,
    "Memory in use on the MIG device's GPU instance; part of the card's.",
    "NVML, memory info of the device",
)
MIG_BUSY = Metric(
    "gpuslice_mig_engine_active_ratio",
    _GAUGE,
    MIG,
    "Part of the time in which the instance's engine was busy, of the instance.",
    "NVML, GPM (Hopper and later)",
)
MIG_SM_BUSY = Metric(
    "gpuslice_mig_sm_active_ratio",
    _GAUGE,
    MIG,
    "Part of the time in which the instance's SMs were busy, of the instance.",
    "NVML, GPM (Hopper and later)",
)

# -- a container on a card -------------------------------------------------------------------------------
CONTAINER_INFO = Metric(
    "gpuslice_container_info",
    _GAUGE,
    (*CONTAINER, "pod_uid", "container_id", "resource", "share_mode"),
    "Joins a container to what is slow to change about it; always 1.",
    "kubelet and the API server",
)
CONTAINER_MIG = Metric(
    "gpuslice_container_mig_info",
    _GAUGE,
    (*CONTAINER, "mig_uuid"),
    "Joins a container to each MIG device it holds; always 1.",
    "kubelet's pod-resources",
)
MEMORY_USED = Metric(
    "gpuslice_container_memory_used_bytes",
    _GAUGE,
    CONTAINER,
    "Memory that the container's processes hold of the card; 0 when it has an allocation and holds none.",
    "NVML process lists and cgroups; the interposer's region where NVML does not tell",
)
MEMORY_LIMIT = Metric(
    "gpuslice_container_memory_limit_bytes",
    _GAUGE,
    CONTAINER,
    "The most memory of the card that the container can get; absent where nothing enforces one.",
    "the agent's limits file; the size of a whole card or of MIG devices",
)
MEMORY_ALLOCATED = Metric(
    "gpuslice_container_memory_allocated_bytes",
    _GAUGE,
    CONTAINER,
    "Memory of the card that the container was given.",
    "kubelet's pod-resources",
)
MEMORY_PEAK = Metric(
    "gpuslice_container_memory_peak_bytes",
    _GAUGE,
    CONTAINER,
    "The most memory the container held at once since it started.",
    "the interposer's region",
)
MEMORY_REFUSED = Metric(
    "gpuslice_container_memory_refused_total",
    _COUNTER,
    CONTAINER,
    "Allocations refused because they would have passed the limit.",
    "the interposer's region",
)
SM_UTILIZATION = Metric(
    "gpuslice_container_sm_utilization_ratio",
    _GAUGE,
    CONTAINER,
    "Part of the card's time in which the container's kernels ran.",
    "NVML process utilization",
)
SM_SECONDS = Metric(
    "gpuslice_container_sm_seconds_total",
    _COUNTER,
    CONTAINER,
    "Card time used: the utilization summed over time since the exporter first saw the container.",
    "NVML process utilization",
)
COMPUTE_SHARE = Metric(
    "gpuslice_container_compute_share_ratio",
    _GAUGE,
    CONTAINER,
    "Part of the card's compute that the container may use; absent without a limit.",
    "the agent's limits file",
)
THROTTLED = Metric(
    "gpuslice_container_throttled_seconds_total",
    _COUNTER,
    CONTAINER,
    "How long launches waited because the compute share was used up.",
    "the interposer's region",
)
PROCESSES = Metric(
    "gpuslice_container_processes", _GAUGE, CONTAINER, "Processes of the container on the card.", "NVML"
)
POD_LABELS = Metric(
    "gpuslice_pod_labels",
    _GAUGE,
    ("node", "namespace", "pod", "label_*"),
    "Labels of pods with a card, those that the allow-list names; always 1.",
    "the API server",
)

# -- what belongs to nobody ------------------------------------------------------------------------------
UNATTRIBUTED_MEMORY = Metric(
    "gpuslice_unattributed_memory_bytes",
    _GAUGE,
    (*CARD, "reason"),
    "Used memory of the card that no container holds: host, unknown_container, gone, or the driver's own.",
    "the card's used memory less the containers'",
)
UNATTRIBUTED_SM = Metric(
    "gpuslice_unattributed_sm_utilization_ratio",
    _GAUGE,
    (*CARD, "reason"),
    "Card time used by processes outside known containers.",
    "NVML process utilization",
)
UNATTRIBUTED_PROCESSES = Metric(
    "gpuslice_unattributed_processes",
    _GAUGE,
    (*CARD, "reason"),
    "Processes on the card outside known containers.",
    "NVML process lists",
)
UNAVAILABLE = Metric(
    "gpuslice_unavailable",
    _GAUGE,
    (*CARD, "what", "reason"),
    "Series that are absent because their value could not be read, and why.",
)

# -- the exporter ----------------------------------------------------------------------------------------
BUILD_INFO = Metric(
    "gpuslice_exporter_build_info", _GAUGE, ("version",), "Version of the exporter; always 1."
)
COLLECTOR_SUCCESS = Metric(
    "gpuslice_exporter_collector_success",
    _GAUGE,
    (*NODE, "collector"),
    "Whether the last reading of this source went well.",
)
COLLECTOR_DURATION = Metric(
    "gpuslice_exporter_collector_duration_seconds",
    _GAUGE,
    (*NODE, "collector"),
    "How long the last reading of this source took.",
)
COLLECTOR_ERRORS = Metric(
    "gpuslice_exporter_collector_errors_total",
    _COUNTER,
    (*NODE, "collector"),
    "Readings of this source that failed.",
)
SAMPLE_AGE = Metric(
    "gpuslice_exporter_sample_age_seconds",
    _GAUGE,
    NODE,
    "Age of what this page shows of the cards; absent before the first sample.",
)
ATTRIBUTION = Metric(
    "gpuslice_exporter_attribution_available",
    _GAUGE,
    NODE,
    "Whether processes can be given to containers on every card.",
)
DEVICES = Metric("gpuslice_exporter_devices", _GAUGE, NODE, "Cards that answer.", "NVML")
DEVICES_EXPECTED = Metric(
    "gpuslice_exporter_devices_expected", _GAUGE, NODE, "The most cards seen since the start.", "NVML"
)
FIELD_SUPPORTED = Metric(
    "gpuslice_exporter_field_supported",
    _GAUGE,
    (*NODE, "field"),
    "Whether any card gives a field of the counter file.",
)
CONFIG_SUCCESS = Metric(
    "gpuslice_exporter_config_last_reload_successful",
    _GAUGE,
    NODE,
    "Whether the counter file could be read when it last changed; the one before stays in force if not.",
)
CONFIG_PROBLEMS = Metric(
    "gpuslice_exporter_config_problems",
    _GAUGE,
    NODE,
    "Lines of the counter file that are left out because they cannot be understood.",
)
SERIES = Metric("gpuslice_exporter_series", _GAUGE, NODE, "Series on this page but the exporter's own.")

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics that belong together in the documentation."""

    title: str
    metrics: tuple[Metric, ...]


def groups() -> tuple[Group, ...]:
    """The catalogue in the order of the documentation."""
    return (
        Group("Card", _starting("gpuslice_gpu_")),
        Group("MIG device", _starting("gpuslice_mig_")),
        Group("Container", (*_starting("gpuslice_container_"), *_starting("gpuslice_pod_"))),
        Group("Unattributed", (*_starting("gpuslice_unattributed_"), UNAVAILABLE)),
        Group("Exporter", _starting("gpuslice_exporter_")),
    )


def _starting(prefix: str) -> tuple[Metric, ...]:
    return tuple(metric for metric in METRICS if metric.name.startswith(prefix))
