"""HTTP/1.1 for our own processes: complete requests in, complete answers out, one after another.

Deliberately small: no streaming, no upgrades, no compression. Requests are parsed by httptools, which wraps
llhttp, the parser of Node.js. Requests of one connection are answered one at a time and in order, even if
they were pipelined. Source of the rules: RFC 9110 and RFC 9112.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable

import httptools

from gpuslice.adapters.web.clients import STEP_BITS, Client, Clients, too_large
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, head_of, json_answer

_RECORD_BYTES = 16 << 10  # the most that one TLS record carries
_WAITING_BYTES = 1 << 10  # what a pipelined request takes besides its head and body


class Connection(Client):
    """One client that speaks HTTP/1.1."""

    def __init__(self, clients: Clients) -> None:
        super().__init__(clients)
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[HttpRequest] = deque()
        self._waiting_bytes = 0
        # the last answer: what came after the waiting ones is no request
        self._refusal: HttpResponse | None = None
        self._busy = False  # an answer is being made
        self._in_queue = False  # of strangers
        self._answering_bytes = 0  # of the request that it answers
        self._blocked = False  # the client does not read what we send
        self._deaf = False  # its data is no longer parsed
        self._lingering = False
        self._new_message()
        self._receiving = False

    def _new_message(self) -> None:
        self._receiving = self._in_head = True
        self._body_limit_bytes = self._limits.body_bytes
        self._received_bytes = self._head_bytes = 0
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body = bytearray()  # small parts would each take more than they bring

    # -- what asyncio tells ----------------------------------------------------------------------------------

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._forget_waiting()
        del self._parser  # it refers to us, a cycle that only the collector would find; it gets no more data

    def buffer_updated(self, nbytes: int) -> None:
        if self._deaf:
            return
        self._received_bytes += nbytes
        try:
            self._parser.feed_data(self._clients.buffer[:nbytes])
        except httptools.HttpParserUpgrade:  # refused by staying with HTTP/1.1
            self._deaf = True
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is not HTTP/1.1: {error}")
        if self._received_bytes == 0 and nbytes > self._limits.head_bytes:
            # it began in this read, after others
            self._received_bytes = nbytes - (bytes(self._clients.buffer[:nbytes]).rfind(b"\r\n\r\n") + 1)
        if self._in_head and self._receiving and self._received_bytes > self._limits.head_bytes:
            self._refuse(431, f"the request's head has more than {self._limits.head_bytes} bytes")
        self._go_on()
        if self._waiting:  # pipelined, and held until what came before has been taken
            self._hold()

    def eof_received(self) -> bool:
        """The client sends no more; over plain TCP it may still read."""
        self._deaf = True
        return not self._tls and (self._busy or bool(self._waiting))

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        self._go_on()

    # -- what the parser tells -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._new_message()
        self._since = self._loop.time()

    def on_url(self, part: bytes) -> None:
        self._target += part
        self._count_head(len(part))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head or self._refusal is not None:
            return  # a trailer, or too much already
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        before = self._headers.get(key)
        if before is not None and key == "host":  # a proxy may have examined the other one
            self._refuse(400, "there is more than one Host header")
            return
        self._headers[key] = text if before is None else f"{before}, {text}"
        self._count_head(len(name) + len(value))
        if len(self._headers) > self._limits.fields:
            self._refuse(431, f"the request's head has more than {self._limits.fields} fields")

    def _count_head(self, more_bytes: int) -> None:
        self._head_bytes += more_bytes
        if self._head_bytes > self._limits.head_bytes:
            self._refuse(431, f"the request's head has more than {self._limits.head_bytes} bytes")

    def on_headers_complete(self) -> None:
        self._in_head = False
        version = self._parser.get_http_version()
        if "host" not in self._headers and version == "1.1":
            self._refuse(400, "the Host header is missing")
            return
        if "transfer-encoding" in self._headers and version != "1.1":
            # a proxy that does not know chunks may take them for the next request (RFC 9112, 6.1)
            self._refuse(400, f"HTTP/{version} knows no Transfer-Encoding")
            return
        allowed = self._clients.body_limit(self._request())
        if isinstance(allowed, HttpResponse):
            self._refuse_with(allowed)
            return
        self._body_limit_bytes = allowed
        if self._headers.get("expect", "").lower() == "100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        if self._refusal is not None:
            return
        before = len(self._body)
        self._body += part
        if len(self._body) > self._body_limit_bytes:
            self._refuse_with(too_large(self._body_limit_bytes))
        elif before >> STEP_BITS != len(self._body) >> STEP_BITS:
            # each connection alone may send that much, but all of them together may not
            self._hold()

    def on_message_complete(self) -> None:
        self._receiving = False
        if self._refusal is None:
            request = self._request()
            request.body = bytes(self._body)
            self._waiting.append(request)
            self._waiting_bytes += _WAITING_BYTES + request.size_bytes
        self._body = bytearray()

    def _request(self) -> HttpRequest:
        """The request; its body may still be arriving."""
        method, target = self._parser.get_method().decode("latin-1"), self._target.decode("latin-1")
        return self._asked(method, target, self._headers, keep_alive=self._parser.should_keep_alive())

    # -- answering -------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Answer what waits, one at a time; continue reading only when nothing waits."""
        if self._waiting and not (self._busy or self._blocked or self._in_queue):
            if self.known:
                self._answer_next()
            else:
                self._in_queue = True
                self._clients.in_turn(self._answer_in_turn, self)
        if self._transport is None or self._lingering or self._transport.is_closing():
            return
        if self._refusal is not None and not self._busy and not self._waiting:
            self._write(self._refusal, last=True)
            # closing immediately while the client still sends would reset the connection before it has read
            # why
            assert self._transport is not None
            self._lingering = True
            self._transport.resume_reading()
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()
        elif self._blocked or self._waiting:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _answer_in_turn(self) -> None:
        self._in_queue = False
        if self._waiting and not (self._busy or self._blocked):
            self._answer_next()
            self._go_on()

    def _answer_next(self) -> None:
        request = self._waiting.popleft()
        self._waiting_bytes -= _WAITING_BYTES + request.size_bytes
        answer = self._clients.app(request)
        if isinstance(answer, HttpResponse):
            self._answered(request, answer)
            if self._waiting:  # pipelined requests wait for other clients' turns, for example a probe's
                self._loop.call_soon(self._go_on)
        else:
            self._busy, self._answering_bytes = True, request.size_bytes
            self._clients.hand_over(self._await(request, answer))

    async def _await(self, request: HttpRequest, coming: Awaitable[HttpResponse]) -> None:
        """Continues after the client has left: what it has begun must end."""
        try:
            answer = await coming
        finally:
            self._busy, self._answering_bytes = False, 0
            self._clients.changed.set()
        self._answered(request, answer)
        self._go_on()

    def _answered(self, request: HttpRequest, answer: HttpResponse) -> None:
        last_word = self._deaf and self._refusal is None and not self._waiting
        last = answer.last or not request.keep_alive or last_word or self._clients.draining
        self._write(answer, last, without_body=request.method == "HEAD")
        self._was_answered()
        if last and self._transport is not None:
            self._forget_waiting()
            self._deaf = True
            self._transport.close()

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    def _write(self, answer: HttpResponse, last: bool, without_body: bool = False) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        head = head_of(answer, last)
        if without_body:
            self._transport.write(head)
        else:
            # An empty last piece stays in the transport of 3.12 and 3.13, which then never closes.
            pieces = tuple(piece for piece in (head, answer.body, *answer.more) if piece)
            if self._tls and len(head) + answer.length_bytes <= _RECORD_BYTES:
                pieces = (b"".join(pieces),)  # each piece would be a TLS record, work for both sides
            self._transport.writelines(pieces)
            if self._transport.get_write_buffer_size():
                self._transport.set_write_buffer_limits()  # 3.12 and 3.13 check them only after `write`
                if not self._clients.makes_room(self, self._loop.time()):
                    self._transport.abort()
        self._since = self._loop.time()

    # -- refusing --------------------------------------------------------------------------------------------

    def _refuse(self, status: int, sentence: str) -> None:
        self._refuse_with(json_answer({"error": sentence}, status))

    def _refuse_with(self, answer: HttpResponse) -> None:
        self._deaf = True
        self._body = bytearray()
        if self._refusal is None:
            self._refusal = answer

    def _hold(self) -> None:
        if not self._clients.makes_room(self, self._loop.time()):
            self._refuse(503, "others send large requests just now; try again")

    # -- ending ----------------------------------------------------------------------------------------------

    def end_when_idle(self) -> None:
        if not (self._busy or self._waiting or self._receiving) and self._transport is not None:
            self._transport.close()

    @property
    def held_bytes(self) -> int:
        unsent = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return len(self._body) + self._waiting_bytes + self._answering_bytes + unsent

    def silent_s(self, now: float) -> float:
        return -1.0 if self._busy else now - self._since

    def hurry(self, now: float) -> None:
        if self._busy or self._transport is None:
            return
        if self._transport.get_write_buffer_size():
            allowed_s = self._limits.answer_s
        elif self._lingering:
            allowed_s = self._limits.linger_s
        else:
            allowed_s = self._limits.request_s if self._receiving else self._limits.idle_s
        if now - self._since > allowed_s:
            self.abort()
