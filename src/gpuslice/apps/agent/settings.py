"""What can be set about the node agent, and about its switch between shared and whole cards."""

from __future__ import annotations

from typing import Annotated, Literal

from gpuslice.apps.settings import (
    Host,
    Kubeconfig,
    LogLevel,
    NamesSetting,
    OtlpEndpoint,
    OtlpHeaders,
    Settings,
    SettingsError,
    about,
)
from gpuslice.core.contract import LABEL_SHARED


class AgentSettings(Settings, frozen=True, kw_only=True):
    """Settings of ``gpuslice agent``."""

    node_name: Annotated[str, about("Name of the node that the agent runs on.", env=("NODE_NAME",))] = ""
    kubeconfig: Kubeconfig = ""
    node_label: Annotated[
        str,
        about(
            "Label whose value true makes a node share its cards. Without it the agent removes its "
            "resources from the node when it stops."
        ),
    ] = ""
    new_pods: Annotated[
        bool,
        about(
            "Give parts of cards to new pods. Turn it off where something else gives out whole cards; "
            "pods that hold a part keep it."
        ),
    ] = True
    memory_unit: Annotated[
        str,
        about(
            "Size of one aliyun.com/gpu-mem: GiB or MiB (small cards only). A change takes effect once "
            "no pod of the node uses a card."
        ),
    ] = "GiB"
    resource_names: NamesSetting = "aliyun.com"
    device_plugin_folder: Annotated[str, about("kubelet's folder of plugin sockets.")] = (
        "/var/lib/kubelet/device-plugins"
    )
    pod_resources_socket: Annotated[str, about("kubelet's pod-resources socket.")] = (
        "/var/lib/kubelet/pod-resources/kubelet.sock"
    )
    root: Annotated[
        str, about("Folder for the library and the containers' limits, as the agent sees it.")
    ] = "/var/lib/gpuslice"
    host_root: Annotated[str, about("The same folder as the host sees it, if its path differs.")] = ""
    library: Annotated[
        str, about("libgpuslice.so to install below the root at the start; empty when something else does.")
    ] = ""
    install_library: Annotated[
        bool,
        about(
            "Install the library. If off, `gpuslice install-library` of the same version has to do it first."
        ),
    ] = True
    nvml_library: Annotated[str, about("Path of libnvidia-ml.so.1, if the loader does not find it.")] = ""
    recording: Annotated[str, about("JSON recording of cards to use instead of NVML, for tests.")] = ""
    port: Annotated[
        int, about("TCP port for health, metrics and state; 0 lets the system choose.", ge=0, le=65535)
    ] = 12346
    host: Host = "::"
    log_level: LogLevel = "info"
    match_wait_s: Annotated[
        float,
        about(
            "How long a call from kubelet, which is blocked meanwhile, may wait for its pod. Keep it short.",
            unit="s",
            ge=0,
            le=10,
        ),
    ] = 1.0
    reconcile_s: Annotated[
        float, about("How often kubelet's device assignments are read.", unit="s", ge=0.1)
    ] = 5.0
    inventory_s: Annotated[
        float, about("How often to check whether the cards still answer.", unit="s", ge=0.1)
    ] = 5.0
    driver_timeout_s: Annotated[float, about("How long the driver may take to answer.", unit="s", ge=0.1)] = (
        10.0
    )
    health_check: Annotated[
        bool, about("Take cards with critical Xid errors out of use. Lost cards always are.")
    ] = True
    recovery_s: Annotated[
        float,
        about(
            "How long after a critical Xid error a card is given out again; doubled with each further "
            "one. 0 means not before a restart with an empty ConfigMap.",
            unit="s",
            ge=0,
        ),
    ] = 600.0
    unhealthy_file: Annotated[
        str, about('Operator\'s file of cards not to be used: {"index":[],"uuid":[]}.')
    ] = "/etc/nvidia-device-plugin/unhealthyDevices.json"
    hot_reload_isolation: Annotated[
        bool,
        about("Apply changes of the isolation label to new containers at once, not only at the start."),
    ] = False
    place_unplaced: Annotated[
        bool,
        about(
            "Place pods that no extender placed, also on nodes with several cards. Off, because the card "
            "may be another pod's."
        ),
    ] = False
    legacy_poison_env: Annotated[
        bool,
        about(
            "Answer what cannot be granted with the vendor's NVIDIA_VISIBLE_DEVICES=no-gpu-has-…-to-run. "
            "Off, because such a pod never recovers."
        ),
    ] = False
    cdi_kind: Annotated[
        str, about('Also name cards to the runtime by CDI, e.g. "nvidia.com/gpu"; off if empty.')
    ] = ""
    dra_plugins: Annotated[
        str,
        about("kubelet's folder of DRA driver sockets, for claims."),
    ] = "/var/lib/kubelet/plugins"
    dra_registry: Annotated[str, about("Folder in which kubelet looks for such drivers.")] = (
        "/var/lib/kubelet/plugins_registry"
    )
    cdi_folder: Annotated[
        str,
        about(
            "Where the container runtime reads CDI files from: one of its cdi_spec_dirs, emptied by a reboot."
        ),
    ] = "/var/run/cdi"
    claim_slots: Annotated[int, about("How many claims may share one card at most.", ge=1)] = 48
    allow_cgpu_disable: Annotated[
        bool,
        about(
            "Let CGPU_DISABLE=true switch a container's memory limit off; set the webhook's as well. "
            "Off, because anyone who may create pods could then take a whole card."
        ),
    ] = False
    watchdog: Annotated[
        Literal["off", "warn", "stop"],
        about(
            "What to do if a container holds more of a card than its limit: warn by an event, or also "
            "stop the processes that hold the excess (SIGTERM, SIGKILL 5 s later). Needs the host's PID "
            "namespace."
        ),
    ] = "warn"
    driver_limits: Annotated[
        bool,
        about(
            "Let the driver enforce memory limits where each card proves it: R615 and later, cgroup v2, "
            "no MIG. Needs a privileged agent."
        ),
    ] = True
    driver_soft_limit: Annotated[
        bool,
        about(
            "Also give the driver the guaranteed amount as a soft limit, for MPS alone. Off, because the "
            "kernel's dmem controller may leave it on the cgroups above for good."
        ),
    ] = False
    library_beside_driver: Annotated[
        bool,
        about(
            "Load the library also where the driver enforces the limits, for programs that allocate "
            "managed memory."
        ),
    ] = False
    cgroup_folder: Annotated[str, about("The machine's cgroups (version 2), as the agent sees them.")] = (
        "/sys/fs/cgroup"
    )
    region_file_system: Annotated[
        bool,
        about(
            "Give each container's region a small file system in memory, which limits what it can write "
            "there. Needs CAP_SYS_ADMIN and a root mounted with Bidirectional propagation."
        ),
    ] = False
    parking_host_mib: Annotated[
        int,
        about(
            "Host memory of this node that parked containers may take together; 0 parks nothing. Needs "
            "watchdog=stop, cgroup v2, CAP_SYS_PTRACE, the host's PID namespace and libcuda.",
            unit="MiB",
            ge=0,
        ),
    ] = 0
    sweep_after_s: Annotated[
        float,
        about("How old a container's unused folder must be before it is removed.", unit="s", ge=1),
    ] = 120.0

    otlp_endpoint: OtlpEndpoint = ""
    otlp_headers: OtlpHeaders = ""

    def __post_init__(self) -> None:
        if not self.node_name:
            raise SettingsError("Please set env NODE_NAME")


class SwitchSettings(Settings, frozen=True, kw_only=True):
    """Settings of ``gpuslice switch``."""

    to: Annotated[
        Literal["shared", "exclusive"],
        about("shared removes the device plugin for whole cards from the node, exclusive restores it."),
    ] = "shared"
    node_name: Annotated[str, about("Name of the node.", env=("NODE_NAME",))] = ""
    kubeconfig: Kubeconfig = ""
    manifest: Annotated[str, about("Manifest of that plugin, if it is a static pod.")] = (
        "/etc/kubernetes/manifests/nvidia-device-plugin.yml"
    )
    backup_folder: Annotated[str, about("Where the manifest is kept meanwhile.")] = (
        "/etc/kubernetes/manifests-backup"
    )
    every_s: Annotated[float, about("How often to check the node.", unit="s", ge=0.01)] = 10.0
    port: Annotated[int, about("TCP port for health checks; 0 lets the system choose.", ge=0, le=65535)] = (
        12347
    )
    host: Host = "::"
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        if not self.node_name:
            raise SettingsError("Please set env NODE_NAME")


class KeepOffSettings(Settings, frozen=True, kw_only=True):
    """Settings of ``gpuslice keep-off``."""

    daemon_set: Annotated[str, about("The DaemonSet, as NAMESPACE/NAME.")] = ""
    node_label: Annotated[str, about("Label that makes a node share its cards if its value is true.")] = (
        LABEL_SHARED
    )
    back: Annotated[bool, about("Let it run on all nodes again, as before.")] = False
    kubeconfig: Kubeconfig = ""

    def __post_init__(self) -> None:
        namespace, _, name = self.daemon_set.partition("/")
        if not namespace or not name:
            raise SettingsError(f'--daemon-set must be NAMESPACE/NAME; it is "{self.daemon_set}"')


class InstallLibrarySettings(Settings, frozen=True, kw_only=True):
    """Settings of ``gpuslice install-library``."""

    library: Annotated[str, about("libgpuslice.so to install below the root.")] = ""
    root: Annotated[str, about("Folder for the library and the containers' limits.")] = "/var/lib/gpuslice"
    every_s: Annotated[float, about("How often to check the files.", unit="s", ge=0.01)] = 3.0
    sweep_after_s: Annotated[
        float, about("How long a version that no container uses is kept.", unit="s", ge=1)
    ] = 3600.0
    port: Annotated[int, about("TCP port for health checks; 0 lets the system choose.", ge=0, le=65535)] = (
        12348
    )
    host: Host = "::"
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        if not self.library:
            raise SettingsError("--library must be the path of libgpuslice.so")


class InstallExtenderSettings(Settings, frozen=True, kw_only=True):
    """Settings of ``gpuslice install-extender``."""

    node_name: Annotated[str, about("Name of the node.", env=("NODE_NAME",))] = ""
    section: Annotated[str, about("File with the extender's section of a scheduler's configuration.")] = ""
    certificates: Annotated[
        str,
        about("Folder with ca.crt, tls.crt and tls.key, with which the scheduler connects to the extender."),
    ] = ""
    folder: Annotated[str, about("The host's /etc/kubernetes: the path must be the same here and there.")] = (
        "/etc/kubernetes"
    )
    manifest: Annotated[str, about("The scheduler's file in the folder's manifests.")] = "kube-scheduler.yaml"
    back: Annotated[bool, about("Restore the scheduler's old manifest, byte for byte.")] = False
    timeout_s: Annotated[
        float, about("How long the scheduler may take to become healthy.", unit="s", ge=0.1)
    ] = 120.0
    steady_s: Annotated[float, about("How long it must stay healthy.", unit="s", ge=0.01)] = 10.0
    kubeconfig: Kubeconfig = ""
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        if not self.node_name:
            raise SettingsError("Please set env NODE_NAME")
        if not self.section and not self.back:
            raise SettingsError(
                "--section must be a file with the extender's section, unless --back is given"
            )
