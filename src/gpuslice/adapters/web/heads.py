"""The heads of HTTP/2: unpacking and packing (HPACK, RFC 7541), and what they may contain (RFC 9113, 8).

A field is examined once, when it enters the table that both sides keep, and is a number in all later heads,
since a client sends almost the same in each. A repeated head is not read again while the table is the same.
The Huffman code and the static fields are hpack's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import NamedTuple

from hpack.exceptions import HPACKError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from gpuslice.adapters.web.frames import Code, ConnectionFault, StreamFault
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, date

TABLE_BYTES = 4096  # for the client's fields that we must remember: the initial size
_OVERHEAD_BYTES = 32  # of a field in the table, by the RFC
_MOST_RECENT = 16
_RECENT_BYTES = 1 << 10  # of a cached head: all of them take less than the buffers of a connection
_NUMBER_BYTES = 5  # the most that a number takes after its first byte
_NOT_IN_A_NAME = frozenset((*range(33), *b"ABCDEFGHIJKLMNOPQRSTUVWXYZ:", *range(127, 256)))
_OF_A_CONNECTION = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_FIRST_LINE = {b":method", b":scheme", b":path", b":authority"}
_STATUS_200 = b"\x88"  # the eighth static field
_STATUS = b"\x08"  # its name, with another value
_LITERAL = b"\x00"
_LENGTH_IS = b"\x0f\x0d"  # content-length, the 28th, with a value that is not remembered
NO_TABLE = b"\x20"
"""The start of our first head on a connection: the client need not remember anything.

A client that allows a smaller table than usual must be told that ours is not larger (RFC 7541, 4.2).
"""


class Field(NamedTuple):
    """One field as text. `is_legal`: allowed in a request, though perhaps not at its position."""

    name: str
    value: str
    size_bytes: int
    is_legal: bool


class Head:
    """Its fields and the resulting request: method, target, headers, bytes in memory."""

    __slots__ = ("_request", "fields")

    def __init__(self, fields: list[Field]) -> None:
        self.fields = fields
        self._request: tuple[str, str, Mapping[str, str], int] | None = None

    def request(self) -> tuple[str, str, Mapping[str, str], int]:
        """Checked once. Raises `StreamFault`."""
        if self._request is None:
            method, target, headers = request_of(self.fields)
            size_bytes = HttpRequest(method, target, headers).size_bytes
            self._request = method, target, headers, size_bytes
        return self._request


class Unpacker:
    """The heads of one client, in order. `most_bytes`: of one unpacked head."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._table = list(_known_to_all())  # then those of this client, the latest first
        self._known = len(self._table)
        self._table_bytes = 0  # of this client's fields
        self._table_limit_bytes = TABLE_BYTES
        self._recent: dict[bytes, Head] = {}  # by their packed form; valid until the table changes

    def unpack(self, block: bytes) -> Head:
        """Every head must be unpacked, even a refused one: others depend on it. Raises `ConnectionFault`."""
        head = self._recent.get(block)
        if head is not None:
            return head
        fields: list[Field] = []
        size_bytes = at = 0
        is_lasting = True
        try:
            while at < len(block):
                first = block[at]
                if first & 0x80:
                    number, at = (first & 0x7F, at + 1) if first < 0xFF else _number(block, at, 0x7F)
                    if not number:
                        raise ConnectionFault(Code.COMPRESSION_ERROR)
                    field = self._table[number - 1]
                elif first & 0xE0 == 0x20:
                    limit_bytes, at = _number(block, at, 0x1F)
                    if fields or limit_bytes > TABLE_BYTES:
                        raise ConnectionFault(Code.COMPRESSION_ERROR)
                    self._table_limit_bytes = limit_bytes
                    self._forget(0)
                    is_lasting = False
                    size_bytes += _OVERHEAD_BYTES  # otherwise such entries could be of any length
                    if size_bytes > self._most_bytes:
                        raise ConnectionFault(Code.ENHANCE_YOUR_CALM)
                    continue
                else:
                    remember = bool(first & 0x40)
                    field, at = self._literal(block, at, remember=remember)
                    is_lasting = is_lasting and not remember
                size_bytes += field.size_bytes
                if size_bytes > self._most_bytes:
                    raise ConnectionFault(Code.ENHANCE_YOUR_CALM)
                fields.append(field)
        except (IndexError, HPACKError) as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR) from error
        head = Head(fields)
        if not is_lasting:
            self._recent.clear()
        elif size_bytes <= _RECENT_BYTES and len(self._recent) < _MOST_RECENT:
            self._recent[block] = head
        return head

    def _literal(self, block: bytes, at: int, *, remember: bool) -> tuple[Field, int]:
        number, at = _number(block, at, 0x3F if remember else 0x0F)
        if number:
            name = self._table[number - 1].name.encode("latin-1")
        else:
            name, at = _read_text(block, at)
        value, at = _read_text(block, at)
        field = _field(name, value)
        if remember:
            self._forget(field.size_bytes)
            if field.size_bytes <= self._table_limit_bytes:
                self._table.insert(self._known, field)
                self._table_bytes += field.size_bytes
        return field, at

    def _forget(self, more_bytes: int) -> None:
        """Forget the oldest entries until there is room for this much more."""
        while self._table_bytes and self._table_bytes + more_bytes > self._table_limit_bytes:
            self._table_bytes -= self._table.pop().size_bytes


@cache
def _known_to_all() -> tuple[Field, ...]:
    return tuple(_field(name, value) for name, value in HeaderTable.STATIC_TABLE)


def _field(name: bytes, value: bytes) -> Field:
    """What HTTP/1.1 would take for the end of a field, or for an instruction to a proxy, is not legal."""
    is_legal = (
        (name in _FIRST_LINE or (name != b"" and _NOT_IN_A_NAME.isdisjoint(name)))
        and name not in _OF_A_CONNECTION
        and (name != b"te" or value.lower() == b"trailers")
        and not (b"\n" in value or b"\r" in value or b"\0" in value)
        and value.strip(b" \t") == value
    )
    size_bytes = len(name) + len(value) + _OVERHEAD_BYTES
    return Field(name.decode("latin-1"), value.decode("latin-1"), size_bytes, is_legal)


def _number(block: bytes, at: int, largest: int) -> tuple[int, int]:
    """A number that begins in the low bits of a byte, and where it ends. Raises `IndexError` at the end."""
    number = block[at] & largest
    at += 1
    if number < largest:
        return number, at
    for shift in range(0, 7 * _NUMBER_BYTES, 7):
        more = block[at]
        at += 1
        number += (more & 0x7F) << shift
        if more < 0x80:
            return number, at
    raise ConnectionFault(Code.COMPRESSION_ERROR)


def _read_text(block: bytes, at: int) -> tuple[bytes, int]:
    is_huffman = block[at] & 0x80
    length, at = _number(block, at, 0x7F)
    text = block[at : at + length]
    if len(text) < length:
        raise ConnectionFault(Code.COMPRESSION_ERROR)
    return decode_huffman(text) if is_huffman else text, at + length


# -- requests and answers ------------------------------------------------------------------------------------


def check_trailer(fields: Iterable[Field]) -> None:
    """Trailers are ignored, but must not be pseudo-headers. Raises `StreamFault`."""
    if any(not field.is_legal or field.name[:1] == ":" for field in fields):
        raise StreamFault(Code.PROTOCOL_ERROR)


def request_of(fields: Iterable[Field]) -> tuple[str, str, dict[str, str]]:
    """Method, target and headers. Raises `StreamFault` if it is no request (RFC 9113, 8.3.1).

    Pseudo-headers must come first, and once each.
    """
    line: dict[str, str] = {}
    headers: dict[str, str] = {}
    for name, value, _, is_legal in fields:
        if not is_legal:
            raise StreamFault(Code.PROTOCOL_ERROR)
        if name[:1] == ":":
            if headers or name in line or not value:
                raise StreamFault(Code.PROTOCOL_ERROR)
            line[name] = value
        elif name in headers:
            if name == "host":
                raise StreamFault(Code.PROTOCOL_ERROR)
            headers[name] = f"{headers[name]}, {value}"
        else:
            headers[name] = value
    method, target = line.get(":method", ""), line.get(":path", "")
    if not method or (method != "CONNECT" and not (target and ":scheme" in line)):
        raise StreamFault(Code.PROTOCOL_ERROR)
    authority = line.get(":authority")
    if headers.setdefault("host", authority or "") != authority and authority is not None:
        raise StreamFault(Code.PROTOCOL_ERROR)
    return method, target, headers


def of_answer(answer: HttpResponse, length_bytes: int) -> bytes:
    """The head of an answer, with the fields that HTTP/1.1 would have, in lower case."""
    length = b"%d" % length_bytes
    block = _usual(answer.status, answer.content_type, int(time.time()))
    block += _LENGTH_IS + bytes((len(length),)) + length
    for name, value in answer.headers.items():
        block += _literal(name.lower().encode("latin-1"), value.encode("latin-1"))
    return block


@lru_cache(maxsize=16)
def _usual(status: int, content_type: str, second: int) -> bytes:
    """What is the same in all answers within a second."""
    fields = ((b"content-type", content_type.encode("latin-1")), (b"date", date(second).encode()))
    return packed(status, fields)


def packed(status: int, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A head without the table, which both sides would have to keep."""
    parts = [_STATUS_200 if status == 200 else _STATUS + _text(b"%d" % status)]
    parts += [_literal(name, value) for name, value in fields]
    return b"".join(parts)


@lru_cache(maxsize=256)
def _literal(name: bytes, value: bytes) -> bytes:
    """A field in full, not to be remembered: most fields of the next answer are the same."""
    return _LITERAL + _text(name) + _text(value)


def _text(text: bytes) -> bytes:
    """Unchanged, after its length in seven bits or, if longer, in groups of seven."""
    length = len(text)
    if length < 127:
        return bytes((length,)) + text
    said, left = bytearray((127,)), length - 127
    while left >= 128:
        said.append(left & 127 | 128)
        left >>= 7
    said.append(left)
    return bytes(said) + text
