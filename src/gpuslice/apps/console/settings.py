"""The settings of the console."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from gpuslice.apps.settings import Host, Kubeconfig, LogLevel, Port, Settings, SettingsError, about
from gpuslice.core.contract import LABEL_SHARED

_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")


class ConsoleSettings(Settings, frozen=True, kw_only=True):
    """Settings of ``gpuslice console``."""

    port: Port = 0
    host: Host = "127.0.0.1"
    log_level: LogLevel = "warn"
    access: Annotated[
        Literal["kubeconfig", "token"],
        about(
            "Who sees what. kubeconfig: one person on this machine, with that person's rights, under a path "
            "that cannot be guessed. token: everybody with a bearer token of the cluster, who sees what the "
            "token may list."
        ),
    ] = "kubeconfig"
    open_browser: Annotated[bool, about("Open the page in the browser of this desktop.")] = True
    kubeconfig: Kubeconfig = ""
    context: Annotated[str, about("Context of the kubeconfig to use.")] = ""
    namespace: Annotated[
        str,
        about(
            "Watch only the pods of this namespace, for users who may not list those of all namespaces.",
            short="-n",
        ),
    ] = ""
    base_path: Annotated[
        str, about("Path below which an ingress serves the page, as in /gpuslice; empty for the root.")
    ] = ""
    cluster_name: Annotated[str, about("Name of the cluster, shown on the page.")] = ""
    node_label: Annotated[str, about("The chart's nodeLabel.")] = LABEL_SHARED
    prometheus_url: Annotated[
        str,
        about(
            "Prometheus that scrapes the exporters: usage and its history are queried there. Without it "
            "the console reads the exporters itself, and keeps one hour in memory."
        ),
    ] = ""
    prometheus_token_file: Annotated[
        str,
        about(
            "File with a bearer token for Prometheus; alternatively, put a user and password into its URL."
        ),
    ] = ""
    prometheus_ca_file: Annotated[
        str,
        about("PEM file with the CA of Prometheus' certificate; otherwise the system's CAs."),
    ] = ""
    usage_interval_s: Annotated[float, about("How often usage is read.", unit="seconds", ge=1, le=600)] = 15.0
    exporters: Annotated[
        Literal["auto", "direct", "proxy", "off"],
        about(
            "How exporters are reached. direct: by the address of their pods, as from a pod; proxy: through "
            "the API server, as from a laptop; auto: direct with token, proxy with kubeconfig."
        ),
    ] = "auto"
    tls_certificate: Annotated[
        str, about("PEM file with the server certificate; plain HTTP without it. Renewals are picked up.")
    ] = ""
    tls_key: Annotated[str, about("PEM file with the key of the certificate.")] = ""

    def __post_init__(self) -> None:
        from gpuslice.adapters.kube.config import is_loopback

        if bool(self.tls_certificate) != bool(self.tls_key):
            raise SettingsError("--tls-certificate and --tls-key go together: one of them is missing")
        if (self.prometheus_token_file or self.prometheus_ca_file) and not self.prometheus_url:
            raise SettingsError("--prometheus-token-file and --prometheus-ca-file need --prometheus-url")
        if not _PATH.fullmatch(self.base_path):
            raise SettingsError(f'--base-path is "{self.base_path}", must be a path like /gpuslice')
        if self.access == "kubeconfig" and not is_loopback(self.host):
            raise SettingsError(
                f'--host is "{self.host}", must be 127.0.0.1 or ::1 with --access=kubeconfig: everybody who '
                "reaches the page would see what you may see"
            )
