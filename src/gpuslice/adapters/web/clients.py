"""Who is connected to one of our servers, and what keeps them within its limits: memory, files, time."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABCMeta, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, cast

from gpuslice.adapters.limits import LIMITS, Limits
from gpuslice.adapters.turns import Asker
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, json_answer

App = Callable[[HttpRequest], HttpResponse | Awaitable[HttpResponse]]
"""Answers requests, immediately if possible. It raises nothing: an error is an answer too."""

Admit = Callable[[HttpRequest], int | HttpResponse]
"""How many bytes of body a request may have, judged by its head; or why it is not accepted at all."""

READ_BYTES = 256 << 10  # at a time: the question of a large cluster fits
STEP_BITS = 16  # a connection adds its bytes to the common count in steps of this power of two
_MOMENT_S = 1.0  # who has been sending for longer makes room for others
_MOST_DIGITS = 18  # of a length; Python itself refuses numbers of thousands of digits


@dataclass(slots=True)
class Clients:
    """All connections of one server, of any HTTP version.

    `admit` may allow a request fewer bytes than `limits`. `names`: a client is known if its certificate has
    one of these; without any, every certificate will do. `trusts`: whether who was admitted by a TLS context
    still would be.
    """

    app: App
    limits: Limits = LIMITS
    names: frozenset[str] = frozenset()
    admit: Admit | None = None
    trusts: Callable[[ssl.SSLContext | None], bool] = lambda _: True
    draining: bool = False
    connections: set[Client] = field(default_factory=set)
    answering: set[asyncio.Task[None]] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES)))
    """What any connection has just read: it is parsed before the next one reads."""
    _newcomers: deque[Callable[[], None]] = field(default_factory=deque)
    _others: OrderedDict[str, deque[Callable[[], None]]] = field(default_factory=OrderedDict)
    """By address, the one whose turn is next first."""
    _in_turn: bool = False

    def body_limit(self, request: HttpRequest) -> int | HttpResponse:
        """How many bytes of body a request may have, or why it is refused by its head alone."""
        allowed = self.limits.body_bytes if self.admit is None else self.admit(request)
        if isinstance(allowed, HttpResponse):
            return allowed
        if len(request.headers) > self.limits.fields:
            sentence = f"the request's head has more than {self.limits.fields} fields"
            return json_answer({"error": sentence}, 431)
        length = request.headers.get("content-length", "0")
        if not length.isdecimal():  # digits are checked, but not whether it was given twice
            return json_answer({"error": "Content-Length is not one number"}, 400)
        if len(length) > _MOST_DIGITS or int(length) > allowed:
            return too_large(allowed)
        if (encoding := request.headers.get("content-encoding", "identity")).lower() != "identity":
            sentence = f"the request's body is encoded as {encoding}, must not be encoded"
            return json_answer({"error": sentence}, 415)
        return allowed

    def hand_over(self, answering: Coroutine[Any, Any, None]) -> None:
        """Run a slow answer to its end, even if the client leaves."""
        task = asyncio.ensure_future(answering)
        self.answering.add(task)
        task.add_done_callback(self.answering.discard)

    def in_turn(self, work: Callable[[], None], client: Client) -> None:
        """Do it soon for a known client, for others in each turn of the loop one's first request and one's
        further one.

        New connections are accepted at the same pace, so that first requests do not pile up: however many
        strangers there are, clients with a certificate wait for two of their requests, and who has just
        connected for a few. Further requests go address by address: a client that cannot show a certificate,
        as kube-scheduler without a CA for clients, waits for one of each other address.
        """
        if client.known:
            asyncio.get_running_loop().call_soon(work)
            return
        if client.asker.first:
            self._newcomers.append(work)
        else:
            self._others.setdefault(client.asker.address, deque()).append(work)
        if not self._in_turn:
            self._in_turn = True
            self._next_strangers()

    def _next_strangers(self) -> None:
        self._in_turn = bool(self._newcomers or self._others)
        if self._in_turn:
            asyncio.get_running_loop().call_soon(self._next_strangers)
        if self._newcomers:
            self._newcomers.popleft()()
        if self._others:
            address, waiting = self._others.popitem(last=False)
            work = waiting.popleft()
            if waiting:
                self._others[address] = waiting  # behind all other addresses
            work()

    def welcome(self, connection: Client, now: float) -> None:
        """Admit a new client. If too many are connected, the one that has been silent for longest goes.

        But never one with a certificate before one without, nor the new one where others are busy.
        """
        self.connections.add(connection)
        if len(self.connections) > self.limits.clients:
            old = {each: each is not connection for each in self.connections}
            max(old, key=lambda each: (not each.known, old[each], each.silent_s(now))).abort()

    def held_bytes(self) -> int:
        """Of bodies that are arriving or being answered, and of unread answers."""
        return sum(each.held_bytes for each in self.connections)

    def makes_room(self, wanting: Client, now: float) -> bool:
        """Whether all together hold no more than allowed, after cutting off others for `wanting`.

        First clients without a certificate, of these the one that has been sending or reading for longest;
        but none that has only just begun.
        """
        held = {each: each.held_bytes for each in self.connections}
        while sum(held.values()) > self.limits.all_bytes:
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
        """Make all clients return on new connections, which may lead elsewhere, after their answers."""
        for connection in list(self.connections):
            connection.end_when_idle()

    def end_untrusted(self, now: float, grace_s: float) -> None:
        """End connections of clients who would not be admitted any more: after their answers, or at most
        after `grace_s`."""
        for connection in list(self.connections):
            if self.trusts(connection.context):
                continue
            if connection.untrusted_since is None:
                connection.untrusted_since = now
            if now - connection.untrusted_since >= grace_s:
                connection.abort()
            else:
                connection.end_when_idle()

    def sweep(self, now: float) -> None:
        """Cut off those that take too long. Done now and then: a timer for each request costs more."""
        for connection in list(self.connections):
            connection.hurry(now)

    async def drain(self, timeout_s: float) -> None:
        """Let requests in progress finish, then cut everything off. No new clients are admitted."""
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
        """Wait until the last client has left and the last answer is made."""
        while self.connections or self.answering:
            self.changed.clear()
            await self.changed.wait()


class Client(asyncio.BufferedProtocol, metaclass=ABCMeta):
    """One connection, and whose it is. `known` and `local` are as in `HttpRequest`."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._limits = clients.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None  # None before and after the connection
        self.known = self.local = self._tls = False
        self.asker = Asker()
        self.context: ssl.SSLContext | None = None
        self.untrusted_since: float | None = None
        self._since = self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by type, only by its methods
        session = transport.get_extra_info("ssl_object")
        self._tls = session is not None
        self.context = session.context if session is not None else None
        shown = transport.get_extra_info("peercert")  # it has been verified
        self.known = bool(shown) and (not self._clients.names or bool(self._clients.names & names_of(shown)))
        peer = transport.get_extra_info("peername")
        self.local, self.asker = is_local(peer), Asker(address_of(peer))
        self._clients.welcome(self, self._loop.time())
        if not self._clients.trusts(self.context):  # the files have changed during its handshake
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._clients.connections.discard(self)
        self._clients.changed.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._clients.buffer

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _was_answered(self) -> None:
        if self.asker.first:
            self.asker = self.asker._replace(first=False)

    def _asked(
        self, method: str, target: str, headers: Mapping[str, str], *, keep_alive: bool = True
    ) -> HttpRequest:
        return HttpRequest(
            method,
            target,
            headers,
            keep_alive=keep_alive,
            known=self.known,
            local=self.local,
            asker=self.asker,
        )

    @abstractmethod
    def end_when_idle(self) -> None:
        """Make the client return on another connection, once its requests are answered."""

    @abstractmethod
    def hurry(self, now: float) -> None:
        """Cut off what takes too long."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Of requests that are arriving or being answered, and of unread answers."""

    @abstractmethod
    def silent_s(self, now: float) -> float:
        """How long ago anything was completed here; negative while an answer is being made."""


def too_large(limit_bytes: int) -> HttpResponse:
    return json_answer({"error": f"the request's body has more than {limit_bytes} bytes"}, 413)


def address_of(peer: object) -> str:
    """ "" on a unix socket."""
    return str(peer[0]).partition("%")[0] if isinstance(peer, tuple) and peer else ""


def is_local(peer: object) -> bool:
    """Whether the client is on this machine: on loopback, or on a unix socket, which has no address."""
    if not (text := address_of(peer)):
        return True
    try:
        address = ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def names_of(certificate: Mapping[str, Any]) -> set[str]:
    """Common name and DNS names of a certificate, as `ssl.SSLSocket.getpeercert` has it."""
    subject = [pair for pairs in certificate.get("subject", ()) for pair in pairs]
    names = [*subject, *certificate.get("subjectAltName", ())]
    return {value for kind, value in names if kind in {"commonName", "DNS"}}
