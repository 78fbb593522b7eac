"""kubeconfig files as they are written, and several of them merged into one.

Source: the kubeconfig v1 format and the merge order of client-go: the first file to name a thing wins.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    name: str = ""
    value: str = ""


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


class _Named(msgspec.Struct):
    """An entry of a list; what it holds is read when it is chosen, as nothing else of the file matters."""

    name: str = ""
    cluster: Any = {}
    user: Any = {}
    context: Any = {}


class _File(_Part):
    current_context: str = ""
    clusters: list[_Named] = []
    users: list[_Named] = []
    contexts: list[_Named] = []


P = TypeVar("P", bound=_Part)


class Chosen(Mapping[str, P]):
    """Parts by name, each read when it is asked for. Raises ConfigError."""

    def __init__(self, type: type[P], parts: Iterable[tuple[str, _Written]]) -> None:
        self._type = type
        self._written: dict[str, _Written] = {}
        for name, written in parts:
            self._written.setdefault(name, written)  # the first file to name a thing wins

    def __getitem__(self, name: str) -> P:
        written = self._written[name]
        try:
            return msgspec.convert(written.part, self._type)
        except msgspec.ValidationError as error:
            where = str(error).replace("`$", f"`${written.at}")
            raise ConfigError(f"kubeconfig {written.file}: {where}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._written)

    def __len__(self) -> int:
        return len(self._written)

    def folder(self, name: str) -> Path:
        """The one that its relative paths start from."""
        return self._written[name].file.parent


@dataclass(frozen=True, slots=True)
class _Written:
    part: Any
    file: Path
    at: str


@dataclass(frozen=True, slots=True)
class Merged:
    """Several files as one."""

    source: str
    current_context: str
    clusters: Chosen[Cluster]
    users: Chosen[User]
    contexts: Chosen[Context]


def merge(paths: Sequence[Path]) -> Merged:
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    files: list[tuple[_File, Path]] = []
    for path in paths:
        try:
            # of several documents kubectl reads the first
            document = next(yaml.load_all(checked_depth(path.read_bytes()), Loader=loader), None)
            files.append((msgspec.convert(_without_nulls(document) or {}, _File), path))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise MissingConfigError(str(path), error.strerror or str(error)) from error
        except msgspec.ValidationError as error:
            raise ConfigError(f"kubeconfig {path}: {error}") from error
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"kubeconfig {path} is not YAML: {words_of(error)}") from error
    if not files:
        raise MissingConfigError(str(paths[0]), "no such file or directory")

    def written(plural: str, singular: str) -> Iterator[tuple[str, _Written]]:
        for file, path in files:
            for number, each in enumerate(getattr(file, plural)):
                yield each.name, _Written(getattr(each, singular), path, f".{plural}[{number}].{singular}")

    return Merged(
        source=os.pathsep.join(str(path) for _, path in files),
        current_context=next((file.current_context for file, _ in files if file.current_context), ""),
        clusters=Chosen(Cluster, written("clusters", "cluster")),
        users=Chosen(User, written("users", "user")),
        contexts=Chosen(Context, written("contexts", "context")),
    )


def _without_nulls(value: Any) -> Any:
    """As kubectl reads it, for which null is the same as nothing."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value if each is not None]
    return value
