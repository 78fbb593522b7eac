"""The settings of one simulated kubelet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from simcluster.kubelet.topology import TopologyManager


@dataclass(frozen=True, slots=True)
class KubeletSettings:
    """One node. `root` plays /var/lib/kubelet; everything the kubelet writes is under it.

    `speed_up` divides the waits of crash and image back-off, so that a demo need not take minutes.
    `environ` is added to every container, so that its processes can be told from others.
    `api_server`: its URL, for the pods' service accounts; pods get no access without it.
    `node_status_s` is how often the node status is compared with what was reported (10 s).
    `driver` is the folder of the simulated driver, `gpu_state` its state file; None on a node without cards.
    """

    name: str
    root: Path
    internal_ip: str = "127.0.0.1"
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Mapping[str, str], ...] = ()
    capacity: Mapping[str, str] = field(
        default_factory=lambda: {"cpu": "12", "memory": "94Gi", "pods": "110", "ephemeral-storage": "100Gi"}
    )
    version: str = "v1.36.2"
    pod_subnet: str = "172.20.64"
    driver: Path | None = None
    gpu_state: Path | None = None
    speed_up: float = 1.0
    node_status_s: float = 10.0
    lease_s: float = 10.0
    environ: Mapping[str, str] = field(default_factory=dict)
    topology: TopologyManager = field(default_factory=TopologyManager)
    host: str = "127.0.0.1"
    port: int = 0
    api_server: str = ""

    @property
    def host_root(self) -> Path:
        """What volumes with a host path see as the node's ``/``; kubelet's own folder appears in it."""
        return self.root.parent / "host"

    @property
    def manifests(self) -> Path:
        """Static pods: this kubelet runs only NVIDIA's device plugin of whole cards."""
        return self.host_root / "etc" / "kubernetes" / "manifests"

    @property
    def proc(self) -> Path:
        """The node's /proc, on nodes with cards; containers of a pod with hostPID get it."""
        return self.host_root / "proc"

    @property
    def plugin_folder(self) -> Path:
        return self.root / "device-plugins"

    @property
    def plugin_registry(self) -> Path:
        """Where drivers of claims put their registration sockets; their own lie below `plugins`."""
        return self.root / "plugins_registry"

    @property
    def cdi_folder(self) -> Path:
        """Where the container runtime reads CDI devices from; a reboot empties it."""
        return self.host_root / "var" / "run" / "cdi"

    @property
    def pod_resources_socket(self) -> Path:
        return self.root / "pod-resources" / "kubelet.sock"
