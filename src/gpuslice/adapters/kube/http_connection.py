"""One HTTP/1.1 connection to the API server: a request goes out, its answer comes in, whole or in pieces.

Answers are parsed by httptools, which wraps llhttp, the parser of Node.js. A connection carries one exchange
at a time and can be reused once the answer is complete, unless either side wants to close.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import cast

import httptools

from gpuslice.adapters.kube.http import ApiResponse

# A server that lost its power says nothing more, and on a watch we say nothing either: only probes tell, here
# after 25 s; client-go's pings over HTTP/2 take 45. Without them nobody notices until the watch should end.
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, how many
HIGH_WATER_BYTES = 4 << 20  # of a stream, that nobody has taken yet


class BrokenConnectionError(Exception):
    """The connection ended or sent something that is not HTTP. `untouched`: no byte of an answer had come."""

    def __init__(self, message: str, untouched: bool) -> None:
        super().__init__(message)
        self.untouched = untouched


class HttpConnection(asyncio.Protocol):
    """A connection. `fresh` until its first exchange."""

    def __init__(self) -> None:
        self.fresh = True
        self.status = 0
        self._head: list[tuple[bytes, bytes]] = []
        self.idle_since = 0.0
        self._loop = asyncio.get_running_loop()
        self._closed = self._loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._parts: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._streaming = self._paused = False
        self._started = self._complete = False
        self._touched = False  # a part of an answer has come
        self._busy = False
        self._late = False
        self._broken = ""
        self._news: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        open_still = self._transport is not None and not self._transport.is_closing()
        return open_still and not (self._busy or self._broken)

    @property
    def streaming(self) -> bool:
        """Whether an answer without an end is coming, as a watch is."""
        return self._busy and self._streaming

    # -- what the transport does with it ---------------------------------------------------------------------

    def send(self, head: bytes, body: bytes) -> None:
        """Begin an exchange."""
        self._head = []
        self._parts.clear()
        self._waiting_bytes = 0
        self._started = self._complete = self._touched = self._streaming = False
        self._busy = True
        if self._transport is None:
            raise BrokenConnectionError(self._broken or "the connection is closed", untouched=True)
        if body:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head)

    async def whole(self) -> ApiResponse:
        """The complete answer; TimeoutError if it has not come before `expire`."""
        while not self._complete:
            await self._wait()
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._end()
        return ApiResponse(self.status, self._headers(), body)

    async def start(self) -> None:
        """Wait until status and headers are known; `part` then returns the body."""
        self._streaming = True
        while not self._started:
            await self._wait()

    async def part(self) -> bytes:
        """The next piece of the body; b"" at its end."""
        while not self._parts:
            if self._complete:
                self._end()
                return b""
            await self._wait()
        part = self._parts.popleft()
        self._waiting_bytes -= len(part)
        if self._paused and not self._parts and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return part

    def abandon(self, why: str = "") -> None:
        """Close it immediately; whoever waits for an answer gets `why`."""
        if self._transport is not None:
            self._break(why or "the connection was given up")
            self._transport.abort()

    def expire(self) -> None:
        """The answer takes too long: close the connection at once."""
        self._late = True
        self.abandon("no answer in time")

    async def close(self) -> None:
        """Close it and wait until it is."""
        if self._transport is not None:
            self._transport.close()
            await asyncio.wait([self._closed], timeout=1)
        self.abandon()

    # -- what asyncio and the parser tell --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by type, only by its methods
        line: socket.socket | None = transport.get_extra_info("socket")
        if line is None:
            return
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):  # Linux' names; elsewhere the system's times apply
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        if not self._busy:  # nobody asked, so it is not an answer
            return self.abandon("unexpected data from the server")
        self._touched = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.abandon(f"the answer is not HTTP/1.1: {error}")
        return None

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if (
            self._started
            and not self._complete
            and not self._headers().keys() & {"content-length", "transfer-encoding"}
            and error is None
        ):
            self._complete = True
        self._break(f"connection lost: {error}" if error else "the server closed the connection")
        if not self._closed.done():
            self._closed.set_result(None)

    def on_message_begin(self) -> None:
        if self._complete:
            self._broken = "unexpected data from the server"

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._started:  # otherwise a trailer, or of an answer that nobody asked for
            self._head.append((name, value))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._started = True
            if self._streaming:
                self._tell()

    def on_body(self, part: bytes) -> None:
        if self._complete:
            return
        self._parts.append(part)
        if not self._streaming:
            return
        self._waiting_bytes += len(part)
        if self._waiting_bytes > HIGH_WATER_BYTES and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._tell()

    def on_message_complete(self) -> None:
        if self.status < 200:  # "continue" and the like: the answer is still to come
            self._head = []
            return
        self._complete = True
        if not self._parser.should_keep_alive():
            self._broken = "the server closes the connection"
        self._tell()

    # -- inside ----------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._busy = self.fresh = False
        self.idle_since = self._loop.time()

    def _headers(self) -> dict[str, str]:
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self._head}

    def _break(self, why: str) -> None:
        self._broken = self._broken or why
        self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _wait(self) -> None:
        """Wait for news. BrokenConnectionError if none can come, TimeoutError if it is late."""
        if self._late:
            raise TimeoutError
        if self._broken and not self._complete:
            raise BrokenConnectionError(self._broken, untouched=not self._touched)
        self._news = self._loop.create_future()
        try:
            await self._news
        finally:
            self._news = None
