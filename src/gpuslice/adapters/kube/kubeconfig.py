"""kubeconfig files as they are written, and several of them merged into one.

Source: the kubeconfig v1 format and the merge order of client-go: the first file to name a thing wins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpuslice.adapters.kube.errors import ConfigError
from gpuslice.core.errors import words_of
from gpuslice.core.nesting import checked_depth


class MissingConfigError(ConfigError):
    """There is no kubeconfig where one was expected. `path` and `reason` for a message of one's own."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"kubeconfig {path} cannot be read: {reason}; set KUBECONFIG or give --kubeconfig")
        self.path = path
        self.reason = reason


class _Part(msgspec.Struct, rename="kebab"):
    pass


class Extension(_Part):
    name: str = ""
    extension: Any = None


class Cluster(_Part):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str = ""
    proxy_url: str = ""
    extensions: list[Extension] | None = None


class Variable(_Part):
    name: str
    value: str


class ExecSection(msgspec.Struct, rename="camel"):
    api_version: str = ""
    command: str = ""
    args: list[str] | None = None
    env: list[Variable] | None = None
    install_hint: str = ""
    interactive_mode: str = ""
    provide_cluster_info: bool = False


class User(_Part):
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    username: str = ""
    password: str = ""
    exec: ExecSection | None = None
    auth_provider: Any = None
    impersonate: str = msgspec.field(default="", name="as")
    impersonate_uid: str = msgspec.field(default="", name="as-uid")
    impersonate_groups: list[str] | None = msgspec.field(default=None, name="as-groups")


class Context(_Part):
    cluster: str = ""
    user: str = ""
    namespace: str = ""


class _NamedCluster(_Part):
    name: str
    cluster: Cluster = msgspec.field(default_factory=Cluster)


class _NamedUser(_Part):
    name: str
    user: User | None = None


class _NamedContext(_Part):
    name: str
    context: Context = msgspec.field(default_factory=Context)


class _File(_Part):
    current_context: str | None = None
    clusters: list[_NamedCluster] | None = None
    users: list[_NamedUser] | None = None
    contexts: list[_NamedContext] | None = None


@dataclass(frozen=True, slots=True)
class Merged:
    """Several files as one; each cluster and user with the folder that its relative paths start from."""

    source: str
    current_context: str
    clusters: Mapping[str, tuple[Cluster, Path]]
    users: Mapping[str, tuple[User, Path]]
    contexts: Mapping[str, Context]


def merge(paths: Sequence[Path]) -> Merged:
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    present, files = [], []
    for path in paths:
        try:
            document = yaml.load(checked_depth(path.read_bytes()), Loader=loader)
            files.append((msgspec.convert(document or {}, _File), path.parent))
            present.append(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise MissingConfigError(str(path), error.strerror or str(error)) from error
        except msgspec.ValidationError as error:
            raise ConfigError(f"kubeconfig {path}: {error}") from error
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"kubeconfig {path} is not YAML: {words_of(error)}") from error
    if not present:
        raise MissingConfigError(str(paths[0]), "no such file or directory")
    return Merged(
        source=os.pathsep.join(map(str, present)),
        current_context=next((f.current_context for f, _ in files if f.current_context), ""),
        clusters=_first_wins(
            [(c.name, (c.cluster, folder)) for f, folder in files for c in f.clusters or []]
        ),
        users=_first_wins(
            [(u.name, (u.user or User(), folder)) for f, folder in files for u in f.users or []]
        ),
        contexts=_first_wins([(c.name, c.context) for f, _ in files for c in f.contexts or []]),
    )


V = TypeVar("V")


def _first_wins(pairs: Sequence[tuple[str, V]]) -> dict[str, V]:
    return dict(reversed(pairs))
