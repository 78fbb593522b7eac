"""What goes over the wire to the API server, the same for the asynchronous and the blocking transport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NO_STRINGS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Request:
    """A request; as a string it is what a message calls it."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. `headers` has lower-case names."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
