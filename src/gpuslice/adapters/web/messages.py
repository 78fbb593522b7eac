"""A request and its answer as values: what handlers get and give, whatever carries them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec

from gpuslice.adapters.turns import UNNAMED, Asker

JSON = "application/json"
_FIELD_BYTES = 200  # what a header takes in memory beside its text
TEXT = "text/plain; charset=utf-8"


@dataclass(slots=True)
class HttpRequest:
    """One request, read completely. `target` is the path with its query; header names are lower case.

    `part` is the value of a route's ``{name}``. `known`: the client showed a certificate of the CA that we
    were given for clients. `local`: it came from this machine, or from within this pod.
    """

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    keep_alive: bool = True
    part: str = ""
    known: bool = False
    local: bool = True
    asker: Asker = UNNAMED

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory."""
        fields = self.headers
        head_bytes = _FIELD_BYTES * len(fields) + sum(map(len, fields)) + sum(map(len, fields.values()))
        return len(self.body) + len(self.target) + head_bytes

    @property
    def path(self) -> str:
        path = self.target.partition("?")[0]
        if not path.startswith("/") and "://" in path:  # as sent to a proxy (RFC 9112, 3.2.2)
            path = "/" + path.partition("://")[2].partition("/")[2]
        return unquote(path) if "%" in path else path

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))


@dataclass(slots=True)
class HttpResponse:
    """One answer. `more`: what follows `body`; joining large pieces would copy them.

    `last`: the client should return on another connection, which may lead to another process.
    """

    body: bytes = b""
    status: int = 200
    content_type: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)
    more: Sequence[bytes | memoryview] = ()
    last: bool = False

    @property
    def length_bytes(self) -> int:
        return len(self.body) + sum(map(len, self.more))


def json_answer(value: Any, status: int = 200) -> HttpResponse:
    """`value` as JSON; a msgspec struct keeps its own key names."""
    return HttpResponse(msgspec.json.encode(value), status, JSON)


def text_answer(text: str, status: int = 200) -> HttpResponse:
    return HttpResponse(text.encode(), status)


def head_of(answer: HttpResponse, last: bool) -> bytes:
    """The bytes before the body in HTTP/1.1; `last`: nothing follows on this connection."""
    own = "".join([f"{name}: {value}\r\n" for name, value in answer.headers.items()])
    # always: a client of HTTP/1.0 keeps its connection only if told to
    connection = "close" if last else "keep-alive"
    return (
        f"{_status_line(answer.status)}Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {answer.length_bytes}\r\nDate: {date(int(time.time()))}\r\n"
        f"{own}Connection: {connection}\r\n\r\n"
    ).encode("latin-1")


@lru_cache(maxsize=100)
def _status_line(status: int) -> str:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"


@lru_cache(maxsize=1)
def date(second: int) -> str:
    """By hand: strftime would use the locale's language."""
    at = time.gmtime(second)
    days = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
    months = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
    clock = f"{at.tm_hour:02}:{at.tm_min:02}:{at.tm_sec:02}"
    return f"{days[at.tm_wday]}, {at.tm_mday:02} {months[at.tm_mon - 1]} {at.tm_year} {clock} GMT"
