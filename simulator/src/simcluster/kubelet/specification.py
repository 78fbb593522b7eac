"""From a container of a pod to what the runtime starts: command, environment, root folder, log."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simcluster.cluster.amounts import Object
from simcluster.kubelet import rootfs, service_account
from simcluster.kubelet.environment import ReadData, environment, expand
from simcluster.kubelet.node_services import DeviceOptions
from simcluster.kubelet.runtime import ContainerSpec
from simcluster.kubelet.settings import KubeletSettings
from simcluster.kubelet.volumes import mounts_of
from simcluster.network import loopback_of
from simcluster.workload.images import Image


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What all containers of a pod have in common. `folder` is the pod's own folder on the node."""

    pod: Object
    folder: Path
    volumes: Mapping[str, Path]
    pod_ip: str
    allocate: Callable[[str], Awaitable[None]]  # again, for a container without its devices

    @property
    def uid(self) -> str:
        return str(self.pod["metadata"]["uid"])

    @property
    def restart_policy(self) -> str:
        return str(self.pod["spec"].get("restartPolicy", "Always"))


def specify(
    settings: KubeletSettings,
    facts: PodFacts,
    spec: Mapping[str, Any],
    image: Image,
    *,
    options: DeviceOptions,
    read: ReadData,
    attempt: int,
) -> ContainerSpec:
    """One attempt of a container; its root folder is recreated. Raises ConfigError."""
    own = environment(
        facts.pod,
        spec,
        {
            "SIMCLUSTER_POD_ADDRESS": loopback_of(facts.pod),
            **service_account.environment(settings, facts.pod, facts.folder),
            **image.env,
            **options.environ,
        },
        read,
        host_ip=settings.internal_ip,
        pod_ip=facts.pod_ip,
    )
    folder = facts.folder / spec["name"]
    mounts = [*options.mounts, *mounts_of(spec, facts.volumes)]  # the pod's own last, as kubelet orders them
    root = rootfs.build(folder / "root", _programs(settings, image, own), mounts)
    places = {name: os.path.realpath(root.inside(path)) for name, path in image.paths.items()}
    return ContainerSpec(
        pod_uid=facts.uid,
        name=spec["name"],
        attempt=attempt,
        image=spec.get("image", ""),
        argv=_argv(spec, image, own),
        environ={**places, **_of_this_machine(own, root), **_node_environment(settings, facts.pod, own)},
        rootfs=root,
        log=folder / f"{attempt}.log",
        working_dir=spec.get("workingDir") or image.working_dir,
        driver=settings.driver if _sees_cards(own) else None,
        annotations=options.annotations,
        hooks=options.hooks,
    )


def _argv(spec: Mapping[str, Any], image: Image, own: Mapping[str, str]) -> tuple[str, ...]:
    """Kubernetes' rule: with a command, the image's own arguments are dropped."""
    command = tuple(expand(one, own) for one in spec.get("command") or ())
    arguments = tuple(expand(one, own) for one in spec.get("args") or ())
    if command:
        return command + arguments
    return image.entrypoint + (arguments or image.command)


def _of_this_machine(own: Mapping[str, str], root: rootfs.Rootfs) -> dict[str, str]:
    """Variables that name a file of the container name the same file here."""
    return {
        name: root.translate(value) if value.startswith("/") and root.inside(value).is_file() else value
        for name, value in own.items()
    }


def _programs(settings: KubeletSettings, image: Image, own: Mapping[str, str]) -> dict[str, Path]:
    """The image's files and, if cards are visible, the driver's tools, as with the container toolkit."""
    if settings.driver is None or not _sees_cards(own):
        return dict(image.programs)
    tools = {f"/usr/bin/{name}": settings.driver / name for name in rootfs.DRIVER_PROGRAMS}
    return {**tools, **image.programs}


def _node_environment(settings: KubeletSettings, pod: Object, own: Mapping[str, str]) -> dict[str, str]:
    if settings.gpu_state is None or not _sees_cards(own):
        return dict(settings.environ)
    # A pod with hostPID sees the node's processes: the driver lists them, /proc has their cgroups
    if not pod["spec"].get("hostPID"):
        host_pid = {}
    else:
        host_pid = {"GPUSLICE_SIM_HOST_PID": "1", "GPUSLICE_PROC": str(settings.proc)}
    return {**settings.environ, "GPUSLICE_SIM_STATE": str(settings.gpu_state), **host_pid}


def _sees_cards(environ: Mapping[str, str]) -> bool:
    return environ.get("NVIDIA_VISIBLE_DEVICES", "void") not in ("", "void")
