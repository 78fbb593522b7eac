"""The Prometheus ecosystem's web-config file: TLS, client certificates and basic authentication.

Source of the grammar: prometheus/exporter-toolkit, web configuration. What is not honoured here is refused
by name instead of being ignored: a server must not be less safe than its file says.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import os
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from gpuslice.adapters.files import SETTLED_S, FollowedFile
from gpuslice.adapters.limits import Limits
from gpuslice.adapters.turns import Asker, TooManyError, Turns
from gpuslice.adapters.web.clients import App
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, text_answer
from gpuslice.adapters.web.server_tls import TlsFiles
from gpuslice.core.errors import GpusliceError, words_of
from gpuslice.core.nesting import checked_depth

_log = logging.getLogger(__name__)
ClientAuth = Literal[
    "", "NoClientCert", "RequestClientCert", "RequireAnyClientCert", "VerifyClientCertIfGiven",
    "RequireAndVerifyClientCert",
]  # fmt: skip
_TLS_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
LARGEST_FILE_BYTES = 1 << 20


class WebConfigError(GpusliceError):
    """The file cannot be honoured; the message names the key."""


class _Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    client_auth_type: ClientAuth = ""
    min_version: Literal["TLS12", "TLS13"] = "TLS12"
    prefer_server_cipher_suites: bool = True


class _Http(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    http2: bool = True
    headers: dict[str, str] = {}


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tls_server_config: _Tls | None = None
    http_server_config: _Http | None = None
    basic_auth_users: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class WebConfig:
    """What a server does to be safe. `users`: name → bcrypt hash."""

    tls: TlsFiles = field(default_factory=TlsFiles)
    users: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


class WebConfigFile:
    """The file at `path`, which may change; what cannot be honoured leaves the last in force."""

    def __init__(self, path: Path, settled_s: float = SETTLED_S) -> None:
        """Raises `WebConfigError`."""
        self._path = path
        self._file = FollowedFile(str(path), settled_s)
        self._content = self._read()
        self._current = _parsed(path, self._content)
        self._problem = ""

    def current(self) -> WebConfig:
        """What it says now."""
        try:
            content = self._read()
            if content != self._content:
                if not content.strip():  # a disk that is full ends a rewrite in the middle
                    raise WebConfigError(f"web config file {self._path} has become empty")
                self._current, self._content = _parsed(self._path, content), content
            self._problem = ""
        except WebConfigError as error:
            if str(error) != self._problem:
                _log.warning("web config not reloaded, the last one stays", extra={"error": str(error)})
            self._problem = str(error)
        return self._current

    def _read(self) -> bytes:
        path = self._path
        try:
            if path.exists() and not path.is_file():
                raise WebConfigError(f"web config file {path} must be a plain file")
            if path.stat().st_size > LARGEST_FILE_BYTES:
                limit = f"{LARGEST_FILE_BYTES >> 20} MiB"
                raise WebConfigError(f"web config file {path} must not be larger than {limit}")
            return self._file.read()
        except OSError as error:
            raise WebConfigError(f"web config file {path} cannot be read: {words_of(error)}") from error


def _parsed(path: Path, content: bytes) -> WebConfig:
    """Names of files in it are relative to its folder. Raises `WebConfigError`."""
    try:
        file = msgspec.yaml.decode(checked_depth(content), type=_File | None) or _File()
    except ValueError as error:
        raise WebConfigError(f"web config file {path} cannot be read: {words_of(error)}") from error
    tls = file.tls_server_config or _Tls()
    if bool(tls.cert_file) != bool(tls.key_file):
        raise WebConfigError(f"web config file {path}: cert_file and key_file go together")
    verified = tls.client_auth_type in {"VerifyClientCertIfGiven", "RequireAndVerifyClientCert"}
    if verified != bool(tls.client_ca_file) or tls.client_auth_type in {
        "RequestClientCert",
        "RequireAnyClientCert",
    }:
        raise WebConfigError(
            f"web config file {path}: client_auth_type {tls.client_auth_type or 'NoClientCert'} with "
            f'client_ca_file "{tls.client_ca_file}", must be a CA file and VerifyClientCertIfGiven or '
            f"RequireAndVerifyClientCert, or neither"
        )
    if tls != _Tls() and not tls.cert_file:
        raise WebConfigError(f"web config file {path}: tls_server_config wants cert_file and key_file")
    for name, hashed in file.basic_auth_users.items():
        if not hashed.startswith(("$2a$", "$2b$", "$2y$")) or len(hashed) != 60:
            raise WebConfigError(f"web config file {path}: the password of {name} is no bcrypt hash")
    place = path.parent
    return WebConfig(
        TlsFiles(
            certificate=str(place / tls.cert_file) if tls.cert_file else "",
            key=str(place / tls.key_file) if tls.key_file else "",
            client_ca=str(place / tls.client_ca_file) if tls.client_ca_file else "",
            must_show=tls.client_auth_type == "RequireAndVerifyClientCert",
            oldest=_TLS_VERSIONS[tls.min_version],
        ),
        users=file.basic_auth_users,
        headers=(file.http_server_config or _Http()).headers,
    )


def guard(app: App, config: Callable[[], WebConfig], limits: Limits) -> App:
    """`app` behind the basic authentication and with the extra headers that `config` wants now."""
    users = Users({}, limits)

    async def guarded(request: HttpRequest, wanted: WebConfig) -> HttpResponse:
        nonlocal users
        if users.hashes != wanted.users:
            users = Users(wanted.users, limits)
        given = _credentials(request.headers.get("authorization", ""))
        try:
            if not wanted.users or (given is not None and await users.accepts(*given, request.asker)):
                coming = app(request)
                answer = coming if isinstance(coming, HttpResponse) else await coming
            else:
                refusal = {"WWW-Authenticate": 'Basic realm="metrics"'}
                answer = HttpResponse(b"Unauthorized\n", 401, headers=refusal)
        except TooManyError as error:
            answer = text_answer(str(error), 503)
        answer.headers = {**answer.headers, **wanted.headers}
        return answer

    def handle(request: HttpRequest) -> HttpResponse | Awaitable[HttpResponse]:
        wanted = config()
        return guarded(request, wanted) if wanted.users or wanted.headers else app(request)

    return handle


class Users:
    """Checks passwords; bcrypt takes 50 ms and more, so what was right is remembered by a keyed digest."""

    def __init__(self, hashes: Mapping[str, str], limits: Limits) -> None:
        self.hashes = hashes
        self._limits = limits
        self._key = os.urandom(32)
        self._right: dict[bytes, None] = {}
        self._turns = Turns(limits)

    async def accepts(self, name: str, password: str, asker: Asker) -> bool:
        """Raises `TooManyError`."""
        digest = hmac.digest(self._key, f"{name}\0{password}".encode(), "sha256")
        if digest in self._right:
            return True
        hashed = self.hashes.get(name)
        # compared for a name that does not exist, too, so that time does not tell which names do
        async with self._turns.turn(asker):
            same = await asyncio.to_thread(_same, password, hashed or next(iter(self.hashes.values())))
        if not same or hashed is None:
            self._turns.was_wrong(asker)
            return False
        if len(self._right) >= self._limits.reviews_remembered:
            self._right.pop(next(iter(self._right)))
        self._right[digest] = None
        return True


def _same(password: str, hashed: str) -> bool:
    import bcrypt  # only where passwords are wanted

    try:
        return bool(bcrypt.checkpw(password.encode()[:72], hashed.encode()))  # bcrypt knows no more
    except ValueError:
        return False


def _credentials(header: str) -> tuple[str, str] | None:
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, separator, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return (name, password) if separator else None
