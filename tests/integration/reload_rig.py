"""Files of a server that are rotated, and clients who ask what holds now."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import trustme
from h2.config import H2Configuration
from h2.connection import H2Connection
from hpack import Decoder
from hyperframe.frame import Frame, HeadersFrame

from tests import HANG_S
from tests.contract.test_kube_reloads import replace_by
from tests.integration.test_extender_hostile import NAME

CUT = "cut"
HOWS = ["by rename", "in place", "by link"]


@dataclass
class Party:
    """An authority, and one client and one server that it vouches for."""

    ca: trustme.CA = field(default_factory=trustme.CA)

    def __post_init__(self) -> None:
        self.client = self.ca.issue_cert(NAME)
        self.server = self.ca.issue_cert("localhost")

    @property
    def pem(self) -> str:
        return self.ca.cert_pem.bytes().decode()

    @property
    def certificate(self) -> str:
        return self.server.cert_chain_pems[0].bytes().decode()

    @property
    def key(self) -> str:
        return self.server.private_key_pem.bytes().decode()


@dataclass
class Files:
    """Of a server, in their own folders as a Secret volume's are."""

    folder: Path
    how: str = "by rename"

    def path(self, name: str) -> Path:
        path = self.folder / name.replace(".", "-") / name
        path.parent.mkdir(exist_ok=True)
        return path

    def put(self, name: str, content: str) -> None:
        replace_by(self.path(name), content, self.how)

    def serve_as(self, party: Party, *trusted: Party) -> None:
        self.put("tls.crt", party.certificate)
        self.put("tls.key", party.key)
        self.put("ca.crt", "".join(each.pem for each in trusted or (party,)))


class Line:
    """One connection of a client, over HTTP/2 if `h2`. It trusts any server, and blocks."""

    def __init__(
        self, port: int, party: Party | None, *, h2: bool = False, session: ssl.SSLSession | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self._h2 = h2
        context = context or client_context(party, h2=h2)
        plain = socket.create_connection(("localhost", port), timeout=HANG_S)
        try:
            self.tls = context.wrap_socket(plain, server_hostname="localhost", session=session)
        except BaseException:
            plain.close()
            raise
        if h2:
            self._state = H2Connection(H2Configuration(header_encoding="utf-8"))
            self._state.initiate_connection()

    def ask(self, path: str, headers: str = "") -> str:
        """The status, or that there is no answer."""
        try:
            return self._ask_h2(path) if self._h2 else self._ask_h1(path, headers)
        except OSError:
            return CUT

    def _ask_h1(self, path: str, headers: str) -> str:
        self.tls.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
        got = b""
        while b"\r\n\r\n" not in got:
            part = self.tls.recv(65536)
            if not part:
                return CUT
            got += part
        return got[9:12].decode()

    def _ask_h2(self, path: str) -> str:
        """Frame by frame: hyper-h2 hears no answer that comes after a GOAWAY."""
        stream = self._state.get_next_available_stream_id()
        fields = [(":method", "GET"), (":path", path), (":scheme", "https"), (":authority", "localhost")]
        self._state.send_headers(stream, fields, end_stream=True)
        self.tls.sendall(self._state.data_to_send())
        while len(head := self._exactly(9)) == 9:
            frame, length = Frame.parse_frame_header(memoryview(head))
            frame.parse_body(memoryview(self._exactly(length)))
            if isinstance(frame, HeadersFrame) and frame.stream_id == stream:
                return next(
                    str(value) for name, value in Decoder().decode(frame.data) if str(name) == ":status"
                )
        return CUT

    def _exactly(self, size: int) -> bytes:
        got = b""
        while len(got) < size and (part := self.tls.recv(size - len(got))):
            got += part
        return got

    def is_open(self) -> bool:
        self.tls.settimeout(0.001)
        try:
            while self.tls.recv(65536):
                pass
            return False
        except TimeoutError:
            return True
        except OSError:
            return False
        finally:
            self.tls.settimeout(HANG_S)

    def close(self) -> None:
        self.tls.close()


def client_context(party: Party | None, *, h2: bool = False) -> ssl.SSLContext:
    context = ssl._create_unverified_context()
    if party is not None:
        party.client.configure_cert(context)
    if h2:
        context.set_alpn_protocols(["h2"])
    return context


def asked(port: int, party: Party | None, path: str, *, h2: bool = False, headers: str = "") -> str:
    try:
        line = Line(port, party, h2=h2)
    except OSError:
        return CUT
    with contextlib.closing(line):
        return line.ask(path, headers)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not await asyncio.to_thread(true):  # noqa: ASYNC110  # what others see, from outside
            await asyncio.sleep(0.02)
