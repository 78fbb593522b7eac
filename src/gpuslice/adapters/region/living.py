"""Which of a region's processes still exist.

A slot stays until another process of its container empties it, so a region may name dead processes; readers
outside check here. On the host a container's process has another pid; its start time and its innermost pid
identify it. A process's name in /proc may be any bytes, so bytes are read.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from .reader import CardUsage, ProcessUsage

PROC = Path("/proc")


def start_time_of(pid: int, proc: Path = PROC) -> int | None:
    """When a process started, in clock ticks since boot; None if none of its threads is left.

    A process whose main thread has ended is shown as a zombie while other threads run, and holds its memory.
    """
    try:
        fields = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    ended = fields[0] in b"Xx" or (fields[0] == b"Z" and int(fields[17]) <= 1)
    return None if ended else int(fields[19])


class Identity(NamedTuple):
    """Identifies a process in a region: its pid in its own PID namespace, and its start time."""

    pid: int
    start_time: int


def identity_of(pid: int, proc: Path = PROC) -> Identity | None:
    """Of the process with this `pid` here; None if it has ended."""
    start = start_time_of(pid, proc)
    return None if start is None else Identity(_innermost_pid(proc / str(pid)), start)


def living(processes: Iterable[ProcessUsage], proc: Path = PROC) -> tuple[ProcessUsage, ...]:
    """Those that run, in any PID namespace below ours. Reads all of `proc` if there are any."""
    every = tuple(processes)
    alive = _alive(every, proc)
    return tuple(process for process in every if (process.pid, process.start_time) in alive)


def of_the_living(card: CardUsage, proc: Path = PROC) -> CardUsage:
    """The card's usage without what dead processes left."""
    return all_of_the_living([card], proc)[0]


def all_of_the_living(cards: Iterable[CardUsage], proc: Path = PROC) -> list[CardUsage]:
    """As `of_the_living` for each card, with one pass over `proc`. Unchanged cards are the same objects."""
    every = list(cards)
    alive = _alive([process for card in every for process in card.processes], proc)
    found = []
    for card in every:
        left = tuple(process for process in card.processes if (process.pid, process.start_time) in alive)
        if len(left) < len(card.processes):
            gone_bytes = sum(process.used_bytes for process in card.processes)
            gone_bytes -= sum(process.used_bytes for process in left)
            found.append(replace(card, processes=left, used_bytes=card.used_bytes - gone_bytes))
        else:
            found.append(card)
    return found


def _alive(processes: Iterable[ProcessUsage], proc: Path) -> set[Identity]:
    """Which of them run."""
    wanted = {Identity(process.pid, process.start_time) for process in processes}
    starts = {start for _, start in wanted}
    found: set[Identity] = set()
    for name in os.listdir(proc) if wanted else ():
        start = start_time_of(int(name), proc) if name.isdigit() else None
        if start is not None and start in starts:
            found.add(Identity(_innermost_pid(proc / name), start))
    return found & wanted


def _innermost_pid(folder: Path) -> int:
    try:
        lines = (folder / "status").read_bytes().splitlines()
    except OSError:
        return -1
    numbers = next((line.split()[1:] for line in lines if line.startswith(b"NSpid:")), [])
    return int(numbers[-1] if numbers else folder.name)
