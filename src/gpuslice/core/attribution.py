"""Who uses a card's memory and time: processes are attributed to containers, the rest to nobody.

For every card, the containers' memory and the unattributed rest add up to what the driver reports as used. A
value that could not be read is None and stays absent: it never counts as 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class ContainerKey(NamedTuple):
    """A container of a pod. A pod may have several on one card.

    A tuple, since it is the key of everything: thousands of them are looked up, many times a second.
    """

    namespace: str
    pod: str
    container: str
    pod_uid: str = ""


class Stranger(StrEnum):
    """Why a process belongs to no container that we know."""

    HOST = "host"  # outside any container
    UNKNOWN_CONTAINER = "unknown_container"  # in a container that no pod of this node names
    GONE = "gone"  # listed by the driver, but no longer by the system
    DRIVER = "driver"  # memory in use that no process holds: the driver's own
    UNKNOWN = "unknown"  # what remains if the memory of some process cannot be read


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One process on one card. Values are None if the driver does not report them; ratios are 0…1."""

    pid: int
    uuid: str
    memory_bytes: int | None = None
    sm_ratio: float | None = None
    memory_ratio: float | None = None  # the fraction of time in which memory was read or written
    encoder_ratio: float | None = None
    decoder_ratio: float | None = None


class Usage(NamedTuple):
    """What one container, or one kind of stranger, uses of one card."""

    memory_bytes: int | None
    sm_ratio: float | None
    processes: int


_IDLE = Usage(0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class CardUsage:
    """The attribution of one card. `owners`: every container with a process or an allocation there."""

    uuid: str
    owners: dict[ContainerKey, Usage]
    strangers: dict[Stranger, Usage]


Owner = ContainerKey | Stranger


def divide(
    uuid: str,
    used_bytes: int | None,
    processes: Iterable[ProcessReading],
    owner_of: Mapping[int, Owner],
    allocated: Iterable[ContainerKey] = (),
) -> CardUsage:
    """Attribute each process on card `uuid` to its owner (a pid that is not in `owner_of` is gone).

    `used_bytes` is the card's own value. A container of `allocated` without a process uses 0 rather than
    None: its processes are known, and there are none.
    """
    groups: dict[Owner, list[ProcessReading]] = defaultdict(list)
    for process in processes:
        if process.uuid == uuid:
            groups[owner_of.get(process.pid, Stranger.GONE)].append(process)
    owners = dict.fromkeys(allocated, _IDLE)
    strangers: dict[Stranger, Usage] = {}
    for owner, members in groups.items():
        if isinstance(owner, Stranger):
            strangers[owner] = _sum(members)
        else:
            owners[owner] = _sum(members)
    if used_bytes is not None:  # what is in use in addition, so that the sum is the card's value
        parts = [usage.memory_bytes for usage in (*owners.values(), *strangers.values())]
        rest = used_bytes - sum(part for part in parts if part is not None)
        # it is the driver's own only if the memory of every process is known
        strangers[Stranger.UNKNOWN if None in parts else Stranger.DRIVER] = Usage(rest, None, 0)
    return CardUsage(uuid, owners, strangers)


def _sum(members: list[ProcessReading]) -> Usage:
    """For memory, one unknown makes the sum unknown: a partial sum would show less than is used.

    For time it does not: the driver lists only processes that were busy, so a missing value means idle if any
    process of the card has one. The sum is more than 1 where several had work at once and took turns.
    """
    if len(members) == 1:  # the usual case
        only = members[0]
        return Usage(only.memory_bytes, only.sm_ratio, 1)
    memory = [member.memory_bytes for member in members]
    known = [amount for amount in memory if amount is not None]
    busy = [member.sm_ratio for member in members if member.sm_ratio is not None]
    return Usage(
        memory_bytes=sum(known) if len(known) == len(memory) else None,
        sm_ratio=sum(busy) if busy else None,
        processes=len(members),
    )
