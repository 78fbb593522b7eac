"""A port for a server that is started later, after others have opened many ports."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
OURS = range(20_000, 30_000)  # below Kubernetes' node ports
TRIES = 200
_dice = random.SystemRandom()  # programs with the same seed, such as tests, would all choose the same port


def free_port(given_out_from: int | None = None) -> int:
    """A port that is free on 127.0.0.1 now, outside the range that the system assigns to programs.

    A port in that range may be taken by a client or another server before the server that it is meant for
    starts. `given_out_from`: the lowest port of the range; by default what the system reports.
    """
    lowest = int(RANGE.read_text().split()[0]) if given_out_from is None else given_out_from
    for _ in range(TRIES):
        port = _dice.choice(OURS)
        if port < lowest and _is_free(port):
            return port
    with socket.socket() as one:  # the system assigns all of them
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as one:
        one.bind(("127.0.0.1", port))
        return True
    return False
