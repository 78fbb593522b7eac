"""What kubelet's device manager asks plugins while it serves a container, as values.

Whoever carries the questions out may be a gRPC client, or a test that crashes between two of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass


class PluginError(Exception):
    """A plugin answered an error; thrown into `DeviceAssignments.allocate` at the call that failed."""


@dataclass(frozen=True, slots=True)
class PreferredCall:
    """GetPreferredAllocation; the answer is a collection of ids, of which kubelet uses those that are
    available.
    """

    resource: str
    available: frozenset[str]
    must_include: frozenset[str]
    size: int


@dataclass(frozen=True, slots=True)
class AllocateCall:
    """Allocate with exactly one container request; `ids` are in random order. The answer is that container's
    serialised response."""

    resource: str
    ids: tuple[str, ...]


Call = PreferredCall | AllocateCall
Response = Iterable[str] | bytes
Allocation = Generator[Call, Response, None]


async def carry_out(steps: Allocation, ask: Callable[[Call], Awaitable[Response]]) -> None:
    """Let `ask` answer the calls of one container's allocation; a PluginError is passed to the steps."""
    try:
        call = next(steps)
        while True:
            try:
                answer = await ask(call)
            except PluginError as error:
                call = steps.throw(error)
            else:
                call = steps.send(answer)
    except StopIteration:
        return
    finally:
        steps.close()
