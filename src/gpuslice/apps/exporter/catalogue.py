"""Every metric of our own: name, type, labels, meaning. The only place where a metric is defined.

The page, the documentation, the dashboards and the alerts all take metrics from here; tests compare them.
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
    """One family. `source` says briefly where the value comes from, for the documentation."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str
    source: str = "the exporter"

    def family(self) -> Family:
        return Family(self.name, self.kind, self.help)


# -- the card --------------------------------------------------------------------------------------------
GPU_UP = Metric(
    "gpuslice_gpu_up", _GAUGE, CARD, "Whether the card responds; 0 if it is present but does not.", "NVML"
)
GPU_INFO = Metric(
    "gpuslice_gpu_info",
    _GAUGE,
    (*CARD, "model", "pci_bus_id", "driver_version"),
    "Static information about the card; always 1.",
    "NVML",
)
GPU_MEMORY_TOTAL = Metric(
    "gpuslice_gpu_memory_total_bytes", _GAUGE, CARD, "Memory of the card.", "NVML, memory info"
)
GPU_MEMORY_USED = Metric(
    "gpuslice_gpu_memory_used_bytes",
    _GAUGE,
    CARD,
    "Memory in use on the card, excluding what the driver reserves for itself.",
    "NVML, memory info",
)
GPU_MEMORY_RESERVED = Metric(
    "gpuslice_gpu_memory_reserved_bytes",
    _GAUGE,
    CARD,
    "Memory reserved by the driver and firmware.",
    "NVML, memory info v2 (driver 510 and later)",
)
GPU_MEMORY_ALLOCATED = Metric(
    "gpuslice_gpu_memory_allocated_bytes",
    _GAUGE,
    CARD,
    "Memory of the card that is allocated to containers; a whole card counts in full.",
    "kubelet's pod-resources",
)
GPU_ALLOCATE_MODE = Metric(
    "gpuslice_gpu_allocate_mode",
    _GAUGE,
    CARD,
    "How the card is allocated: 0 not at all, 1 whole, 2 in parts (shares or MIG devices).",
    "kubelet's pod-resources",
)
GPU_UTILIZATION = Metric(
    "gpuslice_gpu_utilization_ratio",
    _GAUGE,
    CARD,
    "Fraction of the driver's last sample period in which any kernel ran on the card.",
    "NVML, utilization rates",
)
GPU_TEMPERATURE = Metric("gpuslice_gpu_temperature_celsius", _GAUGE, CARD, "Temperature of the card.", "NVML")
GPU_TEMPERATURE_MARGIN = Metric(
    "gpuslice_gpu_temperature_margin_celsius",
    _GAUGE,
    CARD,
    "Margin to the temperature at which the card slows down.",
    "NVML, slowdown threshold less temperature",
)
GPU_POWER = Metric("gpuslice_gpu_power_watts", _GAUGE, CARD, "Power draw of the card.", "NVML")
GPU_POWER_LIMIT = Metric(
    "gpuslice_gpu_power_limit_watts", _GAUGE, CARD, "Power limit in effect.", "NVML, enforced limit"
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
    "Time in which the card's clocks were reduced, by reason.",
    "NVML field values",
)
GPU_PCIE = Metric(
    "gpuslice_gpu_pcie_bytes_total",
    _COUNTER,
    (*CARD, "direction"),
    "Bytes transferred over PCIe since the exporter started, as seen by the card: tx or rx.",
    "NVML's hardware counters (Hopper and later), summed: its own totals wrap around after 4 GiB",
)
GPU_NVLINK = Metric(
    "gpuslice_gpu_nvlink_bytes_total",
    _COUNTER,
    (*CARD, "direction"),
    "Bytes transferred over all NVLinks, as seen by the card: tx or rx.",
    "NVML field values",
)
GPU_RECOVERY = Metric(
    "gpuslice_gpu_recovery_action",
    _GAUGE,
    CARD,
    "What the driver requests: 0 nothing, 1 reset, 2 reboot, 3 drain peers, 4 drain and reset.",
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
    "Whether remapping a faulty memory row failed.",
    "NVML, remapped rows (Ampere and later)",
)
XID_ERRORS = Metric(
    "gpuslice_gpu_xid_errors_total",
    _COUNTER,
    (*CARD, "xid"),
    "Xid errors that the driver reported since the exporter started; known codes start at 0.",
    "NVML events",
)
XID_LAST = Metric(
    "gpuslice_gpu_xid_last_timestamp_seconds",
    _GAUGE,
    (*CARD, "xid"),
    "When the code was last reported, in seconds since the epoch; absent before the first.",
    "NVML events",
)

# -- a MIG device of a card --------------------------------------------------------------------------------
MIG_INFO = Metric(
    "gpuslice_mig_info",
    _GAUGE,
    (*MIG, "mig_profile", "gpu_instance", "compute_instance"),
    "Static information about a MIG device; always 1.",
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
    "Fraction of time in which the instance's engine was busy, relative to the instance.",
    "NVML, GPM (Hopper and later)",
)
MIG_SM_BUSY = Metric(
    "gpuslice_mig_sm_active_ratio",
    _GAUGE,
    MIG,
    "Fraction of time in which the instance's SMs were busy, relative to the instance.",
    "NVML, GPM (Hopper and later)",
)

# -- a container on a card -------------------------------------------------------------------------------
CONTAINER_INFO = Metric(
    "gpuslice_container_info",
    _GAUGE,
    (*CONTAINER, "pod_uid", "container_id", "resource", "share_mode", "workload_kind", "workload"),
    "Slowly changing information about a container, for joins; always 1. The workload is the pod's "
    "outermost known owner: the Deployment of its ReplicaSet, the CronJob of its Job, or itself.",
    "kubelet and the API server",
)
CONTAINER_MIG = Metric(
    "gpuslice_container_mig_info",
    _GAUGE,
    (*CONTAINER, "mig_uuid"),
    "Each MIG device that a container holds, for joins; always 1.",
    "kubelet's pod-resources",
)
MEMORY_USED = Metric(
    "gpuslice_container_memory_used_bytes",
    _GAUGE,
    CONTAINER,
    "Memory of the card that the container's processes hold; 0 if it has a card but holds no memory.",
    "NVML process lists and cgroups; the interposer's region where NVML does not tell",
)
MEMORY_LIMIT = Metric(
    "gpuslice_container_memory_limit_bytes",
    _GAUGE,
    CONTAINER,
    "Maximum memory of the card that the container can use; absent if no limit is enforced.",
    "the agent's limits file; the size of a whole card or of MIG devices",
)
MEMORY_ALLOCATED = Metric(
    "gpuslice_container_memory_allocated_bytes",
    _GAUGE,
    CONTAINER,
    "Memory of the card that is allocated to the container.",
    "kubelet's pod-resources",
)
MEMORY_BORROWED = Metric(
    "gpuslice_container_memory_borrowed_bytes",
    _GAUGE,
    CONTAINER,
    "Memory in use beyond the request, lent.",
)
MEMORY_PEAK = Metric(
    "gpuslice_container_memory_peak_bytes",
    _GAUGE,
    CONTAINER,
    "Peak memory that the container held since it started.",
    "the interposer's region",
)
MEMORY_REFUSED = Metric(
    "gpuslice_container_memory_refused_total",
    _COUNTER,
    CONTAINER,
    "Allocations refused because they would have exceeded the limit.",
    "the interposer's region",
)
SM_UTILIZATION = Metric(
    "gpuslice_container_sm_utilization_ratio",
    _GAUGE,
    CONTAINER,
    "Fraction of the card's time that the container's kernels had.",
    "NVML process utilization; the interposer's region where processes take turns",
)
SM_SECONDS = Metric(
    "gpuslice_container_sm_seconds_total",
    _COUNTER,
    CONTAINER,
    "Card time used: the utilization summed over time since the exporter first saw the container.",
    "as above",
)
LAST_ACTIVE = Metric(
    "gpuslice_container_last_active_timestamp_seconds",
    _GAUGE,
    CONTAINER,
    "When the container last computed on the card, or was first seen, by the node's clock; kept over "
    "restarts of the exporter with --state-dir.",
    "as above",
)
COMPUTE_SHARE = Metric(
    "gpuslice_container_compute_share_ratio",
    _GAUGE,
    CONTAINER,
    "Fraction of the card's compute that the container may use; absent without a limit.",
    "the agent's limits file",
)
THROTTLED = Metric(
    "gpuslice_container_throttled_seconds_total",
    _COUNTER,
    CONTAINER,
    "How long launches waited because the compute share was used up.",
    "the interposer's region",
)
PROCESSES = Metric("gpuslice_container_processes", _GAUGE, CONTAINER, "Its processes on the card.", "NVML")
POD_LABELS = Metric(
    "gpuslice_pod_labels",
    _GAUGE,
    ("node", "namespace", "pod", "label_*"),
    "Labels of pods with a card, as selected by the allow-list; always 1.",
    "the API server",
)

# -- what belongs to nobody ------------------------------------------------------------------------------
UNATTRIBUTED_MEMORY = Metric(
    "gpuslice_unattributed_memory_bytes",
    _GAUGE,
    (*CARD, "reason"),
    "Used memory of the card outside known containers: host, unknown_container, gone, or the driver's own.",
    "the card's used memory less the containers'",
)
UNATTRIBUTED_SM = Metric(
    "gpuslice_unattributed_sm_utilization_ratio",
    _GAUGE,
    (*CARD, "reason"),
    "Fraction of the card's time that processes outside known containers had.",
    "NVML process utilization, divided as for containers",
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
BUILD_INFO = Metric("gpuslice_exporter_build_info", _GAUGE, ("version",), "The exporter's version; always 1.")
COLLECTOR_SUCCESS = Metric(
    "gpuslice_exporter_collector_success",
    _GAUGE,
    (*NODE, "collector"),
    "Whether the last reading of this source succeeded.",
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
TIME = Metric(
    "gpuslice_exporter_time_seconds",
    _GAUGE,
    NODE,
    "The node's clock, to subtract other timestamps of this page from.",
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
    "Whether processes can be attributed to containers on every card.",
)
DEVICES = Metric("gpuslice_exporter_devices", _GAUGE, NODE, "Cards that respond.", "NVML")
DEVICES_EXPECTED = Metric(
    "gpuslice_exporter_devices_expected",
    _GAUGE,
    NODE,
    "Maximum number of cards seen since the start.",
    "NVML",
)
FIELD_SUPPORTED = Metric(
    "gpuslice_exporter_field_supported",
    _GAUGE,
    (*NODE, "field"),
    "Whether any card provides a field of the counter file.",
)
CONFIG_SUCCESS = Metric(
    "gpuslice_exporter_config_last_reload_successful",
    _GAUGE,
    NODE,
    "Whether the counter file could be read when it last changed; if not, the previous one stays in use.",
)
CONFIG_PROBLEMS = Metric(
    "gpuslice_exporter_config_problems",
    _GAUGE,
    NODE,
    "Lines of the counter file that are ignored because they cannot be understood.",
)
SERIES = Metric(
    "gpuslice_exporter_series", _GAUGE, NODE, "Series on this page, excluding the exporter's own."
)

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
