"""``kubectl port-forward``: SPDY/3.1 frames inside a WebSocket, as Kubernetes speaks it since 1.30.

For each connection the client opens two streams, one for errors and one for data; their headers name the
port. Only what kubectl uses of SPDY is understood: it has no flow control and no priorities.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

PROTOCOL = "SPDY/3.1+portforward.k8s.io"
SYN_STREAM, SYN_REPLY, RST_STREAM, PING, GOAWAY, HEADERS = 1, 2, 3, 6, 7, 8
FIN = 1
CHUNK_BYTES = 65536

# The dictionary of SPDY/3 header blocks (draft-mbelshe-httpbis-spdy-00, 2.6.10.1): names behind their
# lengths, then values.
_NAMES = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges "
    "age allow authorization cache-control connection content-base content-encoding content-language "
    "content-length content-location content-md5 content-range content-type date etag expect expires from "
    "host if-match if-modified-since if-none-match if-range if-unmodified-since last-modified location "
    "max-forwards pragma proxy-authenticate proxy-authorization range referer retry-after server te trailer "
    "transfer-encoding upgrade user-agent vary via warning www-authenticate method get status 200_OK version "
    "HTTP/1.1 url public set-cookie keep-alive origin"
)
_VALUES = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized"
    "403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service Unavailable"
    "Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMT"
    "chunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,"
    "text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)
_WORDS = [word.replace("_", " ").encode() for word in _NAMES.split()]
DICTIONARY = b"".join(struct.pack(">I", len(word)) + word for word in _WORDS) + _VALUES.encode()


@dataclass(slots=True)
class Frames:
    """Cuts a byte stream into SPDY frames; header blocks share one compression in each direction."""

    _unread: bytearray = field(default_factory=bytearray)
    _inflate: zlib._Decompress = field(default_factory=lambda: zlib.decompressobj(zdict=DICTIONARY))
    _deflate: zlib._Compress = field(default_factory=lambda: zlib.compressobj(zdict=DICTIONARY))

    def frames_of(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """Complete frames as kind (0 for data), flags and payload, which begins with the stream's id."""
        self._unread += data
        frames = []
        while len(self._unread) >= 8:
            first, second = struct.unpack(">II", self._unread[:8])
            flags, length = second >> 24, second & 0xFFFFFF
            if len(self._unread) < 8 + length:
                break
            payload = bytes(self._unread[8 : 8 + length])
            del self._unread[: 8 + length]
            if first >> 31:
                frames.append((first & 0xFFFF, flags, payload))
            else:
                frames.append((0, flags, struct.pack(">I", first) + payload))
        return frames

    def headers(self, block: bytes) -> dict[str, str]:
        """The names and values of a compressed header block."""
        plain = self._inflate.decompress(block)
        (count,), at, words = struct.unpack_from(">I", plain), 4, []
        for _ in range(2 * count):
            (length,) = struct.unpack_from(">I", plain, at)
            words.append(plain[at + 4 : at + 4 + length].decode())
            at += 4 + length
        return dict(zip(words[::2], words[1::2], strict=True))

    def reply(self, stream: int) -> bytes:
        """SYN_REPLY without headers."""
        block = self._deflate.compress(struct.pack(">I", 0)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return control(SYN_REPLY, struct.pack(">I", stream) + block)


def control(kind: int, payload: bytes, flags: int = 0) -> bytes:
    return struct.pack(">II", 0x80030000 | kind, flags << 24 | len(payload)) + payload


def data(stream: int, payload: bytes, flags: int = 0) -> bytes:
    return struct.pack(">II", stream, flags << 24 | len(payload)) + payload


@dataclass(slots=True)
class Connection:
    """One connection of the client: an error stream, a data stream, and the socket of the pod's program."""

    error_stream: int
    from_client: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)  # empty: the client has ended


class Forwarding:
    """All connections of one ``kubectl port-forward``. `addresses` are tried in turn."""

    def __init__(self, socket: web.WebSocketResponse, pod: str, addresses: Sequence[str]) -> None:
        self._socket = socket
        self._pod = pod
        self._addresses = addresses
        self._frames = Frames()
        self._errors: dict[str, int] = {}  # error streams by request
        self._connections: dict[int, Connection] = {}  # by data stream
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Runs until the client closes the WebSocket."""
        async with self._tasks:
            async for message in self._socket:
                if message.type == aiohttp.WSMsgType.BINARY:
                    for kind, flags, payload in self._frames.frames_of(message.data):
                        await self._take(kind, flags, payload)
            for connection in self._connections.values():
                connection.from_client.put_nowait(b"")

    async def _take(self, kind: int, flags: int, payload: bytes) -> None:
        stream = struct.unpack_from(">I", payload)[0] & 0x7FFFFFFF if len(payload) >= 4 else 0
        if kind == SYN_STREAM:
            headers = self._frames.headers(payload[10:])
            await self._socket.send_bytes(self._frames.reply(stream))
            if headers["streamtype"] == "error":
                self._errors[headers["requestid"]] = stream
            else:
                connection = Connection(self._errors.pop(headers["requestid"]))
                self._connections[stream] = connection
                work = self._forward(stream, connection, int(headers["port"]))
                self._tasks.create_task(work, name=f"forward to {headers['port']}")
        elif kind == PING:
            await self._socket.send_bytes(control(PING, payload))
        elif kind == HEADERS:
            self._frames.headers(payload[4:])  # keeps the compression state in step
        elif stream in self._connections and kind in (0, RST_STREAM):
            if payload[4:] and kind == 0:
                self._connections[stream].from_client.put_nowait(payload[4:])
            if flags & FIN or kind == RST_STREAM:
                self._connections[stream].from_client.put_nowait(b"")

    async def _forward(self, stream: int, connection: Connection, port: int) -> None:
        """Copy both ways until the program closes the connection; a failure goes to the error stream."""
        try:
            reader, writer = await self._connect(port)
            copying = asyncio.create_task(_to_program(connection.from_client, writer), name="to the program")
            try:
                while chunk := await reader.read(CHUNK_BYTES):
                    await self._socket.send_bytes(data(stream, chunk))
            finally:
                copying.cancel()
                await asyncio.gather(copying, return_exceptions=True)
                writer.close()
        except OSError as error:
            words = f"error forwarding port {port} to pod {self._pod}, uid : {error}"
            with contextlib.suppress(OSError):
                await self._socket.send_bytes(data(connection.error_stream, words.encode()))
        finally:
            del self._connections[stream]
        with contextlib.suppress(OSError):  # the client may have gone first
            await self._socket.send_bytes(data(stream, b"", FIN) + data(connection.error_stream, b"", FIN))

    async def _connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for address in self._addresses[:-1]:
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(address, port)
        return await asyncio.open_connection(self._addresses[-1], port)


async def _to_program(queue: asyncio.Queue[bytes], writer: asyncio.StreamWriter) -> None:
    while chunk := await queue.get():
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def serve(request: web.Request, pod: str, addresses: Sequence[str]) -> web.WebSocketResponse:
    """Answers the WebSocket of a ``kubectl port-forward`` to a pod that listens on one of `addresses`."""
    socket = web.WebSocketResponse(protocols=[PROTOCOL])
    await socket.prepare(request)
    await Forwarding(socket, pod, addresses).run()
    return socket
