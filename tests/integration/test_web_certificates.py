"""Whose certificate opens what is for kube-scheduler: theirs, now, for that purpose, by that name."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gpuslice.adapters.limits import LIMITS
from gpuslice.adapters.web.app import for_known_clients, post
from gpuslice.adapters.web.messages import text_answer
from gpuslice.adapters.web.serve import Listen, serving
from tests.integration.test_web_serve import app_of, write_certificate

NAME = "gpuslice-scheduler"
NOW = datetime.now(UTC)
DAY = timedelta(days=1)


@dataclass
class Door:
    port: int
    authority: trustme.CA
    folder: Path

    def context(self, shown: ssl.SSLContext | trustme.LeafCert | Path | None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if isinstance(shown, trustme.LeafCert):
            shown.configure_cert(context)
        elif isinstance(shown, Path):
            context.load_cert_chain(shown)
        return context

    async def status(self, shown: trustme.LeafCert | Path | None) -> int | None:
        """None: the handshake failed."""
        try:
            async with (
                aiohttp.ClientSession() as client,
                client.post(f"https://localhost:{self.port}/act", ssl=self.context(shown)) as answer,
            ):
                return answer.status
        except (aiohttp.ClientError, ConnectionError):
            return None


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    authority = trustme.CA()
    write_certificate(tmp_path, authority)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    files = {"certificate": "cert.pem", "key": "key.pem", "client_ca": "ca.pem"}
    paths = {name: str(tmp_path / file) for name, file in files.items()}
    listen = Listen(0, "localhost", **paths, client_names=frozenset({NAME}), reload_every_s=0.02)  # type: ignore[arg-type]
    async with serving(
        app_of(for_known_clients(post("/act", lambda _: text_answer("done")))), listen
    ) as port:
        yield Door(port, authority, tmp_path)


def for_servers(door: Door) -> Path:
    """Of the right authority and name, and not for clients."""
    issuer = serialization.load_pem_private_key(door.authority.private_key_pem.bytes(), None)
    assert isinstance(issuer, ec.EllipticCurvePrivateKey)
    above = x509.load_pem_x509_certificate(door.authority.cert_pem.bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)]))
        .issuer_name(above.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - DAY)
        .not_valid_after(NOW + DAY)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(issuer, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    path = door.folder / "server-only.pem"
    path.write_bytes(pem + made.public_bytes(serialization.Encoding.PEM))
    return path


async def test_only_kube_schedulers_own_certificate_opens_the_door(door: Door) -> None:
    issue, other = door.authority.issue_cert, trustme.CA()
    assert await door.status(issue(NAME)) == 200
    assert await door.status(issue(common_name=NAME)) == 200
    assert await door.status(None) == 403
    assert await door.status(issue("gpushare-schd-extender.kube-system.svc")) == 403  # the extender's own
    assert await door.status(issue(f"{NAME}.example.org", f"*.{NAME}")) == 403
    assert await door.status(other.issue_cert(NAME)) is None
    assert await door.status(issue(NAME, not_before=NOW - 2 * DAY, not_after=NOW - DAY)) is None
    assert await door.status(issue(NAME, not_before=NOW + DAY, not_after=NOW + 2 * DAY)) is None
    assert await door.status(for_servers(door)) is None


async def test_a_renewal_cuts_no_connection_and_a_client_goes_on_with_its_own(door: Door) -> None:
    shown = door.context(door.authority.issue_cert(NAME))
    before = Path(door.folder / "cert.pem").read_bytes()
    async with aiohttp.ClientSession() as client:
        url = f"https://localhost:{door.port}/act"
        async with client.post(url, ssl=shown) as answer:
            assert answer.status == 200
            connection = answer.connection
        write_certificate(door.folder, door.authority)
        assert Path(door.folder / "cert.pem").read_bytes() != before
        await asyncio.sleep(0.1)
        async with client.post(url, ssl=shown) as answer:
            assert answer.status == 200
        assert connection is None or not connection.closed


async def test_so_many_handshakes_are_under_way_and_no_more(door: Door) -> None:
    """Each takes memory before anything is known of who it is; the oldest makes room."""
    lines = [await asyncio.open_connection("localhost", door.port) for _ in range(3 * LIMITS.handshakes)]
    assert await door.status(door.authority.issue_cert(NAME)) == 200
    under_way = [task for task in asyncio.all_tasks() if task.get_name() == "handshake"]
    assert 0 < len(under_way) <= LIMITS.handshakes
    for _, writer in lines:
        writer.transport.abort()


async def test_a_handshake_of_plain_text_or_half_of_one_harms_nobody(door: Door) -> None:
    for sent in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"\x80\x2e\x01\x03\x01",
        b"\x00" * 500,
    ):
        _, writer = await asyncio.open_connection("localhost", door.port)
        writer.write(sent)
        await writer.drain()
        writer.write_eof()  # half closed
        assert await door.status(door.authority.issue_cert(NAME)) == 200
        writer.transport.abort()


async def test_a_small_answer_is_one_record(door: Door) -> None:
    """A record costs both sides more than the bytes in it."""

    def first_record() -> bytes:
        with (
            socket.create_connection(("localhost", door.port)) as plain,
            door.context(None).wrap_socket(plain, server_hostname="localhost") as line,
        ):
            line.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            return line.recv(1 << 16)  # OpenSSL reads no more than one at a time

    assert (await asyncio.to_thread(first_record)).endswith(b"\r\n\r\nok")
