"""The Prometheus ecosystem's web-config file: TLS, client certificates and basic authentication.

Source of the grammar: prometheus/exporter-toolkit, web configuration. What is not honoured here is refused
by name instead of being ignored: a server must not be less safe than its file says.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from gpuslice.adapters.web.clients import App
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse
from gpuslice.core.errors import GpusliceError, words_of
from gpuslice.core.nesting import checked_depth

ClientAuth = Literal[
    "", "NoClientCert", "RequestClientCert", "RequireAnyClientCert", "VerifyClientCertIfGiven",
    "RequireAndVerifyClientCert",
]  # fmt: skip
_TLS_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_REMEMBERED = 100
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
    """What a server does to be safe. `users`: name → bcrypt hash. `must_show`: a client certificate.

    `oldest_tls`: what a client must speak at least.
    """

    certificate: str = ""
    key: str = ""
    client_ca: str = ""
    must_show: bool = False
    oldest_tls: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    users: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def read_web_config(path: Path) -> WebConfig:
    """The file at `path`; names in it are relative to its folder. Raises `WebConfigError`."""
    try:
        if path.exists() and not path.is_file():
            raise WebConfigError(f"web config file {path} must be a plain file")
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise WebConfigError(
                f"web config file {path} must not be larger than {LARGEST_FILE_BYTES >> 20} MiB"
            )
        file = msgspec.yaml.decode(checked_depth(path.read_bytes()), type=_File | None) or _File()
    except (OSError, ValueError) as error:
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
        certificate=str(place / tls.cert_file) if tls.cert_file else "",
        key=str(place / tls.key_file) if tls.key_file else "",
        client_ca=str(place / tls.client_ca_file) if tls.client_ca_file else "",
        must_show=tls.client_auth_type == "RequireAndVerifyClientCert",
        oldest_tls=_TLS_VERSIONS[tls.min_version],
        users=file.basic_auth_users,
        headers=(file.http_server_config or _Http()).headers,
    )


def guard(app: App, config: WebConfig) -> App:
    """`app` behind basic authentication and with the extra headers that `config` asks for."""
    if not (config.users or config.headers):
        return app
    users = Users(config.users) if config.users else None

    async def guarded(request: HttpRequest) -> HttpResponse:
        given = _credentials(request.headers.get("authorization", ""))
        if users is None or (given is not None and await users.accepts(*given)):
            coming = app(request)
            answer = coming if isinstance(coming, HttpResponse) else await coming
        else:
            refusal = {"WWW-Authenticate": 'Basic realm="metrics"'}
            answer = HttpResponse(b"Unauthorized\n", 401, headers=refusal)
        answer.headers = {**answer.headers, **config.headers}
        return answer

    return guarded


class Users:
    """Checks passwords; bcrypt takes 50 ms and more, so what was right is remembered by a keyed digest."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        import bcrypt

        self._bcrypt = bcrypt
        self._hashes = {name: hashed.encode() for name, hashed in hashes.items()}
        # compared for a name that does not exist, so that time does not tell which names do
        self._nobody = bcrypt.hashpw(b"", bcrypt.gensalt(rounds=10))
        self._key = hashlib.sha256(self._nobody).digest()
        self._right: dict[bytes, None] = {}

    async def accepts(self, name: str, password: str) -> bool:
        digest = hmac.digest(self._key, f"{name}\0{password}".encode(), "sha256")
        if digest in self._right:
            return True
        hashed = self._hashes.get(name)
        same = await asyncio.to_thread(self._same, password, hashed or self._nobody)
        if not same or hashed is None:
            return False
        if len(self._right) >= _REMEMBERED:
            self._right.pop(next(iter(self._right)))
        self._right[digest] = None
        return True

    def _same(self, password: str, hashed: bytes) -> bool:
        try:
            return bool(self._bcrypt.checkpw(password.encode()[:72], hashed))  # bcrypt knows no more
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
