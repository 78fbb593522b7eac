"""What can be set about the controller of claim templates."""

from __future__ import annotations

from typing import Annotated, Literal

from gpuslice.apps.settings import Host, Kubeconfig, LogLevel, Settings, about


class ClaimsSettings(Settings, frozen=True, kw_only=True):
    """Settings of ``gpuslice claims``."""

    kubeconfig: Kubeconfig = ""
    memory_unit: Annotated[
        Literal["GiB", "MiB"],
        about("Size of one aliyun.com/gpu-mem; must match the agents' setting."),
    ] = "GiB"
    keep_s: Annotated[
        float,
        about("How long a template that no pod uses is kept for reuse.", unit="s", ge=0),
    ] = 600.0
    port: Annotated[
        int, about("TCP port for health and metrics; 0 lets the system choose.", ge=0, le=65535)
    ] = 12348
    host: Host = "::"
    log_level: LogLevel = "info"
