"""Who we are to the API server: tokens, client certificates and the plugins that fetch them.

All are asked before every request, so a rotated token or certificate is used without a restart.
"""

from __future__ import annotations

import base64
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Protocol

import msgspec

from gpuslice.adapters.files import FollowedFile, in_memory
from gpuslice.adapters.kube.errors import UNREADABLE, ConfigError
from gpuslice.core.errors import words_of


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """What proves who we are; parts that are not used are empty. It has no repr, so no log can hold one."""

    token: str = ""
    username: str = ""
    password: str = ""
    certificate: str = ""  # PEM
    key: str = ""  # PEM


@dataclass(frozen=True, slots=True)
class Tls:
    """How to trust the API server. Without `authority` (PEM) the system's authorities are used."""

    authority: str = ""
    server_name: str = ""
    insecure: bool = False


class Credentials(Protocol):
    def current(self) -> Secret:
        """The secret valid now; ConfigError when it cannot be had."""

    def forget(self) -> None:
        """The server refused it: fetch a new one next time."""

    def blocks(self) -> bool:
        """Whether `current` may take long enough to keep it off an event loop."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Credentials that stand in the kubeconfig itself."""

    secret: Secret = Secret()

    def current(self) -> Secret:
        return self.secret

    def forget(self) -> None:
        pass

    def blocks(self) -> bool:
        return False


@dataclass(slots=True)
class TokenFile:
    """A token in a file that somebody else rotates (kubelet does, hourly)."""

    path: str
    secret: Secret = Secret()
    clock: Callable[[], float] = time.monotonic
    _file: FollowedFile | None = field(default=None, compare=False)
    _token: str = field(default="", compare=False)

    def current(self) -> Secret:
        if self._file is None:
            self._file = FollowedFile(self.path, clock=self.clock)
        try:
            token = self._file.read().decode().strip()
            if not token and not self._token:
                raise ConfigError(f"token file {self.path} is empty")
            self._token = token or self._token
        except (OSError, UnicodeDecodeError) as error:
            if not self._token:
                raise ConfigError(f"token file {self.path} cannot be read: {words_of(error)}") from error
            # a rotation is a moment without the file: the old one is still good
        return Secret(token=self._token, certificate=self.secret.certificate, key=self.secret.key)

    def forget(self) -> None:
        self._file = None  # what it says now counts at once

    def blocks(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class ExecPlugin:
    """The ``exec`` section of a kubeconfig user; `cluster` is what the plugin is told about the cluster."""

    api_version: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    install_hint: str = ""
    interactive_mode: str = "IfAvailable"
    cluster: Mapping[str, Any] | None = None


EXEC_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")


class _ExecStatus(msgspec.Struct, rename="camel"):
    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class _ExecCredential(msgspec.Struct, rename="camel"):
    api_version: str = ""
    kind: str = ""
    status: _ExecStatus | None = None


@dataclass(slots=True)
class Exec:
    """Runs a credential plugin and keeps its answer until it expires. `now` is the wall clock.

    Protocol: client.authentication.k8s.io v1 and v1beta1, which differ in name alone.
    """

    plugin: ExecPlugin
    secret: Secret = Secret()
    interactive: bool = False
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC), compare=False)
    timeout_s: float = 60.0
    _answer: _ExecStatus | None = field(default=None, compare=False)

    def current(self) -> Secret:
        if self._answer is None or self._expired(self._answer):
            self._answer = self._run()
        return Secret(
            token=self._answer.token,
            certificate=self._answer.client_certificate_data or self.secret.certificate,
            key=self._answer.client_key_data or self.secret.key,
        )

    def forget(self) -> None:
        self._answer = None

    def blocks(self) -> bool:
        return self._answer is None or self._expired(self._answer)

    def _expired(self, answer: _ExecStatus) -> bool:
        return answer.expiration_timestamp is not None and self.now() >= answer.expiration_timestamp

    def _run(self) -> _ExecStatus:
        mode = self.plugin.interactive_mode
        possible = self.interactive and sys.stdin is not None and sys.stdin.isatty()
        if mode == "Always" and not possible:
            raise self._failure("must ask questions (interactiveMode Always) and there is no terminal")
        interactive = possible and mode != "Never"
        spec: dict[str, Any] = {"interactive": interactive}
        if self.plugin.cluster is not None:
            spec["cluster"] = self.plugin.cluster
        info = {"apiVersion": self.plugin.api_version, "kind": "ExecCredential", "spec": spec}
        environ = {
            **os.environ,
            **self.plugin.env,
            "KUBERNETES_EXEC_INFO": msgspec.json.encode(info).decode(),
        }
        try:
            done = subprocess.run(
                [self.plugin.command, *self.plugin.args],
                env=environ,
                stdin=None if interactive else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if interactive else subprocess.PIPE,
                timeout=None if interactive else self.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise self._failure(f"gave no answer in {self.timeout_s:g} s") from error
        except OSError as error:
            import shutil

            hint = f". {self.plugin.install_hint.strip()}" if self.plugin.install_hint else ""
            # where one folder of the PATH may not be read, the system says so of a program that is nowhere
            found = "/" in self.plugin.command or shutil.which(self.plugin.command, path=environ.get("PATH"))
            why = error.strerror if found else "it is not on the PATH"
            raise self._failure(f"cannot be run: {why}{hint}") from error
        if done.returncode:
            said = (done.stderr or b"").decode(errors="replace").strip()[-500:]
            raise self._failure(f"ended with code {done.returncode}{': ' + said if said else ''}")
        return self._decode(done.stdout)

    def _decode(self, answer: bytes) -> _ExecStatus:
        try:
            credential = msgspec.json.decode(answer, type=_ExecCredential)
        except UNREADABLE as error:
            raise self._failure(f"answered no ExecCredential: {error}") from error
        status = credential.status
        if credential.api_version != self.plugin.api_version:
            wants = self.plugin.api_version
            raise self._failure(
                f'answered apiVersion "{credential.api_version}", the kubeconfig says "{wants}"'
            )
        if status is None or not (status.token or status.client_certificate_data):
            raise self._failure("answered neither a token nor a client certificate")
        if bool(status.client_certificate_data) != bool(status.client_key_data):
            raise self._failure("answered a client certificate and key only by half")
        return status

    def _failure(self, what: str) -> ConfigError:
        return ConfigError(f"exec plugin {self.plugin.command} {what}")


def authorization(secret: Secret) -> dict[str, str]:
    """The Authorization header of `secret`; empty when it has only a certificate or nothing."""
    if secret.token:
        return {"Authorization": f"Bearer {checked_header(secret.token, 'the token')}"}
    if secret.username:
        pair = base64.b64encode(f"{secret.username}:{secret.password}".encode()).decode()
        return {"Authorization": f"Basic {pair}"}
    return {}


def checked_header(value: str, what: str) -> str:
    """`value`; ConfigError when no HTTP header can carry it. It is not shown: it may be a secret."""
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{what} has a line break or another character that no HTTP header can carry")
    return value


def tls_context(tls: Tls, secret: Secret) -> ssl.SSLContext:
    """The TLS settings for the API server; ConfigError when a certificate or key cannot be used."""
    try:
        context = ssl.create_default_context(cadata=tls.authority or None)
    except ssl.SSLError as error:
        raise ConfigError(f"the cluster's certificate-authority is not a PEM certificate: {error}") from error
    # many clusters' own authorities lack the key usage that it wants
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if tls.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if secret.certificate:
        with in_memory(f"{secret.certificate}\n{secret.key}".encode()) as path:
            try:
                context.load_cert_chain(path)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(
                    f"the client certificate and key cannot be used together: {error}"
                ) from error
    return context
