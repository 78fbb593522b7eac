"""What can be set about the exporter: dcgm-exporter's settings under its names, and our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from gpuslice.apps.settings import Kubeconfig, Settings, SettingsError, about
from gpuslice.core.errors import shown

Types = Literal["corrected", "upstream"]
PodLabels = Literal["auto", "off", "exclusive"]
HostnameLabel = Literal["hostname", "Hostname"]
PodSource = Literal["auto", "api", "logs", "off"]
MOST_DEVICES = 4095
"""Highest number of a card or MIG instance that is understood; no node has nearly as many."""


class ExporterSettings(Settings, frozen=True, kw_only=True):
    """Settings of ``gpuslice exporter``."""

    collectors: Annotated[
        str,
        about(
            "Counter file in dcgm-exporter's CSV format; empty for the built-in one. Changes are picked up.",
            env=("DCGM_EXPORTER_COLLECTORS",),
        ),
    ] = ""
    config_file: Annotated[
        str,
        about(
            "dcgm-exporter's YAML file, version 1: counters and how often to read them. Flags win.",
            env=("DCGM_EXPORTER_CONFIG_FILE",),
        ),
    ] = ""
    address: Annotated[
        str, about("Address to listen on; port 0 lets the system choose.", env=("DCGM_EXPORTER_LISTEN",))
    ] = ":9400"
    collect_interval: Annotated[
        int,
        about(
            "Time between two samples of the cards. Raise it when the driver is slow.",
            unit="ms",
            env=("DCGM_EXPORTER_INTERVAL",),
            ge=100,
        ),
    ] = 1000
    kubernetes: Annotated[
        bool,
        about("Report which pod holds and uses what.", env=("DCGM_EXPORTER_KUBERNETES",)),
    ] = True
    use_old_namespace: Annotated[
        bool,
        about(
            "Label names of dcgm-exporter 1.x (uuid, pod_name, …) on DCGM series.",
            env=("DCGM_EXPORTER_USE_OLD_NAMESPACE",),
        ),
    ] = False
    configmap_data: Annotated[
        str,
        about(
            'ConfigMap with the counters under the key "metrics", as NAMESPACE:NAME; wins over the file.',
            env=("DCGM_EXPORTER_CONFIGMAP_DATA",),
        ),
    ] = "none"
    devices: Annotated[
        str,
        about(
            'Which cards: "f" for all, with divided cards by MIG instance; "g" for cards or "i" for '
            'instances, with a list if not all: "g:0,2-3".',
            env=("DCGM_EXPORTER_DEVICES_STR",),
        ),
    ] = "f"
    no_hostname: Annotated[
        bool, about("Omit the label hostname from DCGM series.", env=("DCGM_EXPORTER_NO_HOSTNAME",))
    ] = False
    web_config_file: Annotated[
        str,
        about(
            "TLS and basic authentication, in the file format of the Prometheus ecosystem.",
            env=("DCGM_EXPORTER_WEB_CONFIG_FILE",),
        ),
    ] = ""
    xid_count_window_size: Annotated[
        int,
        about(
            "Window of DCGM_EXP_XID_ERRORS_COUNT.",
            unit="ms",
            env=("DCGM_EXPORTER_XID_COUNT_WINDOW_SIZE",),
            ge=1,
        ),
    ] = 300_000
    clock_events_count_window_size: Annotated[
        int,
        about(
            "Window of DCGM_EXP_CLOCK_EVENTS_COUNT.",
            unit="ms",
            env=("DCGM_EXPORTER_CLOCK_EVENTS_COUNT_WINDOW_SIZE",),
            ge=1,
        ),
    ] = 300_000
    replace_blanks_in_model_name: Annotated[
        bool,
        about(
            "Replace blanks in the model name: Tesla-T4 instead of Tesla T4.",
            env=("DCGM_EXPORTER_REPLACE_BLANKS_IN_MODEL_NAME",),
        ),
    ] = False
    debug: Annotated[bool, about("Log at level debug.", env=("DCGM_EXPORTER_DEBUG",))] = False
    log_format: Annotated[
        str, about("Accepted for compatibility; logs are JSON.", env=("DCGM_EXPORTER_LOG_FORMAT",))
    ] = "json"
    kubernetes_enable_pod_labels: Annotated[
        bool,
        about(
            "Export the labels of pods that hold a card, as gpuslice_pod_labels.",
            env=("DCGM_EXPORTER_KUBERNETES_ENABLE_POD_LABELS",),
        ),
    ] = False
    kubernetes_enable_pod_uid: Annotated[
        bool,
        about(
            "Add the label pod_uid to DCGM series with pod labels.",
            env=("DCGM_EXPORTER_KUBERNETES_ENABLE_POD_UID",),
        ),
    ] = False
    kubernetes_pod_label_allowlist_regex: Annotated[
        tuple[str, ...],
        about(
            "Pod labels to export: those whose name matches one of these regular expressions; empty for all.",
            env=("DCGM_EXPORTER_KUBERNETES_POD_LABEL_ALLOWLIST_REGEX",),
        ),
    ] = ()
    kubernetes_virtual_gpus: Annotated[
        bool,
        about(
            "On cards that several containers share, export DCGM series for each container, with its own "
            "memory and utilization; everything else is a copy of the card's.",
            env=("KUBERNETES_VIRTUAL_GPUS",),
        ),
    ] = False
    kubernetes_enable_dra: Annotated[
        bool,
        about("Add labels dra_* to DCGM series of cards that a claim holds.", env=("KUBERNETES_ENABLE_DRA",)),
    ] = False
    hpc_job_mapping_dir: Annotated[
        str,
        about(
            "Folder of files <card> or <card>.<instance>, with one job id per line, for the label hpc_job.",
            env=("DCGM_HPC_JOB_MAPPING_DIR",),
        ),
    ] = ""
    web_systemd_socket: Annotated[
        bool,
        about(
            "Use the listening socket that systemd passes, instead of the address.",
            env=("DCGM_EXPORTER_SYSTEMD_SOCKET",),
        ),
    ] = False
    pod_resources_kubelet_socket: Annotated[
        str, about("kubelet's pod-resources socket.", env=("DCGM_POD_RESOURCES_KUBELET_SOCKET",))
    ] = "/var/lib/kubelet/pod-resources/kubelet.sock"
    nvidia_resource_names: Annotated[
        tuple[str, ...],
        about("Further resource names whose devices are whole cards.", env=("NVIDIA_RESOURCE_NAMES",)),
    ] = ()

    node_name: Annotated[
        str,
        about("Name of the node for the API server; empty for the host name.", env=("NODE_NAME",)),
    ] = ""
    kubeconfig: Kubeconfig = ""
    pod_source: Annotated[
        PodSource,
        about(
            "Where the exporter learns of pods: the API server, the names of log folders (no permissions "
            "needed), auto for the first that is available, or off."
        ),
    ] = "auto"
    pod_logs: Annotated[str, about("kubelet's folder of pod logs, for pod source logs.")] = "/var/log/pods"
    proc: Annotated[str, about("The host's /proc. With hostPID this is the container's own /proc.")] = "/proc"
    root: Annotated[
        str, about("The agent's folder on this host, with limits and the library's accounts.")
    ] = "/var/lib/gpuslice"
    state_dir: Annotated[
        str,
        about("Folder that keeps, over restarts, when containers were last active; empty: it is forgotten."),
    ] = ""
    memory_unit: Annotated[
        Literal["GiB", "MiB"], about("Size of one aliyun.com/gpu-mem; must match the agent's setting.")
    ] = "GiB"
    pod_resources_interval_s: Annotated[
        float, about("How often to ask kubelet for its device assignments.", unit="s", ge=0.1)
    ] = 5.0
    nvml_library: Annotated[str, about("Path of libnvidia-ml.so.1, if the loader does not find it.")] = ""
    driver_timeout_s: Annotated[float, about("How long a sample may take.", unit="s", ge=0.1)] = 30.0
    stale_after_s: Annotated[
        float,
        about(
            "How old a sample may become before its values are no longer exported; 0 for ten intervals.",
            unit="s",
            ge=0,
        ),
    ] = 0.0
    metric_types: Annotated[
        Types,
        about("Types of DCGM series: corrected, if the counter file calls a rate a counter, or as written."),
    ] = "corrected"
    compat_pod_labels: Annotated[
        PodLabels,
        about(
            "Add the labels pod, namespace and container to DCGM series of cards that exactly one container "
            "holds, for dashboards made for dcgm-exporter. Such series change their identity with the pod. "
            "auto: if requested as in dcgm-exporter, by -k or DCGM_EXPORTER_KUBERNETES."
        ),
    ] = "auto"
    compat_hostname_label: Annotated[
        HostnameLabel,
        about("Name of the label for the host. dcgm-exporter up to 4.8.2 calls it Hostname."),
    ] = "hostname"
    ack_metrics: Annotated[
        bool, about("Also export the vendor's DCGM_CUSTOM_* metrics, for dashboards made for them.")
    ] = False
    ack_node_pool: Annotated[str, about("Value of the label NodePoolId of the DCGM_CUSTOM_* metrics.")] = ""
    legacy_address: Annotated[
        str,
        about('Address that serves the six nvidia_gpu_* gauges, such as ":9445"; empty for none.'),
    ] = ""
    max_series: Annotated[
        int,
        about("Maximum number of container series on a page; the rest are counted as unavailable.", ge=100),
    ] = 100_000

    def __post_init__(self) -> None:
        parse_devices(self.devices)
        parse_address(self.address)
        if self.legacy_address:
            parse_address(self.legacy_address)

        namespace, _, name = self.configmap_data.partition(":")
        if self.counters_of_config_map and not (namespace and name):
            raise SettingsError(f'configmap_data is "{self.configmap_data}", must be NAMESPACE:NAME')

    @property
    def counters_of_config_map(self) -> bool:
        return self.configmap_data not in {"", "none", "undefined"}

    @property
    def interval_s(self) -> float:
        return self.collect_interval / 1000

    @property
    def stale_s(self) -> float:
        return self.stale_after_s or max(10 * self.interval_s, 10.0)


def parse_address(text: str) -> tuple[str, int]:
    """``host:port``, ``:port`` or ``[ipv6]:port``. Raises `SettingsError`."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise SettingsError(f'address is "{shown(text)}", must be host:port or :port')
    return host.strip("[]") or "::", int(port)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which cards and MIG instances are shown. None stands for all of them.

    `whole`: cards as such; `divided`: divided cards by instance, which "f" wants instead of them.
    """

    whole: bool = True
    divided: bool = True
    cards: frozenset[int] | None = None
    instances: frozenset[int] | None = None


def parse_devices(text: str) -> Chosen:
    """dcgm-exporter's device option. Raises `SettingsError`."""
    kind, separator, numbers = text.strip().partition(":")
    if kind == "f" and not separator:
        return Chosen()
    if kind not in {"g", "i"} or (separator and not numbers):
        raise SettingsError(
            f'devices is "{shown(text)}", must be "f", or "g" or "i" with or without a list: g:0,2-3'
        )
    listed: set[int] = set()
    for part in numbers.split(",") if numbers else ():
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise SettingsError(
                f'devices is "{shown(text)}": "{shown(part)}" must be a number or a range such as 2-3'
            )
        if max(len(first), len(last)) > 9 or max(int(first), int(last or first)) > MOST_DEVICES:
            raise SettingsError(
                f'devices is "{shown(text)}": "{shown(part)}" must not go past {MOST_DEVICES}'
            )
        listed |= set(range(int(first), int(last or first) + 1))
    chosen = frozenset(listed) if numbers else None
    if kind == "g":
        return Chosen(divided=False, cards=chosen)
    return Chosen(whole=False, instances=chosen)
