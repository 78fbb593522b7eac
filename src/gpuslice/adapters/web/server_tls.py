"""The TLS of one server: its certificate and whom it trusts, as the files say now."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakSet

from gpuslice.adapters.files import SETTLED_S, FollowedFile, in_memory
from gpuslice.core.errors import GpusliceError, words_of

_log = logging.getLogger(__name__)
HTTP2 = "h2"  # in the TLS handshake (ALPN)
_PEM_BLOCK = re.compile(rb"-----BEGIN ([^-]+)-----(.*?)-----END", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files, and what clients must do. Without a certificate it is plain HTTP.

    `client_ca` verifies clients' certificates; with `must_show` a client without one is refused.
    `oldest`: the oldest accepted version.
    """

    certificate: str = ""
    key: str = ""
    client_ca: str = ""
    must_show: bool = False
    oldest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2


class CertificateError(GpusliceError):
    """A certificate, key or CA file cannot be used; the message says which."""


class _InForce(NamedTuple):
    """What the context was made of. `pair`: certificate and key; None for plain HTTP."""

    pair: tuple[bytes, bytes] | None
    authorities: bytes
    must_show: bool
    oldest: ssl.TLSVersion

    def keeps_trust_of(self, before: _InForce) -> bool:
        """Whether everyone who was admitted before is admitted now."""
        rules = (self.pair is None, self.must_show, self.oldest)
        if rules != (before.pair is None, before.must_show, before.oldest):
            return False
        return _blocks(before.authorities) <= _blocks(self.authorities)


class ServerTls:
    """`context` is for new connections; None for plain HTTP.

    A context only ever learns more, so each change makes a new one. What cannot be used (half written,
    missing, a key of another certificate) leaves the last in force: certificate and key as a pair, the CAs
    for clients by themselves, since a withdrawn one must not stay trusted because of a key.
    """

    def __init__(
        self, wanted: Callable[[], TlsFiles], *, http2: bool = False, settled_s: float = SETTLED_S
    ) -> None:
        """Raises `CertificateError`."""
        self.context: ssl.SSLContext | None = None
        self._wanted = wanted
        self._http2 = http2
        self._settled_s = settled_s
        self._files: dict[str, FollowedFile] = {}
        self._pair: tuple[bytes, bytes] | None = None
        self._authorities = b""
        self._in_force: _InForce | None = None
        self._last = TlsFiles()  # those of which all could be used
        self._trusted: WeakSet[ssl.SSLContext] = WeakSet()
        self._problem = ""
        self.refresh()
        if self._problem:
            raise CertificateError(self._problem)

    def trusts(self, context: ssl.SSLContext | None) -> bool:
        """Whether who was admitted by this context would still be."""
        return context is self.context or context in self._trusted

    def refresh(self) -> None:
        """Look at the files again, which costs little if they are the same."""
        wanted, problems = self._wanted(), []
        try:
            if wanted.certificate:
                pair = self._content(wanted.certificate), self._content(wanted.key)
                if pair != self._pair:
                    _load_pair(_empty_context(), pair)
                    self._pair = pair
        except OSError as error:  # includes ssl's errors
            files = " and ".join(filter(None, (wanted.certificate, wanted.key)))
            problems.append(f"certificate and key {files} cannot be used: {words_of(error)}")
        try:
            if wanted.client_ca:
                authorities = self._content(wanted.client_ca)
                if authorities != self._authorities:
                    _load_authorities(_empty_context(), authorities)
                    self._authorities = authorities
        except OSError as error:
            problems.append(f"CA file {wanted.client_ca} cannot be used: {words_of(error)}")
        self._tell("; ".join(problems))
        if not problems:
            self._last = wanted
        elif wanted != self._last:  # other rules hold only together with their files
            return
        pair_in_force = self._pair if wanted.certificate else None
        authorities = self._authorities if wanted.client_ca else b""
        self._put_in_force(_InForce(pair_in_force, authorities, wanted.must_show, wanted.oldest))

    def _content(self, path: str) -> bytes:
        return self._files.setdefault(path, FollowedFile(path, self._settled_s)).read() if path else b""

    def _tell(self, problem: str) -> None:
        if problem and problem != self._problem and self._in_force is not None:
            _log.warning("certificates not reloaded, the last ones stay", extra={"error": problem})
        self._problem = problem

    def _put_in_force(self, now: _InForce) -> None:
        before = self._in_force
        if now == before:
            return
        context = None
        if now.pair is not None:
            context = _empty_context()
            context.minimum_version = now.oldest
            context.num_tickets = 0  # nobody resumes sessions: a write less per handshake
            if self._http2:
                context.set_alpn_protocols([HTTP2, "http/1.1"])
            _load_pair(context, now.pair)
            if now.authorities or now.must_show:
                if now.authorities:
                    _load_authorities(context, now.authorities)
                context.verify_mode = ssl.CERT_REQUIRED if now.must_show else ssl.CERT_OPTIONAL
        if before is not None and not now.keeps_trust_of(before):
            self._trusted.clear()
        if context is not None:
            self._trusted.add(context)
        self.context, self._in_force = context, now
        if before is not None:
            _log.info("certificates reloaded")


def _empty_context() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # on by default since Python 3.13, and more than many clusters' own authorities satisfy
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _load_pair(context: ssl.SSLContext, pair: tuple[bytes, bytes]) -> None:
    certificate, key = pair
    with in_memory(certificate) as certificate_path, in_memory(key or certificate) as key_path:
        context.load_cert_chain(certificate_path, key_path, password="")  # else it would ask on a terminal


def _load_authorities(context: ssl.SSLContext, authorities: bytes) -> None:
    with in_memory(authorities) as path:
        context.load_verify_locations(path)


def _blocks(pem: bytes) -> set[bytes]:
    return {b"".join(found[2].split()) for found in _PEM_BLOCK.finditer(pem)}
