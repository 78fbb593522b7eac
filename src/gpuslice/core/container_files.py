"""Where a container finds what enforces its limits, and what its pod must not mount there.

kubelet gives the runtime a pod's own mounts after those of device plugins (``GenerateRunContainerOptions``),
and runtimes sort them by depth alone: at the same path and below, programs see the pod's own. Some tools do
that with no such intent: the webhooks of Datadog and Dynatrace mount a file at ``/etc/ld.so.preload``.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gpuslice.core.errors import InvalidRequestError

PRELOAD_FILES = ("/etc/ld.so.preload", "/etc/ld-nix.so.preload")
"""Where glibc's loader looks for it: as glibc has it, and as nixpkgs patches it
(dont-use-system-ld-so-preload.patch): programs from Nix ignore the first."""
LIBRARY_FOLDER = "/usr/lib/gpuslice"
LIMITS_FOLDER = "/etc/gpuslice"
REGION_FOLDER = "/var/lib/gpuslice"
NEIGHBOURS_FOLDER = "/run/gpuslice"  # one folder for each card
_BY_LINKS = ("/lib/gpuslice", "/var/run/gpuslice")
"""The same folders in nearly every image of today: /lib is a link to /usr/lib there, /var/run one to /run."""
_BY_PROCESSES = re.compile(r"/proc/(self|thread-self|\d+)(/|$)")
"""runc 1.1 follows such links where it mounts something: ``/proc/self/root`` is the container's own root."""
OUR_PATHS = (*PRELOAD_FILES, LIBRARY_FOLDER, LIMITS_FOLDER, REGION_FOLDER, NEIGHBOURS_FOLDER, *_BY_LINKS)

Mounts = Iterable[Mapping[str, Any]] | None


def hiding_mount(container: str, mounts: Mounts, devices: Mounts, message_path: str | None) -> str:
    """What is wrong about the first path of a container that would hide one of ours; "" if none does.

    `mounts`, `devices` and `message_path` are ``volumeMounts``, ``volumeDevices`` and
    ``terminationMessagePath`` of the API; at the last kubelet mounts a file that the container can write. A
    path through another symbolic link of the image is not recognized. ".." is refused, since what it means
    depends on such links: ``/var/lock/..`` is ``/run``.
    """
    paths = [(f"volumeMounts[{i}].mountPath", each.get("mountPath")) for i, each in enumerate(mounts or ())]
    paths += [
        (f"volumeDevices[{i}].devicePath", each.get("devicePath")) for i, each in enumerate(devices or ())
    ]
    for field, path in (*paths, ("terminationMessagePath", message_path)):
        cleaned = posixpath.normpath("/" + str(path or "").lstrip("/"))
        unclear = ".." in str(path or "").split("/") or _BY_PROCESSES.match(cleaned) is not None
        if unclear or any(cleaned == ours or cleaned.startswith(f"{ours}/") for ours in OUR_PATHS):
            what = "what enforces the container's GPU limits"
            clear = f'a path without links or "..", which could lead to {what}'
            must_be = clear if unclear else f"another path: {what} is mounted there"
            return str(InvalidRequestError(f'container "{container}": {field}', path, must_be))
    return ""
