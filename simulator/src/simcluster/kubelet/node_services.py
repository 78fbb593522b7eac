"""What a pod's worker needs from its node, in one value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.events import EventRecorder, pod_reference
from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from simcluster.cluster.amounts import Object
from simcluster.kubelet.devices import DeviceAssignment, DeviceAssignments
from simcluster.kubelet.environment import ConfigError
from simcluster.kubelet.plugins import PluginEndpoints
from simcluster.kubelet.rootfs import Mount
from simcluster.kubelet.runtime import Hook, Runtime
from simcluster.kubelet.settings import KubeletSettings
from simcluster.workload.images import ImageRegistry

if TYPE_CHECKING:
    from simcluster.kubelet.claims import ClaimManager


@dataclass(frozen=True, slots=True)
class NodeServices:
    """`pulled` are the images that this node has already."""

    settings: KubeletSettings
    client: KubeClient
    recorder: EventRecorder
    runtime: Runtime
    registry: ImageRegistry
    device_manager: DeviceAssignments
    endpoints: PluginEndpoints
    claims: ClaimManager
    pulled: set[str] = field(default_factory=set)

    async def event(
        self, pod: Object, reason: str, message: str, *, warning: bool = False, container: str = ""
    ) -> None:
        """An event on the pod; with `container`, on that part of its spec."""
        metadata = pod["metadata"]
        is_app = any(each["name"] == container for each in pod["spec"]["containers"])
        part = container and f"spec.{'containers' if is_app else 'initContainers'}{{{container}}}"
        about = pod_reference(metadata["namespace"], metadata["name"], metadata["uid"], part)
        kind = "Warning" if warning else "Normal"
        await self.recorder.create_event(about, reason, message, type=kind)


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What the plugins of all its resources, or its claims, add to a container."""

    environ: Mapping[str, str]
    mounts: tuple[Mount, ...]
    annotations: Mapping[str, str]
    hooks: tuple[Hook, ...] = ()

    def __or__(self, other: DeviceOptions) -> DeviceOptions:
        return DeviceOptions(
            {**self.environ, **other.environ},
            (*self.mounts, *other.mounts),
            {**self.annotations, **other.annotations},
            (*self.hooks, *other.hooks),
        )


def cdi_options(folder: Path, names: Sequence[str]) -> DeviceOptions:
    """What CDI devices add to a container, by the specifications in the node's folder. Raises ConfigError."""
    edits: dict[str, Any] = {}
    found = DeviceOptions({}, (), {})
    for path in sorted(folder.glob("*.json")) if names else ():
        document = json.loads(path.read_bytes())
        edits |= {
            f"{document['kind']}={each['name']}": each["containerEdits"] for each in document["devices"]
        }
    for each in names:
        if each not in edits:
            raise ConfigError(f"failed to inject CDI devices: unresolvable CDI devices {each}")
        hooks = [
            Hook(hook["path"], tuple(hook.get("args") or ()), hook.get("timeout", 0))
            for hook in edits[each].get("hooks") or ()
            if hook["hookName"] == "createRuntime"
        ]
        found |= DeviceOptions(
            dict(pair.split("=", 1) for pair in edits[each].get("env") or ()),
            tuple(
                Mount(mount["containerPath"], Path(mount["hostPath"]))
                for mount in edits[each].get("mounts") or ()
            ),
            {},
            tuple(hooks),
        )
    return found


def device_options(assignments: list[DeviceAssignment], cdi_folder: Path) -> DeviceOptions:
    """If two plugins set the same thing, the first wins. Raises ConfigError."""
    environ: dict[str, str] = {}
    mounts: dict[str, Mount] = {}
    annotations: dict[str, str] = {}
    devices: list[str] = []
    for one in assignments:
        answer = dp.ContainerAllocateResponse.FromString(one.response)
        for name, value in answer.envs.items():
            environ.setdefault(name, value)
        for mount in answer.mounts:
            mounts.setdefault(mount.container_path, Mount(mount.container_path, Path(mount.host_path)))
        for name, value in answer.annotations.items():
            annotations.setdefault(name, value)
        devices += [each.name for each in answer.cdi_devices]
    return DeviceOptions(environ, tuple(mounts.values()), annotations) | cdi_options(cdi_folder, devices)
