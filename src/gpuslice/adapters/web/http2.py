"""HTTP/2 for our own processes: concurrent requests of one client over one connection.

kube-scheduler sends many binds at once. With HTTP/1.1 its client (Go's) opens a connection for almost each of
them, with a TLS handshake that costs both sides more than the bind; with HTTP/2 it needs one connection.
Source of the rules: RFC 9113; the limits on a client's memory, streams and time are ours.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from functools import partial

from gpuslice.adapters.web import frames, heads
from gpuslice.adapters.web.clients import STEP_BITS, Client, Clients, too_large
from gpuslice.adapters.web.frames import END_STREAM, Code, ConnectionFault, Setting, StreamFault
from gpuslice.adapters.web.messages import HttpResponse, json_answer
from gpuslice.adapters.web.stream import STREAM_BYTES, STREAM_WINDOW_BYTES, Stream

_CONNECTION_WINDOW_BYTES = 4 << 20
_BUSY = json_answer({"error": "others send large requests just now; try again"}, 503)


class Http2Connection(Client):
    """One client that speaks HTTP/2."""

    def __init__(self, clients: Clients) -> None:
        super().__init__(clients)
        self._unpacker = heads.Unpacker(clients.limits.head_bytes)
        self._streams: dict[int, Stream] = {}
        self._answering: dict[int, int] = {}  # bytes of requests in progress, even after a reset
        self._last_stream = 0  # the highest that the client has opened
        self._reader = frames.FrameReader()
        self._came_bytes = 0  # of all bodies, as in a stream
        self._may_send_bytes = self._first_window_bytes = frames.FIRST_WINDOW_BYTES
        self._frame_bytes = frames.SMALLEST_FRAME_BYTES  # the client's maximum
        self._window_grew = False
        self._to_send: list[bytes | memoryview] = []
        self._to_send_bytes = 0  # of bodies
        self._before_head = heads.NO_TABLE
        self._begun = 0  # requests in the data being read
        self._uncounted_bytes = 0  # held since the last check for room
        self._resets = 0
        self._idle_frames = 0
        self._blocked_s: float | None = None  # since when the client does not read what we send
        self.to_read = False  # received data that waits for its turn
        self._leaving = False  # it has been told that no new requests are taken

    # -- what asyncio tells ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        allowed = {
            Setting.MAX_CONCURRENT_STREAMS: self._limits.streams,
            Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
            Setting.MAX_FRAME_SIZE: frames.LARGEST_DATA_BYTES,
            Setting.MAX_HEADER_LIST_SIZE: self._limits.head_bytes,
        }
        more = frames.leave_to_send(0, _CONNECTION_WINDOW_BYTES - frames.FIRST_WINDOW_BYTES)
        self._to_send += (frames.settings(allowed), more)
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._streams.clear()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._clients.buffer if self.known else self._clients.buffer[: self._limits.unread_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        self._begun = 0
        if self.known:
            self.read(self._clients.buffer[:nbytes])
        else:
            self._reader.keep(self._clients.buffer[:nbytes])
            self._read_on()

    def read(self, heard: memoryview) -> None:
        """Read for one turn; data that is not reached waits until all other connections had theirs."""
        allowed_s = self._limits.turn_s if self.known else self._limits.strangers_turn_s
        turn_ends_s, self.to_read = time.monotonic() + allowed_s, False
        coming = self._reader.read(heard)
        try:
            for kind, flags, stream, body, length in coming:
                if self._transport is None or self._transport.is_closing():
                    return
                try:
                    if kind == frames.DATA:
                        self._take_data(flags, stream, body, length)
                    elif kind == frames.HEADERS:
                        self._take_head(flags, stream, bytes(body))
                    else:
                        self._idle_frames += 1
                        self._take_other(kind, flags, stream, body)
                except StreamFault as fault:
                    self._resets += 1
                    self._reset(stream, fault.code)
                if self._resets > self._limits.resets or self._idle_frames > self._limits.idle_frames:
                    raise ConnectionFault(Code.ENHANCE_YOUR_CALM)
                if time.monotonic() > turn_ends_s:
                    coming.close()
                    self._read_on()
                    break
        except ConnectionFault as fault:
            self._end(fault.code)
            return
        if self._window_grew:
            self._window_grew = False
            for number, waiting in list(self._streams.items()):
                if waiting.rest is not None:
                    self._send(number, waiting)
        self._flush()
        self._read_or_not()

    def _read_on(self) -> None:
        self.to_read = True
        self._read_or_not()
        self._clients.in_turn(partial(self.read, memoryview(b"")), self)

    def _read_or_not(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            stops = self.to_read or self._blocked_s is not None  # whatever it sends may require an answer
            (self._transport.pause_reading if stops else self._transport.resume_reading)()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._blocked_s = self._loop.time()
        self._read_or_not()

    def resume_writing(self) -> None:
        self._blocked_s = None
        self._read_or_not()

    # -- frames ----------------------------------------------------------------------------------------------

    def _take_other(self, kind: int, flags: int, stream: int, body: memoryview) -> None:
        """Frames that are not part of a request."""
        is_ack = bool(flags & frames.ACK)
        of_all = kind in (frames.SETTINGS, frames.PING, frames.GOAWAY)  # of the connection, not a stream
        if kind == frames.PUSH_PROMISE or (of_all and stream) or (kind == frames.PRIORITY and not stream):
            raise ConnectionFault(Code.PROTOCOL_ERROR)
        frames.check_length(kind, len(body))
        match kind:
            case frames.WINDOW_UPDATE:
                self._may_send(stream, frames.number(body))
            case frames.RST_STREAM:
                self._check_opened(stream)
                self._resets += 1
                self._streams.pop(stream, None)
            case frames.GOAWAY:
                self.end_when_idle()  # it takes no requests from us, but wants its own answered
            case frames.SETTINGS:
                said = frames.settings_said(flags, body)
                if not is_ack:
                    self._heed(said)
            case frames.PING if not is_ack:
                self._to_send.append(frames.pong(bytes(body)))

    def _heed(self, said: dict[int, int]) -> None:
        self._to_send.append(frames.settings_heard())
        self._frame_bytes = said.get(Setting.MAX_FRAME_SIZE, self._frame_bytes)
        window_bytes = said.get(Setting.INITIAL_WINDOW_SIZE, self._first_window_bytes)
        more_bytes, self._first_window_bytes = window_bytes - self._first_window_bytes, window_bytes
        for stream in self._streams.values():
            stream.may_send_bytes += more_bytes
            if stream.may_send_bytes > frames.LARGEST_WINDOW_BYTES:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR)
        self._window_grew |= more_bytes > 0

    def _may_send(self, number: int, more_bytes: int) -> None:
        self._window_grew = True
        if not number:
            self._may_send_bytes += more_bytes
            if not more_bytes or self._may_send_bytes > frames.LARGEST_WINDOW_BYTES:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR if more_bytes else Code.PROTOCOL_ERROR)
            return
        self._check_opened(number)
        if (stream := self._streams.get(number)) is not None:
            stream.may_send_bytes += more_bytes
            if not more_bytes or stream.may_send_bytes > frames.LARGEST_WINDOW_BYTES:
                raise StreamFault(Code.FLOW_CONTROL_ERROR if more_bytes else Code.PROTOCOL_ERROR)

    def _check_opened(self, stream: int) -> None:
        """Frames of a stream that has ended may still arrive: they were in flight."""
        if not stream % 2 or stream > self._last_stream:
            raise ConnectionFault(Code.PROTOCOL_ERROR)

    # -- receiving -------------------------------------------------------------------------------------------

    def _take_head(self, flags: int, number: int, block: bytes) -> None:
        head, ends = self._unpacker.unpack(block), bool(flags & END_STREAM)
        self._idle_frames += max(0, len(head.fields) - self._limits.fields)  # each takes time
        if not number % 2:
            raise ConnectionFault(Code.PROTOCOL_ERROR)
        if number > self._last_stream:
            self._last_stream = number
            self._begin(number, head, ends=ends)
        elif number in self._streams:  # trailers
            if not self._streams[number].receiving:
                raise StreamFault(Code.STREAM_CLOSED)
            heads.check_trailer(head.fields)
            if not ends:
                raise StreamFault(Code.PROTOCOL_ERROR)
            self._ask(number)
        else:
            self._idle_frames += 1

    def _begin(self, number: int, head: heads.Head, *, ends: bool) -> None:
        # A request that was reset may still be in progress, so there may be more than the open streams. And
        # the client cannot know about streams that ended during this read: it considers them open.
        most_begun = max(len(self._streams), len(self._answering), self._begun)
        if self._leaving or most_begun >= self._limits.streams:
            raise StreamFault(Code.REFUSED_STREAM)  # which means: retry elsewhere
        self._begun += 1
        method, target, headers, size_bytes = head.request()
        request = self._asked(method, target, headers)
        allowed = self._clients.body_limit(request)
        held_bytes = STREAM_BYTES + size_bytes
        limit_bytes = 0 if isinstance(allowed, HttpResponse) else allowed
        stream = Stream(request, limit_bytes, self._loop.time(), held_bytes, self._first_window_bytes)
        self._streams[number] = stream
        if isinstance(allowed, HttpResponse):
            stream.receiving = not ends
            self._answer(number, allowed)
        elif not self._may_hold(held_bytes):
            self._answer(number, _BUSY)
        elif ends:
            self._ask(number)
        elif "expect" in headers and headers["expect"].lower() == "100-continue":
            self._send_head(number, heads.packed(100, ()))

    def _take_data(self, flags: int, number: int, body: memoryview, length: int) -> None:
        """It counts whatever happens to its stream: the client has used up its window."""
        ends = flags & END_STREAM
        if length < self._limits.idle_data_bytes and (length or not body):
            self._idle_frames += 1
        self._came_bytes += length
        if self._came_bytes > _CONNECTION_WINDOW_BYTES // 2:
            self._to_send.append(frames.leave_to_send(0, self._came_bytes))
            self._came_bytes = 0
        stream = self._streams.get(number)
        if stream is None:
            self._check_opened(number)
            return
        if not stream.receiving:
            raise StreamFault(Code.STREAM_CLOSED)
        if stream.rest is not None:
            stream.receiving = not ends
            return
        stream.came_bytes += length
        if stream.came_bytes > STREAM_WINDOW_BYTES // 2 and not ends:
            self._to_send.append(frames.leave_to_send(number, stream.came_bytes))
            stream.came_bytes = 0
        if ends and not stream.body:
            stream.body = bytes(body)  # all in one frame, as Go's client sends it: copied once
        else:
            stream.body += body
        stream.held_bytes += len(body)
        if len(stream.body) > stream.body_limit_bytes:
            self._answer(number, too_large(stream.body_limit_bytes))
        elif not self._may_hold(len(body)):
            self._answer(number, _BUSY)
        elif ends:
            self._ask(number)

    def _may_hold(self, more_bytes: int) -> bool:
        """Whether there is room for so much more. In steps of all streams: each may stay below its own."""
        self._uncounted_bytes += more_bytes
        if self._uncounted_bytes >> STEP_BITS:
            if not self._clients.makes_room(self, self._loop.time()):
                return False  # and the next one is checked immediately
            self._uncounted_bytes = 0
        return True

    def _ask(self, number: int) -> None:
        stream = self._streams[number]
        stream.receiving = False
        if stream.rest is not None:
            return  # it was answered before it was complete
        request = stream.request
        said = request.headers.get("content-length")
        if said is not None and int(said) != len(stream.body):
            self._resets += 1
            self._reset(number, Code.PROTOCOL_ERROR)
            return
        request.body = bytes(stream.body)
        stream.body = b""
        answer = self._clients.app(request)
        if isinstance(answer, HttpResponse):
            self._answer(number, answer)
            return
        self._answering[number] = stream.held_bytes
        self._clients.hand_over(self._await(number, answer))

    async def _await(self, number: int, coming: Awaitable[HttpResponse]) -> None:
        """Continues after the client has left or reset its request: what has begun must end."""
        try:
            answer = await coming
        finally:
            del self._answering[number]
            self._clients.changed.set()
        self._answer(number, answer)
        self._flush()

    # -- answering -------------------------------------------------------------------------------------------

    def _answer(self, number: int, answer: HttpResponse) -> None:
        stream = self._streams.get(number)
        if stream is None or self._transport is None or self._transport.is_closing():
            return
        self._since = stream.began_s = self._loop.time()
        self._was_answered()
        self._resets -= self._resets > 0
        length_bytes = answer.length_bytes
        accounts_for = self._limits.idle_frames_each + length_bytes // self._limits.bytes_a_frame
        self._idle_frames = max(0, self._idle_frames - accounts_for)
        self._send_head(number, heads.of_answer(answer, length_bytes))
        body = b"" if stream.request.method == "HEAD" else b"".join((answer.body, *answer.more))
        stream.body, stream.rest, stream.held_bytes = b"", body, STREAM_BYTES + len(body)
        self._send(number, stream)
        if not self._may_hold(STREAM_BYTES + len(body)):
            self.abort()
        elif answer.last:
            self.end_when_idle()

    def _send_head(self, number: int, block: bytes) -> None:
        if self._before_head:
            block, self._before_head = self._before_head + block, b""
        self._to_send += (frames.frame_head(len(block), frames.HEADERS, frames.END_HEADERS, number), block)

    def _send(self, number: int, stream: Stream) -> None:
        """Send as much of an answer as the client's window allows. Any rest keeps all of it in memory."""
        rest = stream.rest
        assert rest is not None
        while True:
            size_bytes = min(len(rest), stream.may_send_bytes, self._may_send_bytes, self._frame_bytes)
            if ends := size_bytes == len(rest):
                part = rest
            elif size_bytes > 0:
                rest = memoryview(rest)
                part, rest = rest[:size_bytes], rest[size_bytes:]
            else:
                stream.rest = rest
                return
            flags = END_STREAM if ends else 0
            self._to_send += (frames.frame_head(size_bytes, frames.DATA, flags, number), part)
            stream.may_send_bytes -= size_bytes
            self._may_send_bytes -= size_bytes
            self._to_send_bytes += size_bytes
            if ends:
                break
        # if the request is incomplete: we have said why, and the rest is not wanted
        if stream.receiving:
            self._reset(number, Code.NO_ERROR)
        else:
            del self._streams[number]
        if self._to_send_bytes >> STEP_BITS:  # otherwise the answers of one read could be of any size
            self._flush()

    def _reset(self, number: int, code: Code) -> None:
        self._streams.pop(number, None)
        self._to_send.append(frames.reset(number, code))

    def _flush(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._to_send:
            # joined: each piece would be a TLS record, work for both sides
            data = b"".join(self._to_send)
            self._to_send.clear()
            self._to_send_bytes = 0
            self._transport.write(data)
        if self._leaving and not (self._streams or self._answering):
            self._transport.close()

    # -- ending ----------------------------------------------------------------------------------------------

    def _end(self, code: Code) -> None:
        """Close immediately after the client's error; requests in progress continue."""
        if self._transport is not None:
            self._to_send.append(frames.goaway(self._last_stream, code))
            self._transport.write(b"".join(self._to_send))
            self._transport.close()

    def end_when_idle(self) -> None:
        if self._transport is None or self._leaving or self._transport.is_closing():
            return
        self._leaving = True
        self._to_send.append(frames.goaway(self._last_stream, Code.NO_ERROR))
        self._flush()

    @property
    def held_bytes(self) -> int:
        """A request that is being answered counts once, even after its client has reset it."""
        streams = (each for number, each in self._streams.items() if number not in self._answering)
        buffered = self._transport.get_write_buffer_size() if self._transport is not None else 0
        of_streams = sum(each.held_bytes for each in streams) + sum(self._answering.values())
        return self._reader.held_bytes + of_streams + buffered

    def silent_s(self, now: float) -> float:
        if self._answering:
            return -1.0
        return now - min((each.began_s for each in self._streams.values()), default=self._since)

    def hurry(self, now: float) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        for number, stream in list(self._streams.items()):
            if number not in self._answering:
                allowed_s = self._limits.answer_s if stream.rest is not None else self._limits.request_s
                if now - stream.began_s > allowed_s:
                    self._reset(number, Code.CANCEL)
        if self._blocked_s is not None and now - self._blocked_s > self._limits.answer_s:
            self.abort()
        elif not (self._streams or self._answering) and now - self._since > self._limits.idle_s:
            self.end_when_idle()
        self._flush()
