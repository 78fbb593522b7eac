"""The frames of HTTP/2 (RFC 9113) for a server: writing, reading, and errors in them."""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
SMALLEST_FRAME_BYTES = 16 << 10  # that the other side must accept, until it allows more
LARGEST_FRAME_BYTES = (1 << 24) - 1
LARGEST_WINDOW_BYTES = (1 << 31) - 1
FIRST_WINDOW_BYTES = (1 << 16) - 1

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY_INSIDE = 0x20
_IN_PARTS = END_HEADERS | PADDED | PRIORITY_INSIDE  # with only the first of these, a frame is a complete head

LARGEST_DATA_BYTES = 256 << 10
"""Of a frame of a body, which is handled as it arrives.

Go's client writes each frame separately, in two TLS records with the minimum of 16 KiB; with this size the
names of 5,000 nodes come in one.
"""
_LARGEST_BYTES = 64 << 10  # of any other frame, which must be complete; and of a head in several frames
_MOST_PARTS = 64  # of a head
# Kinds of frames. Plain numbers: each frame is compared with them, and looking up an enum member takes longer
# than the comparison.
DATA = 0
HEADERS = 1
PRIORITY = 2
RST_STREAM = 3
SETTINGS = 4
PUSH_PROMISE = 5
PING = 6
GOAWAY = 7
WINDOW_UPDATE = 8
CONTINUATION = 9

_LENGTHS = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_HEAD = struct.Struct(">BHBBL")
_SETTING = struct.Struct(">HL")
_PAIR = struct.Struct(">LL")
_RESET = struct.Struct(">L")


class Setting(IntEnum):
    """What one side tells the other about itself."""

    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Code(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ConnectionFault(Exception):
    """What the client sent is an error of the connection."""

    def __init__(self, code: Code) -> None:
        super().__init__(code.name)
        self.code = code


class StreamFault(Exception):
    """What the client sent is an error of one stream."""

    def __init__(self, code: Code) -> None:
        super().__init__(code.name)
        self.code = code


# -- to the client -------------------------------------------------------------------------------------------


def frame_head(length: int, kind: int, flags: int, stream: int) -> bytes:
    return _HEAD.pack(length >> 16, length & 0xFFFF, kind, flags, stream)


def settings(values: dict[Setting, int]) -> bytes:
    body = b"".join(_SETTING.pack(name, value) for name, value in values.items())
    return frame_head(len(body), SETTINGS, 0, 0) + body


def settings_heard() -> bytes:
    return frame_head(0, SETTINGS, ACK, 0)


def pong(body: bytes) -> bytes:
    return frame_head(len(body), PING, ACK, 0) + body


def leave_to_send(stream: int, more_bytes: int) -> bytes:
    return frame_head(4, WINDOW_UPDATE, 0, stream) + _RESET.pack(more_bytes)


def reset(stream: int, code: Code) -> bytes:
    return frame_head(4, RST_STREAM, 0, stream) + _RESET.pack(code)


def goaway(last_stream: int, code: Code) -> bytes:
    return frame_head(8, GOAWAY, 0, 0) + _PAIR.pack(last_stream, code)


# -- from the client -----------------------------------------------------------------------------------------


Frame = tuple[int, int, int, memoryview, int]
"""Kind, flags, stream, body, length.

The body of a head is complete, even if it came in several frames; of data it is what has arrived. The length
of data is what the whole frame takes of the client's window; 0 for its further parts.
"""


class FrameReader:
    """What one client sends, frame by frame."""

    def __init__(self) -> None:
        self._unread = b""  # of an incomplete frame
        self._greeted = False  # the client has sent the preface of HTTP/2
        self._head = bytearray()  # of several frames
        self._head_begun: tuple[int, int] | None = None  # the flags and the stream of that head
        self._parts = 0
        self._data = (0, 0)  # the flags and the stream of the current data frame
        self._data_left_bytes = 0  # including padding, which comes last
        self._padding_bytes = 0

    @property
    def held_bytes(self) -> int:
        return len(self._unread) + len(self._head)

    def keep(self, heard: memoryview) -> None:
        """Until the next `read`."""
        self._unread += heard

    def read(self, heard: memoryview) -> Generator[Frame, None, None]:
        """The frames in their order, each valid until the next. Raises `ConnectionFault`."""
        if self._unread:
            heard, self._unread = memoryview(self._unread + heard), b""  # whoever takes it counts it
        size = len(heard)
        at = 0 if self._greeted else self._greeting(heard)
        try:
            while at is not None:
                if self._data_left_bytes:
                    if at == size:
                        break
                    part = heard[at : at + self._data_left_bytes]
                    at += len(part)
                    yield self._more_data(part, 0)
                    continue
                begin = at + HEAD_BYTES
                if size < begin:
                    break
                high, low, kind, flags, stream = _HEAD.unpack_from(heard, at)
                length, stream = high << 16 | low, stream & LARGEST_WINDOW_BYTES
                end = begin + length
                if length > _LARGEST_BYTES or self._head_begun is not None or kind == CONTINUATION:
                    self._check(kind, stream, length)
                if kind == DATA and (flags & PADDED or size < end):
                    begun = self._begin_data(heard, begin, flags, stream, length)
                    if begun is None:
                        break
                    frame, at = begun
                    yield frame
                elif size < end:
                    break
                elif kind == CONTINUATION or (kind == HEADERS and flags & _IN_PARTS != END_HEADERS):
                    at = end
                    yield from self._more_head(kind, flags, stream, heard[begin:end])
                else:
                    at = end
                    yield kind, flags, stream, heard[begin:end], length
        finally:  # also at the end of a turn
            self._unread = b"" if at == size else bytes(heard[at or 0 :])

    def _greeting(self, heard: memoryview) -> int | None:
        """Where the frames begin; None if the preface is incomplete."""
        if heard[: len(PREFACE)] != PREFACE[: len(heard)]:
            raise ConnectionFault(Code.PROTOCOL_ERROR)
        self._greeted = len(heard) >= len(PREFACE)
        return len(PREFACE) if self._greeted else None

    def _check(self, kind: int, stream: int, length: int) -> None:
        """Check the size; and that a head continues in the next frame, and only what has begun continues."""
        if length > (LARGEST_DATA_BYTES if kind == DATA else _LARGEST_BYTES):
            raise ConnectionFault(Code.FRAME_SIZE_ERROR)
        goes_on = self._head_begun is not None and (kind, stream) == (CONTINUATION, self._head_begun[1])
        if goes_on != (kind == CONTINUATION or self._head_begun is not None):
            raise ConnectionFault(Code.PROTOCOL_ERROR)

    def _begin_data(
        self, heard: memoryview, begin: int, flags: int, stream: int, length: int
    ) -> tuple[Frame, int] | None:
        """The part of a data frame that has arrived, and its end; None before its padding is known."""
        is_padded = bool(flags & PADDED)  # which starts with the length of the padding
        if is_padded and length and len(heard) == begin:
            return None
        self._padding_bytes = heard[begin] if is_padded and length else 0
        if is_padded and self._padding_bytes >= length:
            raise ConnectionFault(Code.PROTOCOL_ERROR)
        self._data, self._data_left_bytes = (flags, stream), length - is_padded
        part = heard[begin + is_padded : begin + length]
        return self._more_data(part, length), begin + is_padded + len(part)

    def _more_data(self, part: memoryview, length: int) -> Frame:
        """The data that has arrived, without padding; only its last part ends the stream."""
        flags, stream = self._data
        self._data_left_bytes -= len(part)
        padding_bytes = max(0, self._padding_bytes - self._data_left_bytes)
        body = part[: max(0, len(part) - padding_bytes)]
        return DATA, 0 if self._data_left_bytes else flags, stream, body, length

    def _more_head(self, kind: int, flags: int, stream: int, body: memoryview) -> Iterator[Frame]:
        """The head once it is complete. Priorities are ignored (RFC 9113, 5.3.2)."""
        if kind == HEADERS:
            body = unpadded(flags, body)
            if flags & PRIORITY_INSIDE:
                if len(body) < 5:
                    raise ConnectionFault(Code.FRAME_SIZE_ERROR)
                body = body[5:]
            if flags & END_HEADERS:
                yield kind, flags, stream, body, len(body)
                return
            self._head_begun, self._parts = (flags, stream), 0
        self._head += body
        self._parts += 1
        if len(self._head) > _LARGEST_BYTES or self._parts > _MOST_PARTS:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM)
        if flags & END_HEADERS:
            assert self._head_begun is not None  # checked when it continued
            flags, stream = self._head_begun
            whole = memoryview(bytes(self._head))
            self._head, self._head_begun = bytearray(), None
            yield HEADERS, flags, stream, whole, len(whole)


def unpadded(flags: int, body: memoryview) -> memoryview:
    """The body without its padding, if any."""
    if not flags & PADDED:
        return body
    if not body or body[0] >= len(body):
        raise ConnectionFault(Code.PROTOCOL_ERROR)
    return body[1 : len(body) - body[0]]


def check_length(kind: int, length: int) -> None:
    """For kinds with a fixed length. Always raises `ConnectionFault`."""
    if length != _LENGTHS.get(kind, length) or (kind == GOAWAY and length < _PAIR.size):
        raise ConnectionFault(Code.FRAME_SIZE_ERROR)


def number(body: memoryview) -> int:
    """A number of 31 bits, alone in its frame."""
    return int.from_bytes(body) & LARGEST_WINDOW_BYTES


def settings_said(flags: int, body: memoryview) -> dict[int, int]:
    """The last value of each setting, checked if we use it; none in an acknowledgement of ours."""
    if len(body) % _SETTING.size or (flags & ACK and body):
        raise ConnectionFault(Code.FRAME_SIZE_ERROR)
    said = dict(_SETTING.iter_unpack(body))
    if said.get(Setting.ENABLE_PUSH, 0) > 1:
        raise ConnectionFault(Code.PROTOCOL_ERROR)
    if said.get(Setting.INITIAL_WINDOW_SIZE, 0) > LARGEST_WINDOW_BYTES:
        raise ConnectionFault(Code.FLOW_CONTROL_ERROR)
    size = said.get(Setting.MAX_FRAME_SIZE, SMALLEST_FRAME_BYTES)
    if not SMALLEST_FRAME_BYTES <= size <= LARGEST_FRAME_BYTES:
        raise ConnectionFault(Code.PROTOCOL_ERROR)
    return said
