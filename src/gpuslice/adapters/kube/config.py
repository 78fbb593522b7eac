"""Which API server, and how to reach it: kubeconfig files as kubectl reads them, or the pod we run in.

Sources: the kubeconfig v1 format and merge order of client-go; nothing here needs an event loop.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpuslice.adapters.kube.credentials import (
    EXEC_VERSIONS,
    Credentials,
    Exec,
    ExecPlugin,
    Fixed,
    Secret,
    Tls,
    TokenFile,
    checked_header,
)
from gpuslice.adapters.kube.errors import ConfigError
from gpuslice.adapters.kube.kubeconfig import Cluster, Merged, User, merge
from gpuslice.core.errors import shown, words_of
from gpuslice.core.hosts import bracketed

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_EXEC_EXTENSION = "client.authentication.k8s.io/exec"


@dataclass(frozen=True, slots=True)
class Connection:
    """One API server and us. `source` says where this came from, for messages."""

    server: str
    namespace: str = "default"
    tls: Tls = field(default_factory=Tls)
    credentials: Credentials = field(default_factory=Fixed)
    proxy_url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    source: str = ""


def connect(
    environ: Mapping[str, str],
    *,
    kubeconfig: str = "",
    context: str = "",
    namespace: str = "",
    interactive: bool = False,
    service_account: str = SERVICE_ACCOUNT,
) -> Connection:
    """The connection that flags and environment mean, looked for in kubectl's order.

    `kubeconfig` if given, else the files of $KUBECONFIG, else ~/.kube/config, else the pod we run in.
    `interactive`: a credential plugin may ask questions. ConfigError says what is wrong and where.
    """
    paths = _paths(environ, kubeconfig)
    in_pod = bool(environ.get("KUBERNETES_SERVICE_HOST")) and Path(service_account, "token").exists()
    # A user who may not enter the folder, as of an image whose HOME is root's, has no file there: unlike
    # this, Path.exists would raise.
    if not kubeconfig and not any(map(os.path.exists, paths)) and in_pod:
        found = in_cluster(environ, service_account)
    else:
        found = _connection(merge(paths), context, interactive)
    found = replace(found, proxy_url=found.proxy_url or proxy_for(found.server, environ))
    return replace(found, namespace=namespace) if namespace else found


def context_names(environ: Mapping[str, str], kubeconfig: str = "") -> list[str]:
    """The contexts among which `connect` can choose; ConfigError if the files cannot be read."""
    return sorted(merge(_paths(environ, kubeconfig)).contexts)


def _paths(environ: Mapping[str, str], kubeconfig: str) -> list[Path]:
    """The kubeconfig files, the strongest first."""
    listed = [kubeconfig] if kubeconfig else environ.get("KUBECONFIG", "").split(os.pathsep)
    paths = [Path(each) for each in listed if each]
    return paths or [Path(environ.get("HOME", "~")).expanduser() / ".kube" / "config"]


def in_cluster(environ: Mapping[str, str], folder: str = SERVICE_ACCOUNT) -> Connection:
    """The API server of the cluster we run in, with the pod's own service account."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError("KUBERNETES_SERVICE_HOST is not set: this process does not run in a pod")
    namespace, authority = Path(folder, "namespace"), Path(folder, "ca.crt")
    return Connection(
        server=f"https://{bracketed(host)}:{port}",
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
        tls=Tls(_read(authority, "certificate authority"), str(authority)),
        credentials=TokenFile(str(Path(folder, "token"))),
        source=folder,
    )


def _connection(merged: Merged, wanted: str, interactive: bool) -> Connection:
    name = wanted or merged.current_context
    context = merged.contexts.get(name)
    if context is None:
        known = ", ".join(sorted(merged.contexts)) or "none"
        problem = f'there is no context "{name}"' if name else "it has no current-context"
        raise ConfigError(f"kubeconfig {merged.source}: {problem}; its contexts are: {known}")
    if context.cluster not in merged.clusters:
        raise ConfigError(
            f'kubeconfig {merged.source}: context "{name}" names cluster "{context.cluster}", '
            f"which is not among its clusters: {', '.join(sorted(merged.clusters)) or 'none'}"
        )
    cluster, cluster_folder = merged.clusters[context.cluster], merged.clusters.folder(context.cluster)
    if context.user and context.user not in merged.users:
        raise ConfigError(
            f'kubeconfig {merged.source}: context "{name}" names user "{context.user}", which is missing'
        )
    user, user_folder = User(), Path()
    if context.user:
        user, user_folder = merged.users[context.user], merged.users.folder(context.user)
    inline, file = cluster.certificate_authority_data, cluster.certificate_authority
    tls = Tls(
        authority=_data_or_file(inline, file, cluster_folder, "certificate-authority"),
        authority_file=str(cluster_folder / file) if file and not inline else "",
        server_name=cluster.tls_server_name,
        insecure=cluster.insecure_skip_tls_verify,
    )
    if not cluster.server:
        raise ConfigError(f'cluster "{context.cluster}" has no server')
    server = cluster.server if "://" in cluster.server else f"http://{cluster.server}"
    return Connection(
        server=_checked_url(server, f'cluster "{context.cluster}": server').rstrip("/"),
        namespace=context.namespace or "default",
        tls=tls,
        credentials=_credentials(user, user_folder, cluster, tls, interactive),
        proxy_url=_checked_url(cluster.proxy_url, "proxy-url") if cluster.proxy_url else "",
        headers=_impersonation(user),
        source=merged.source,
    )


def _checked_url(url: str, what: str) -> str:
    """`url`; ConfigError when nothing can be connected to by it."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # of the port, or of an IPv6 address
        good = False
    if not good or any(letter.isspace() or not letter.isprintable() for letter in url):
        raise ConfigError(f'{what} is "{shown(url)}", must be an http or https URL')
    return url


def _credentials(user: User, folder: Path, cluster: Cluster, tls: Tls, interactive: bool) -> Credentials:
    if user.auth_provider is not None:
        raise ConfigError("auth-provider was removed from Kubernetes; use an exec plugin instead")
    secret = Secret(
        token=user.token,
        username=user.username,
        password=user.password,
        certificate=_data_or_file(
            user.client_certificate_data, user.client_certificate, folder, "client-certificate"
        ),
        key=_data_or_file(user.client_key_data, user.client_key, folder, "client-key"),
    )
    if user.exec is not None:
        section = user.exec
        if section.api_version not in EXEC_VERSIONS:
            raise ConfigError(
                f'exec plugin {section.command}: apiVersion is "{section.api_version}", must be one of '
                + ", ".join(EXEC_VERSIONS)
            )
        if not section.command:
            raise ConfigError("exec plugin: command is missing")
        relative = os.sep in section.command and not os.path.isabs(section.command)
        return Exec(
            ExecPlugin(
                api_version=section.api_version,
                command=str((folder / section.command).absolute()) if relative else section.command,
                args=tuple(section.args or ()),
                env={variable.name: variable.value for variable in section.env or ()},
                install_hint=section.install_hint,
                interactive_mode=section.interactive_mode or "IfAvailable",
                cluster=_cluster_info(cluster, tls) if section.provide_cluster_info else None,
            ),
            secret,
            interactive,
        )
    if user.token_file:  # kubectl lets the file win over a token given inline
        return TokenFile(str(folder / user.token_file), secret)
    return Fixed(secret)


def _cluster_info(cluster: Cluster, tls: Tls) -> dict[str, Any]:
    """What EXEC_INFO says of the cluster: absent where the kubeconfig says nothing."""
    extensions = {extension.name: extension.extension for extension in cluster.extensions or ()}
    info = {
        "server": cluster.server,
        "tls-server-name": cluster.tls_server_name,
        "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
        "certificate-authority-data": base64.b64encode(tls.authority.encode()).decode(),
        "proxy-url": cluster.proxy_url,
        "config": extensions.get(_EXEC_EXTENSION),
    }
    return {name: value for name, value in info.items() if value}


def _impersonation(user: User) -> dict[str, str]:
    groups = user.impersonate_groups or []
    if len(groups) > 1:
        raise ConfigError("as-groups with several groups is not supported, there must be one")
    headers = {
        "Impersonate-User": user.impersonate,
        "Impersonate-Uid": user.impersonate_uid,
        "Impersonate-Group": groups[0] if groups else "",
    }
    return {name: checked_header(value, name) for name, value in headers.items() if value}


def _data_or_file(data: str, path: str, folder: Path, what: str) -> str:
    if data:
        try:
            return base64.b64decode("".join(data.split()), validate=True).decode("ascii")
        except ValueError as error:  # also what is no ASCII at all
            raise ConfigError(f"{what}-data is not base64 of a PEM text") from error
    return _read(folder / path, what) if path else ""


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {words_of(error)}") from error


# -- proxies -----------------------------------------------------------------------------------------

_PLACE = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*)):([^:]*)")  # host:port


def proxy_for(server: str, environ: Mapping[str, str]) -> str:
    """The proxy that HTTPS_PROXY, HTTP_PROXY and NO_PROXY mean for `server`; empty for none."""
    url = urlsplit(server)
    host = url.hostname or ""
    name = f"{url.scheme}_proxy"
    proxy = environ.get(name.upper()) or environ.get(name) or ""
    if not proxy or is_loopback(host):
        return ""
    exempt = environ.get("NO_PROXY") or environ.get("no_proxy") or ""
    port = str(url.port or (443 if url.scheme == "https" else 80))
    if any(_exempts(entry.strip().lower(), host, port) for entry in exempt.split(",")):
        return ""
    return _checked_url(proxy if "://" in proxy else f"http://{proxy}", name.upper())


def is_loopback(host: str) -> bool:
    """Whether a name or address is of this machine alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _exempts(entry: str, host: str, port: str) -> bool:
    """One entry of NO_PROXY, in small letters. Source: golang.org/x/net/http/httpproxy, as kubectl has it."""
    if entry == "*":
        return True
    with contextlib.suppress(ValueError):
        return ip_address(host) in ip_network(entry, strict=False)
    found = _PLACE.fullmatch(entry)
    name, only = (found[1] or found[2] or "", found[3]) if found else (entry, "")
    if not name or only not in ("", port):
        return False
    with contextlib.suppress(ValueError):
        return ip_address(host) == ip_address(name)
    return host == name or host.endswith("." + name.removeprefix("*").removeprefix("."))
