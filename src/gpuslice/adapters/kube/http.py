"""What goes over the wire to the API server, the same for the asynchronous and the blocking transport."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

BUSY_TRIES = 11  # of a request that the server is too busy for: once, and ten times more as client-go does
LONGEST_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request; as a string it is what a message calls it."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """An answer. `headers` has lower-case names."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def asks_to_wait_s(self) -> float | None:
        """How long to wait before the same again, where the server was too busy to look at the request.

        None for every other answer. Only a 429 that names a time was surely not carried out, and will be: an
        eviction that a budget forbids is a 429 too, and names none (client-go goes by the same header).
        """
        if self.status != 429:
            return None
        after = self.headers.get("retry-after", "")
        if not (after.isascii() and after.isdecimal() and len(after) < 6):
            return None
        return min(float(after), LONGEST_WAIT_S)


def proxy_authorization(proxy_url: str) -> dict[str, str]:
    """The header for the user and password that stand in a proxy's URL; none without."""
    proxy = urlsplit(proxy_url)
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
