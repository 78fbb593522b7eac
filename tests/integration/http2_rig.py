"""A server with HTTP/2, and clients of it: a well-behaved one, one frame by frame, and one in memory."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import trustme
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, ResponseReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes, Settings
from hyperframe.frame import Frame, HeadersFrame, SettingsFrame

from gpuslice.adapters.limits import Limits
from gpuslice.adapters.web.app import Probes, get, make_app, post
from gpuslice.adapters.web.clients import Admit, App, Clients
from gpuslice.adapters.web.exposition import Piece
from gpuslice.adapters.web.http2 import Http2Connection
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, text_answer
from gpuslice.adapters.web.serve import Listen, serving
from tests import HANG_S

LIMIT_BYTES = 100_000
MOST_BYTES = 1_000_000  # of all clients of an `Attacker`'s server
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
Fields = list[tuple[str, str]]
FIELDS: Fields = [(":method", "POST"), (":path", "/echo"), (":scheme", "https"), (":authority", "localhost")]


@dataclass
class Reply:
    """What came back on one stream."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False
    reset: int | None = None


@dataclass
class Line:
    """One connection as a client of hyper-h2 sees it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    h2: H2Connection
    replies: dict[int, Reply] = field(default_factory=dict)
    goes: ConnectionTerminated | None = None
    ended: bool = False

    def ask(self, path: str = "/echo", body: bytes = b"", *, end: bool = True, method: str = "POST") -> int:
        stream = self.h2.get_next_available_stream_id()
        self.replies[stream] = Reply()
        fields = [(":method", method), (":path", path), *FIELDS[2:]]
        self.h2.send_headers(stream, fields, end_stream=end and not body)
        if body:
            self.send(stream, body, end=end)
        self.flush()
        return stream

    def send(self, stream: int, body: bytes, *, end: bool = False) -> None:
        for start in range(0, len(body), 16384):
            part = body[start : start + 16384]
            self.h2.send_data(stream, part, end_stream=end and start + len(part) == len(body))
        self.flush()

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(HANG_S):
            while not true():  # what a frame has made true
                data = await self.reader.read(1 << 16)
                if not data:
                    self.ended = True
                    assert true(), "the server has ended the connection"
                    return
                for event in self.h2.receive_data(data):
                    self._take(event)
                self.flush()

    def _take(self, event: object) -> None:
        match event:
            case ResponseReceived(stream_id=int(stream), headers=headers):
                self.replies[stream].headers = {str(name): str(value) for name, value in headers or ()}
            case DataReceived(stream_id=int(stream), data=data, flow_controlled_length=length):
                self.replies[stream].body += data or b""
                self.h2.acknowledge_received_data(length or 0, stream)
            case StreamEnded(stream_id=int(stream)):
                self.replies[stream].ended = True
            case StreamReset(stream_id=int(stream), error_code=code):
                self.replies[stream].reset = code
            case ConnectionTerminated():
                self.goes = event

    async def reply(self, stream: int) -> Reply:
        reply = self.replies[stream]
        await self.until(lambda: reply.ended or reply.reset is not None)
        return reply

    async def answer(self, path: str = "/echo", body: bytes = b"", *, method: str = "POST") -> Reply:
        return await self.reply(self.ask(path, body, method=method))


@dataclass
class Server:
    """A server with HTTP/2, whose path ``/later`` answers when it may."""

    port: int
    clients: Clients
    trust: ssl.SSLContext
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    begun: list[str] = field(default_factory=list)
    done: int = 0

    async def socket(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.trust.set_alpn_protocols(["h2"])
        return await asyncio.open_connection("localhost", self.port, ssl=self.trust)

    @contextlib.asynccontextmanager
    async def line(self, window_bytes: int | None = None) -> AsyncIterator[Line]:
        reader, writer = await self.socket()
        h2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        if window_bytes is not None:
            h2.local_settings = Settings(initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window_bytes})
        h2.initiate_connection()
        line = Line(reader, writer, h2)
        line.flush()
        await line.until(lambda: h2.remote_settings.initial_window_size > LIMIT_BYTES)
        await line.until(lambda: h2.outbound_flow_control_window > LIMIT_BYTES)
        try:
            yield line
        finally:
            writer.transport.abort()

    async def later(self, request: HttpRequest) -> HttpResponse:
        self.begun.append(request.body.decode())
        await self.may_answer.wait()
        self.done += 1
        return text_answer("later")

    @property
    def connection(self) -> Http2Connection:
        (connection,) = self.clients.connections
        assert isinstance(connection, Http2Connection)
        return connection


def echo(request: HttpRequest) -> HttpResponse:
    return text_answer(
        f"{request.method} {request.path} {request.query} {request.headers['host']} {len(request.body)}"
    )


@contextlib.asynccontextmanager
async def served(
    folder: Path, admit: Admit | None = None, most_bytes: int = 64 << 20
) -> AsyncIterator[Server]:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    met: list[Clients] = []
    server: Server | None = None

    async def later(request: HttpRequest) -> HttpResponse:
        assert server is not None
        return await server.later(request)

    routes = [
        post("/echo", echo),
        get("/echo", echo),
        post("/later", later),
        get("/large", lambda _: HttpResponse(b"x" * 300_000)),
        post("/last", lambda _: HttpResponse(b"go", last=True)),
    ]
    listen = Listen(
        0,
        "localhost",
        certificate=str(folder / "cert.pem"),
        key=str(folder / "key.pem"),
        http2=True,
        drain_s=0.2,
        limits=Limits(body_bytes=LIMIT_BYTES, all_bytes=most_bytes),
        admit=admit,
    )
    app = make_app(Probes("1", lambda: "", lambda _: [Piece(b"up 1\n", 1)]), routes)
    async with serving(app, listen, met.append) as port:
        server = Server(port, met[0], trust)
        yield server
        server.may_answer.set()


class Frames:
    """Frames as they come, for who sends what hyper-h2 would not."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def next(self, kind: str) -> Frame:
        async with asyncio.timeout(HANG_S):
            while True:
                frame, length = Frame.parse_frame_header(memoryview(await self._reader.readexactly(9)))
                frame.parse_body(memoryview(await self._reader.readexactly(length)))
                if type(frame).__name__ == kind:
                    return frame


class Memory(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.closed = self.paused = False
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0


class Attacker:
    """A client whose frames are made by hand."""

    def __init__(self, app: App, *, window_bytes: int = 65_535, **limits: int) -> None:
        self.clients = Clients(app, Limits(**{"body_bytes": LIMIT_BYTES, "all_bytes": MOST_BYTES, **limits}))
        self.connections: list[Http2Connection] = []
        self.made: list[tuple[Memory, Http2Connection]] = []
        self._window_bytes = window_bytes
        self.connect()

    def connect(self) -> None:
        self.transport, self.connection = Memory(), Http2Connection(self.clients)
        self.connections.append(self.connection)
        self.made.append((self.transport, self.connection))
        self.connection.connection_made(self.transport)
        self._encoder = H2Connection(H2Configuration()).encoder
        self.send(PREFACE, SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: self._window_bytes}))

    def send(self, *frames: Frame | bytes) -> None:
        """In one breath."""
        sent = b"".join(each if isinstance(each, bytes) else each.serialize() for each in frames)
        self.clients.buffer[: len(sent)] = sent
        self.connection.buffer_updated(len(sent))
        while self.connection.to_read:
            self.connection.read(memoryview(b""))

    def head(self, stream: int, fields: Fields, *, ends: bool = False) -> HeadersFrame:
        flags = ["END_HEADERS", *(["END_STREAM"] if ends else [])]
        return HeadersFrame(stream, self._encoder.encode(fields), flags=flags)

    def held_bytes(self) -> int:
        """Of all that were not sent away, as those are that began more than a second ago."""
        return sum(each.held_bytes for at, each in self.made if not at.closed)
