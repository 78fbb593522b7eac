"""From a process to its container, by its cgroup path.

Supports cgroup v1 and v2, the systemd and the cgroupfs driver, containerd, CRI-O, Docker and Podman, and
clusters that run inside a container themselves (kind): of nested containers, the one started by the node's
own kubelet counts, which is the first below a pod.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContainerRef:
    """A container as a cgroup path names it. `pod_uid` is "" if it belongs to no pod.

    The uid of a static pod is the hash of its manifest (annotation ``kubernetes.io/config.hash``), not the
    uid that the API server gave to its mirror.
    """

    container_id: str
    pod_uid: str = ""


_UID = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32}"
_POD = re.compile(rf"(?:^|-)pod({_UID})(?:\.slice)?$")
_CONTAINER = re.compile(
    r"^(?:(?:cri-containerd|crio|docker|libpod|containerd)[-:])?([0-9a-f]{64})(?:\.scope)?$"
)
_HELPERS = ("crio-conmon-", "libpod-conmon-")  # a container's monitor, not the container


def parse_cgroup(text: str) -> ContainerRef | None:
    """The container in ``/proc/<pid>/cgroup``; None for a process of the host.

    With cgroup v1 each controller has its line; a line that names a pod counts more than one that does not.
    """
    lines = (line.split(":", 2) for line in text.splitlines())  # hierarchy:controllers:path
    paths = [fields[2] for fields in lines if len(fields) == 3]  # which may hold colons itself
    found = [ref for path in paths if (ref := parse_path(path)) is not None]
    return max(found, key=lambda ref: bool(ref.pod_uid), default=None)


def parse_path(path: str) -> ContainerRef | None:
    """The container of one cgroup path, absolute or as seen from another cgroup namespace (``/../…``)."""
    # containerd under a systemd slice without its systemd driver: ``<pod>.slice:cri-containerd:<id>``
    parts = path.replace(".slice:", "/").split("/")
    for place, part in enumerate(parts):
        if pod := _POD.search(part):
            return _first_container(parts[place + 1 :], pod[1].replace("_", "-"))
    return _first_container(parts, "")


def _first_container(parts: Iterable[str], pod_uid: str) -> ContainerRef | None:
    for part in parts:
        if part.startswith(_HELPERS):
            return None
        if match := _CONTAINER.match(part):
            return ContainerRef(match[1], pod_uid)
    return None
