"""HTTP/2 for our own processes: the questions of one client side by side, over one connection.

kube-scheduler asks for many binds at once. By HTTP/1.1 its client (Go's) opens a connection for nearly each,
with a TLS handshake that costs both sides more than the bind; by HTTP/2 it needs one connection in all.
Frames, headers and their states are hyper-h2's (RFC 9113); ours is what a client may take: memory, streams
and time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from gpuslice.adapters.web.clients import STEP_BITS, Client, Clients, too_large
from gpuslice.adapters.web.connection import HEAD_LIMIT_BYTES, Connection
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, fields_of, json_answer

NAME = "h2"  # in the TLS handshake (ALPN)
MOST_STREAMS = 128  # requests of one client at once: more than the binds that an extender lets begin
MOST_RESETS = 256  # taken back before their answer, more than answered: that is no client, it is an attack
MOST_IDLE_FRAMES = 1_000
"""More than its answers account for, of those that ask nothing and bring next to nothing: pings, settings,
leave to send. Each takes the loop some 30 µs."""
_IDLE_DATA_BYTES = 1 << 10  # a part of a body that is smaller, and not its last, is such a frame
_IDLE_FRAMES_EACH = 20  # that an answer accounts for, and one for each so many bytes of it
_BYTES_A_FRAME = 2 << 10
_SAID_BYTES = 17  # to a ping: the most that hyper-h2 says to a frame by itself
_BREATH_BYTES = 16 << 10  # of what has been read, at a time: frames are counted once they have been worked on
MOST_REQUESTS = 10_000
"""Of one connection, and a tenth of it without a certificate: hyper-h2 keeps a note of each that ended."""
_STREAM_BYTES = 4 << 10  # what a stream takes beside its request: hyper-h2's part, ours, its task
_STREAM_WINDOW_BYTES = 1 << 20  # the question of a large cluster comes without waiting for leave
_CONNECTION_WINDOW_BYTES = 4 << 20
_MOST_UNFINISHED_BYTES = (
    2 * HEAD_LIMIT_BYTES
)  # of frames that say nothing yet: the largest head, or one frame
_BUSY = json_answer({"error": "others send large requests just now; try again"}, 503)
_CONFIG = H2Configuration(client_side=False, header_encoding=None, normalize_outbound_headers=False)


@dataclass(slots=True)
class _Receiving:
    """A request of which the head has come."""

    request: HttpRequest
    body_limit_bytes: int
    began_s: float
    held_bytes: int
    body: bytearray = field(default_factory=bytearray)  # of small parts, each would take more than it brings


@dataclass(slots=True)
class _Unsent:
    """What of an answer waits for the client's leave; `cut_short`: the rest of its request is not wanted."""

    rest: memoryview
    since_s: float
    cut_short: bool


class ByAlpn(asyncio.Protocol):
    """A client that has shaken hands, and said there which HTTP it speaks."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        session = transport.get_extra_info("ssl_object")
        kind = Http2Connection if session.selected_alpn_protocol() == NAME else Connection
        connection = kind(self._clients)
        transport.set_protocol(connection)
        connection.connection_made(transport)


class Http2Connection(Client):
    """One client that speaks HTTP/2."""

    def __init__(self, clients: Clients) -> None:
        super().__init__(clients)
        self._h2 = H2Connection(_CONFIG)
        allowed = {
            SettingCodes.MAX_CONCURRENT_STREAMS: MOST_STREAMS,
            SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW_BYTES,
            SettingCodes.MAX_HEADER_LIST_SIZE: HEAD_LIMIT_BYTES,
        }
        self._h2.local_settings = Settings(client=False, initial_values=allowed)
        self._h2.decoder.max_header_list_size = HEAD_LIMIT_BYTES
        self._receiving: dict[int, _Receiving] = {}  # by stream, as all below
        self._answering: dict[int, int] = {}  # bytes of the request that is being answered
        self._unsent: dict[int, _Unsent] = {}
        self._unfinished_bytes = 0  # of a frame, or of a head in many frames
        self._uncounted_bytes = 0  # held since it was last looked whether there is room
        self._requests = 0
        self._resets = 0
        self._idle_frames = 0
        self._blocked_s: float | None = None  # since when the client does not read what we send
        self._leaving = False  # it has been told that no new request is taken

    # -- what asyncio tells ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_CONNECTION_WINDOW_BYTES)
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._receiving.clear()
        self._unsent.clear()

    def buffer_updated(self, nbytes: int) -> None:
        for start in range(0, nbytes, _BREATH_BYTES):
            if self._transport is None or self._transport.is_closing():
                return
            breath = bytes(self._clients.buffer[start:nbytes][:_BREATH_BYTES])
            try:
                events = self._h2.receive_data(breath)
            except ProtocolError:  # hyper-h2 has made the frame that says which
                self._end()
                return
            # said to pings and settings, and to what still comes of streams that have ended
            if said := self._h2.data_to_send():
                self._transport.write(said)
            self._idle_frames += len(said) // _SAID_BYTES
            self._unfinished_bytes = 0 if events or said else self._unfinished_bytes + len(breath)
            # what is taken back in the same breath is not begun
            reset = {event.stream_id for event in events if isinstance(event, StreamReset)}
            for event in events:
                self._take(event, reset)
            if any(isinstance(event, (WindowUpdated, RemoteSettingsChanged)) for event in events):
                for stream in list(self._unsent):
                    self._send(stream)
            asks_too_much = (
                self._unfinished_bytes > _MOST_UNFINISHED_BYTES
                or self._resets > MOST_RESETS
                or self._idle_frames > MOST_IDLE_FRAMES
            )
            if asks_too_much:
                self._end(ErrorCodes.ENHANCE_YOUR_CALM)
            else:
                self._flush()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._blocked_s = self._loop.time()
        if self._transport is not None:
            self._transport.pause_reading()  # whatever it sends may want an answer

    def resume_writing(self) -> None:
        self._blocked_s = None
        if self._transport is not None:
            self._transport.resume_reading()

    # -- receiving -------------------------------------------------------------------------------------------

    def _take(self, event: Event, reset: Iterable[int]) -> None:
        match event:
            case RequestReceived(stream_id=int(stream), headers=fields) if stream not in reset:
                self._begin(stream, fields or ())
            case DataReceived(stream_id=int(stream), data=data, flow_controlled_length=length):
                self._h2.acknowledge_received_data(length or 0, stream)
                self._idle_frames += len(data or b"") < _IDLE_DATA_BYTES
                if stream in self._receiving and data:
                    self._add(stream, data)
            case StreamEnded(stream_id=int(stream)):
                if stream in self._receiving and stream not in reset:
                    self._ask(stream, self._receiving.pop(stream))
            case StreamReset(stream_id=int(stream)):
                self._resets += 1
                self._receiving.pop(stream, None)
                self._unsent.pop(stream, None)
            case ConnectionTerminated():
                self._end()
            case RequestReceived() | PingReceived() | RemoteSettingsChanged():
                pass  # taken back at once; or counted by what was said to it
            case _:
                self._idle_frames += 1

    def _begin(self, stream: int, fields: Sequence[tuple[bytes, bytes]]) -> None:
        # a request that was taken back may still be worked on, so the streams that are open are not all
        if self._leaving or len(self._answering) >= MOST_STREAMS:
            self._reset(stream, ErrorCodes.REFUSED_STREAM)  # that is: try again elsewhere
            return
        self._requests += 1
        if self._requests >= (MOST_REQUESTS if self.known else MOST_REQUESTS // 10):
            self.end_when_idle()
        headers: dict[str, str] = {}
        for name, value in fields:
            key, text = name.decode("latin-1"), value.decode("latin-1")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        method, target = headers.pop(":method", ""), headers.pop(":path", "")
        headers.setdefault("host", headers.pop(":authority", ""))
        request = HttpRequest(method, target, headers, known=self.known, local=self.local)
        allowed = self._clients.body_limit(request)
        if isinstance(allowed, HttpResponse):
            self._answer(stream, request, allowed, cut_short=True)
            return
        held_bytes = _STREAM_BYTES + request.size_bytes
        self._receiving[stream] = _Receiving(request, allowed, self._loop.time(), held_bytes)
        if not self._may_hold(held_bytes):
            self._refuse(stream, _BUSY)

    def _add(self, stream: int, data: bytes) -> None:
        receiving = self._receiving[stream]
        receiving.body += data
        receiving.held_bytes += len(data)
        if len(receiving.body) > receiving.body_limit_bytes:
            self._refuse(stream, too_large(receiving.body_limit_bytes))
        elif not self._may_hold(len(data)):
            self._refuse(stream, _BUSY)

    def _may_hold(self, more_bytes: int) -> bool:
        """Whether there is room for so much more. It is looked at in steps, which all streams take together:
        else each of them would stay below its own."""
        self._uncounted_bytes += more_bytes
        if self._uncounted_bytes >> STEP_BITS:
            if not self._has_room():
                return False  # and the next is asked about at once
            self._uncounted_bytes = 0
        return True

    def _refuse(self, stream: int, answer: HttpResponse) -> None:
        self._answer(stream, self._receiving.pop(stream).request, answer, cut_short=True)

    def _ask(self, stream: int, received: _Receiving) -> None:
        request = received.request
        request.body = bytes(received.body)
        answer = self._clients.app(request)
        if isinstance(answer, HttpResponse):
            self._answer(stream, request, answer)
            return
        self._answering[stream] = received.held_bytes
        self._clients.hand_over(self._await(stream, request, answer))

    async def _await(self, stream: int, request: HttpRequest, coming: Awaitable[HttpResponse]) -> None:
        """It goes on when the client has left or taken its request back: what is begun must end."""
        try:
            answer = await coming
        finally:
            del self._answering[stream]
            self._clients.changed.set()
        self._answer(stream, request, answer)
        self._flush()

    # -- answering -------------------------------------------------------------------------------------------

    def _answer(
        self, stream: int, request: HttpRequest, answer: HttpResponse, *, cut_short: bool = False
    ) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._since = self._loop.time()
        self._resets = max(0, self._resets - 1)
        accounts_for = _IDLE_FRAMES_EACH + answer.length_bytes // _BYTES_A_FRAME
        self._idle_frames = max(0, self._idle_frames - accounts_for)
        body = b"" if request.method == "HEAD" else b"".join((answer.body, *answer.more))
        try:
            self._h2.send_headers(stream, [(b":status", b"%d" % answer.status), *fields_of(answer)])
        except ProtocolError:
            return  # the client has taken its request back
        self._unsent[stream] = _Unsent(memoryview(body), self._since, cut_short)
        self._send(stream)
        if answer.last:
            self.end_when_idle()

    def _send(self, stream: int) -> None:
        """As much of an answer as the client takes."""
        unsent = self._unsent[stream]
        try:
            while True:
                window_bytes = self._h2.local_flow_control_window(stream)
                part = unsent.rest[: max(0, min(window_bytes, self._h2.max_outbound_frame_size))]
                ends = len(part) == len(unsent.rest)
                if not part and not ends:
                    return
                self._h2.send_data(stream, part.tobytes(), end_stream=ends)
                unsent.rest = unsent.rest[len(part) :]
                if ends:
                    break
        except ProtocolError:  # taken back, or the client has left, in the breath that gave leave to send
            unsent.cut_short = False
        del self._unsent[stream]
        if unsent.cut_short:  # we have said why; what is still to come of the request is not wanted
            self._reset(stream, ErrorCodes.NO_ERROR)

    def _reset(self, stream: int, code: ErrorCodes) -> None:
        with contextlib.suppress(ProtocolError):  # it has ended already
            self._h2.reset_stream(stream, code)

    def _flush(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if data := self._h2.data_to_send():
            self._transport.write(data)
            if (self._unsent or self._transport.get_write_buffer_size()) and not self._has_room():
                self._transport.abort()
        if self._leaving and not (self._receiving or self._answering or self._unsent):
            self._transport.close()

    def _has_room(self) -> bool:
        return self._clients.makes_room(self, self._loop.time())

    # -- ending ----------------------------------------------------------------------------------------------

    def _end(self, code: ErrorCodes | None = None) -> None:
        """Close at once; `code`: what the client has done wrong. What is being worked on goes on."""
        if self._transport is None:
            return
        if code is not None:
            self._h2.close_connection(code)
        self._transport.write(self._h2.data_to_send())
        self._transport.close()

    def end_when_idle(self) -> None:
        if self._transport is None or self._leaving or self._transport.is_closing():
            return
        self._leaving = True
        # by hand: hyper-h2 sends nothing any more once it has made this frame
        goes = GoAwayFrame(0, last_stream_id=self._h2.highest_inbound_stream_id)
        self._transport.write(self._h2.data_to_send() + goes.serialize())
        self._flush()

    @property
    def held_bytes(self) -> int:
        waiting = sum(each.held_bytes for each in self._receiving.values()) + sum(self._answering.values())
        unsent = sum(len(each.rest) for each in self._unsent.values())
        buffered = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return self._unfinished_bytes + waiting + unsent + buffered

    def silent_s(self, now: float) -> float:
        if self._answering:
            return -1.0
        return now - min((each.began_s for each in self._receiving.values()), default=self._since)

    def hurry(self, now: float) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        patience = self._clients.patience
        late = [stream for stream, each in self._receiving.items() if now - each.began_s > patience.request_s]
        late += [stream for stream, each in self._unsent.items() if now - each.since_s > patience.answer_s]
        for stream in late:
            self._receiving.pop(stream, None)
            self._unsent.pop(stream, None)
            self._reset(stream, ErrorCodes.CANCEL)
        if self._blocked_s is not None and now - self._blocked_s > patience.answer_s:
            self.abort()
        elif not (self._receiving or self._answering or self._unsent) and now - self._since > patience.idle_s:
            self.end_when_idle()
        self._flush()
