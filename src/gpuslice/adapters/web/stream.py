"""One request of HTTP/2 and its answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuslice.adapters.web.messages import HttpRequest

STREAM_BYTES = 4 << 10  # what a stream takes beside its request: ours, and its task
STREAM_WINDOW_BYTES = 1 << 20  # the question of a large cluster comes without waiting for leave


@dataclass(slots=True)
class Stream:
    """A request and its answer. `rest`: what of the answer waits for the client's leave; None before it."""

    request: HttpRequest
    body_limit_bytes: int
    began_s: float
    held_bytes: int
    may_send_bytes: int  # by us, by the client's leave
    came_bytes: int = 0  # of its body, since the client was last given leave to send more
    body: bytes | bytearray = field(default_factory=bytearray)
    """Of small parts, each would take more than it brings."""
    receiving: bool = True
    rest: bytes | memoryview | None = None
