"""What clients may use of one of our servers, and what they may make it ask of the API server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Every server takes one, and names only what differs for it.

    A *stranger* has shown no certificate of the CA for clients; it may still have a token or a password.
    """

    # -- connections
    clients: int = 256
    """kube-scheduler, Prometheus and probes are a handful; a process may often open only 1024 files."""
    handshakes: int = 64
    """At a time: each takes some 50 KiB before anything is known about the client."""

    # -- one request
    head_bytes: int = 32 << 10
    fields: int = 100
    """Of a head: an empty one takes some fifty times its bytes."""
    body_bytes: int = 1 << 20
    object_bytes: int = 64 << 10
    """Of a body that only names an object."""
    values: int = 1_000_000
    """In a body of JSON: each takes some hundred bytes once decoded, however short it was."""
    names: int = 100_000
    """In a list; Kubernetes itself is designed for 5,000 nodes."""
    object_values: int = 20_000
    """In one object, such as a pod: each takes some microseconds. Large pods have 1,000."""

    # -- one client of HTTP/2
    streams: int = 128
    """Concurrent requests: more than the binds that an extender lets begin."""
    resets: int = 256
    """More streams reset before their answer than answered ones: an attack."""
    idle_frames: int = 1_000
    """Frames without a request and almost without data, beyond those that its answers account for."""
    idle_data_bytes: int = 1 << 10
    """A smaller part of a body counts as such a frame."""
    idle_frames_each: int = 20
    """Accounted for by each answer, plus one per `bytes_a_frame` of it."""
    bytes_a_frame: int = 2 << 10
    unread_bytes: int = 16 << 10
    """Of a stranger, kept until it is his turn."""

    # -- all of them
    all_bytes: int = 64 << 20
    """Of requests that are arriving or being answered, and of unread answers."""

    # -- time, in seconds
    handshake_s: float = 10.0
    request_s: float = 30.0  # from the first byte of a request to its last
    answer_s: float = 60.0  # to read an answer
    idle_s: float = 600.0  # between two requests: longer than clients themselves keep idle connections
    linger_s: float = 2.0  # to read a refusal while it is still sending
    turn_s: float = 0.005  # of the loop's time in a row, so that probes and other clients need not wait long
    strangers_turn_s: float = 0.001

    # -- tokens and passwords
    reviews_at_once: int = 2
    """Of unknown ones: whoever has many made-up ones delays himself, not the API server."""
    reviews_waiting: int = 32
    """With those; each is held in memory."""
    reviews_remembered: int = 1000
    reviews_each: int = 16
    """Namespaces that one request has reviewed; the next request goes on with others."""
    review_lasts_s: float = 10.0
    """A right that was taken away is gone after it."""
    namespace_lasts_s: float = 60.0
    """Of access reviews for one namespace."""
    suspect_s: float = 60.0
    """How long an address from which a wrong token or password came is served after others."""


LIMITS = Limits()
