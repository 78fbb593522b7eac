"""HTTP/1.1 for our own processes: whole requests in, whole answers out, over one connection after another.

Small on purpose: no streaming, no upgrades, no compression. What a client sends is parsed by httptools, which
wraps llhttp, the parser of Node.js. Requests of one connection are answered one at a time and in their order,
however many were sent ahead. Source of the rules: RFC 9110 and RFC 9112.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, cast

import httptools

from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, head_of, json_answer

App = Callable[[HttpRequest], HttpResponse | Awaitable[HttpResponse]]
"""Answers requests, at once where it can. It raises nothing: an error is an answer too."""

Admit = Callable[[HttpRequest], int | HttpResponse]
"""How many bytes of body a request may bring, by its head; or why it is not wanted at all."""

HEAD_LIMIT_BYTES = 32 << 10
READ_BYTES = 256 << 10  # at a time: the question of a large cluster comes in one
_STEP_BITS = 16  # so often, in bytes as a power of two, what a connection holds is added to all the others'
_WAITING_BYTES = 1 << 10  # what a request that was sent ahead takes beside its body
_MOMENT_S = 1.0  # who has sent for longer makes room for others
MOST_CLIENTS = 256
"""kube-scheduler, Prometheus and probes are a handful; a process may often open 1024 files at most."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client may take, in seconds."""

    request_s: float = 30.0  # from the first byte of a request to its last
    answer_s: float = 60.0  # to take an answer off our hands
    idle_s: float = 600.0  # between two requests: longer than clients keep idle connections themselves
    linger_s: float = 2.0  # to read a refusal while it is still sending


@dataclass(slots=True)
class Clients:
    """All connections of one server; called, it makes the protocol of a new one.

    `body_limit_bytes` is of one request, where `admit` does not say less; `most_bytes` of all together, with
    answers that are not taken. `names`: of these a client's certificate must have one for the client to be
    known; any will do where there are none.
    """

    app: App
    body_limit_bytes: int
    patience: Patience = Patience()
    most: int = MOST_CLIENTS
    names: frozenset[str] = frozenset()
    admit: Admit | None = None
    most_bytes: int = 64 << 20
    draining: bool = False
    connections: set[Connection] = field(default_factory=set)
    answering: set[asyncio.Task[None]] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES)))
    """What has just been read, by whichever connection: it is parsed before the next one reads."""

    def __call__(self) -> Connection:
        return Connection(self)

    def welcome(self, connection: Connection, now: float) -> None:
        """A new client. Of too many the one that has been silent longest goes: each is an open file."""
        self.connections.add(connection)
        if len(self.connections) > self.most:
            max(self.connections, key=lambda each: each.silent_s(now)).abort()

    def held_bytes(self) -> int:
        """Of bodies that are on their way or being answered, and of answers that are not taken."""
        return sum(each.held_bytes for each in self.connections)

    def makes_room(self, wanting: Connection, now: float) -> bool:
        """Whether all together hold no more than they may. For `wanting` others go: first who showed no
        certificate, of them who has been sending or reading for longest; but nobody who has only just begun.
        """
        held = {each: each.held_bytes for each in self.connections}
        while sum(held.values()) > self.most_bytes:
            slow = [each for each, size in held.items() if size and each.silent_s(now) > _MOMENT_S]
            if not slow:
                return False
            goes = max(slow, key=lambda each: (not each.known, each.silent_s(now)))
            if goes is wanting:
                return False
            goes.abort()
            del held[goes]
        return True

    def end_idle(self) -> None:
        """Have all come back on new connections, which may lead elsewhere; what was begun is answered."""
        for connection in list(self.connections):
            connection.end_when_idle()

    def sweep(self, now: float) -> None:
        """Cut off those that took too long. Looked at now and then: a timer for each request costs more."""
        for connection in list(self.connections):
            connection.hurry(now)

    async def drain(self, timeout_s: float) -> None:
        """Let what is under way finish, then cut everything off. Nobody new may come any more."""
        self.draining = True
        for connection in list(self.connections):
            connection.end_when_idle()
        try:
            # before Python 3.11.3 `timeout` does not raise TimeoutError in a task that has been cancelled
            await asyncio.wait_for(self.all_gone(), timeout_s)
        except TimeoutError:
            for task in self.answering:
                task.cancel()
            for connection in list(self.connections):
                connection.abort()
            await asyncio.gather(*self.answering, return_exceptions=True)

    async def all_gone(self) -> None:
        """Until the last client has left and the last response is made."""
        while self.connections or self.answering:
            self.changed.clear()
            await self.changed.wait()


def is_local(peer: object) -> bool:
    """Whether who connected is on this machine: on loopback, or on a unix socket, which has no address."""
    if not isinstance(peer, tuple) or not peer:
        return True
    try:
        address = ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def names_of(certificate: Mapping[str, Any]) -> set[str]:
    """Common name and DNS names of a certificate, as `ssl.SSLSocket.getpeercert` has it."""
    subject = [pair for pairs in certificate.get("subject", ()) for pair in pairs]
    names = [*subject, *certificate.get("subjectAltName", ())]
    return {value for kind, value in names if kind in {"commonName", "DNS"}}


class Connection(asyncio.BufferedProtocol):
    """One client."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None  # None before and after
        self._waiting: deque[HttpRequest] = deque()
        self._refusal: HttpResponse | None = (
            None  # the last answer: what came after the waiting ones is no request
        )
        self.known = self._local = False
        self._busy = False  # an answer is being made
        self._answering_bytes = 0  # of the body that it answers
        self._blocked = False  # the client does not read what we send
        self._deaf = False  # what it sends is not looked at any more
        self._lingering = False
        self._since = self._loop.time()
        self._new_message()
        self._receiving = False

    def _new_message(self) -> None:
        self._receiving = self._in_head = True
        self._body_limit_bytes = self._clients.body_limit_bytes
        self._received_bytes = self._body_bytes = 0
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    # -- what asyncio tells ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by type, only by its methods
        shown = transport.get_extra_info("peercert")  # it has been verified
        self.known = bool(shown) and (not self._clients.names or bool(self._clients.names & names_of(shown)))
        self._local = is_local(transport.get_extra_info("peername"))
        self._clients.welcome(self, self._loop.time())

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._waiting.clear()
        del self._parser  # it calls us, a circle that only the collector would find; it is fed no more
        self._clients.connections.discard(self)
        self._clients.changed.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._clients.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._deaf:
            return
        self._received_bytes += nbytes
        try:
            self._parser.feed_data(self._clients.buffer[:nbytes])
        except httptools.HttpParserUpgrade:  # a server may stay with HTTP/1.1; what follows would be another
            self._deaf = True
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is not HTTP/1.1: {error}")
        if self._in_head and self._receiving and self._received_bytes > HEAD_LIMIT_BYTES:
            self._refuse(431, f"the request's head has more than {HEAD_LIMIT_BYTES} bytes")
        self._go_on()
        if self._waiting:  # sent ahead, and held until what came before has been taken
            self._hold()

    def eof_received(self) -> bool:
        """The client sends no more; over plain TCP it may still read."""
        self._deaf = True
        if self._transport is None or self._transport.get_extra_info("ssl_object") is not None:
            return False
        return self._busy or bool(self._waiting)

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

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        before = self._headers.get(key)
        self._headers[key] = text if before is None else f"{before}, {text}"

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._clients.admit is not None:
            allowed = self._clients.admit(self._request())
            if isinstance(allowed, HttpResponse):
                self._refuse_with(allowed)
                return
            self._body_limit_bytes = allowed
        if "host" not in self._headers and self._parser.get_http_version() == "1.1":
            self._refuse(400, "the Host header is missing")
        elif int(self._headers.get("content-length", 0)) > self._body_limit_bytes:
            self._refuse_body()
        elif (encoding := self._headers.get("content-encoding", "identity")).lower() != "identity":
            self._refuse(415, f"the request's body is encoded as {encoding}, must not be encoded")
        elif self._headers.get("expect", "").lower() == "100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        before, self._body_bytes = self._body_bytes, self._body_bytes + len(part)
        if self._body_bytes > self._body_limit_bytes:
            self._refuse_body()
        elif before >> _STEP_BITS != self._body_bytes >> _STEP_BITS:
            # each alone may send that much, all at once may not: it would be more memory than there is
            self._hold()
        if self._refusal is None:
            self._body.append(part)

    def on_message_complete(self) -> None:
        self._receiving = False
        if self._refusal is None:
            request = self._request()
            request.body = b"".join(self._body) if len(self._body) != 1 else self._body[0]
            self._waiting.append(request)
        self._body, self._body_bytes = [], 0

    def _request(self) -> HttpRequest:
        """What has come of it; its body may be on its way."""
        return HttpRequest(
            self._parser.get_method().decode("latin-1"),
            self._target.decode("latin-1"),
            self._headers,
            keep_alive=self._parser.should_keep_alive(),
            known=self.known,
            local=self._local,
        )

    # -- answering -------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Hand over what waits, one at a time; read on only when nothing does."""
        while self._waiting and not self._busy and not self._blocked:
            request = self._waiting.popleft()
            answer = self._clients.app(request)
            if isinstance(answer, HttpResponse):
                self._answered(request, answer)
                continue
            self._busy, self._answering_bytes = True, len(request.body)
            task = asyncio.ensure_future(self._await(request, answer))
            self._clients.answering.add(task)
            task.add_done_callback(self._clients.answering.discard)
        if self._transport is None or self._lingering or self._transport.is_closing():
            return
        if self._refusal is not None and not self._busy and not self._waiting:
            self._write(self._refusal, last=True)
            # closing at once on a client that still sends would reset the connection before it has read
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

    async def _await(self, request: HttpRequest, coming: Awaitable[HttpResponse]) -> None:
        """It goes on when the client has left: what it has begun must come to its end."""
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
        if last and self._transport is not None:
            self._waiting.clear()
            self._deaf = True
            self._transport.close()

    def _write(self, answer: HttpResponse, last: bool, without_body: bool = False) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        head = head_of(answer, last)
        if without_body:
            self._transport.write(head)
        else:
            self._transport.writelines((head, answer.body, *answer.more))
            if self._transport.get_write_buffer_size():
                self._transport.set_write_buffer_limits()  # 3.12 and 3.13 look at them after `write` only
                if not self._clients.makes_room(self, self._loop.time()):
                    self._transport.abort()
        self._since = self._loop.time()

    # -- refusing --------------------------------------------------------------------------------------------

    def _refuse(self, status: int, sentence: str) -> None:
        self._refuse_with(json_answer({"error": sentence}, status))

    def _refuse_with(self, answer: HttpResponse) -> None:
        self._deaf = True
        self._body, self._body_bytes = [], 0
        if self._refusal is None:
            self._refusal = answer

    def _refuse_body(self) -> None:
        self._refuse(413, f"the request's body has more than {self._body_limit_bytes} bytes")

    def _hold(self) -> None:
        if not self._clients.makes_room(self, self._loop.time()):
            self._refuse(503, "others send large requests just now; try again")

    # -- ending ----------------------------------------------------------------------------------------------

    def end_when_idle(self) -> None:
        if not (self._busy or self._waiting or self._receiving) and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def held_bytes(self) -> int:
        waiting = sum(_WAITING_BYTES + len(request.body) for request in self._waiting)
        unsent = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return self._body_bytes + waiting + self._answering_bytes + unsent

    def silent_s(self, now: float) -> float:
        """For how long nothing has come to an end here; less than nothing while an answer is being made."""
        return -1.0 if self._busy else now - self._since

    def hurry(self, now: float) -> None:
        if self._busy or self._transport is None:
            return
        patience = self._clients.patience
        if self._transport.get_write_buffer_size():
            allowed_s = patience.answer_s
        elif self._lingering:
            allowed_s = patience.linger_s
        else:
            allowed_s = patience.request_s if self._receiving else patience.idle_s
        if now - self._since > allowed_s:
            self.abort()
