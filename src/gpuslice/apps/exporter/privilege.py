"""Whether this process sees the host's processes: without that, no process can be given to a container."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

HINT = "the host's processes are not visible: set hostPID: true on the exporter's pod"


def hidden_processes(proc: str, environ: Mapping[str, str] = os.environ) -> str:
    """Why not, or "" when they are. With hostPID, process 1 is the host's and in another cgroup than we."""
    if proc != "/proc" or "KUBERNETES_SERVICE_HOST" not in environ:
        return ""
    try:
        first, own = Path("/proc/1/cgroup").read_bytes(), Path("/proc/self/cgroup").read_bytes()
    except OSError as error:
        return f"{HINT} ({error})"
    return HINT if first == own else ""
