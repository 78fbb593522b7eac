"""Which of a region's processes are still there.

A slot stays until another process of its container comes by and empties it, so a region may name the dead:
whoever reads it from outside asks here. Seen from the host, a process of a container has another pid; its
start time and its innermost pid tell it.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from .reader import CardUsage, ProcessUsage

PROC = Path("/proc")


def start_time_of(pid: int, proc: Path = PROC) -> int | None:
    """When a process started, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZXx" else int(fields[19])


def living(processes: Iterable[ProcessUsage], proc: Path = PROC) -> tuple[ProcessUsage, ...]:
    """Those that run, in any PID namespace below ours. Goes through all of `proc` if there are any."""
    wanted = {(process.pid, process.start_time): process for process in processes}
    starts = {start for _, start in wanted}
    found = set()
    for folder in proc.iterdir() if wanted else ():
        start = start_time_of(int(folder.name), proc) if folder.name.isdigit() else None
        if start is not None and start in starts:
            found.add((_innermost_pid(folder), start))
    return tuple(process for key, process in wanted.items() if key in found)


def of_the_living(card: CardUsage, proc: Path = PROC) -> CardUsage:
    """The card's usage less what the dead left standing."""
    alive = living(card.processes, proc)
    gone_bytes = sum(process.used_bytes for process in card.processes if process not in alive)
    return replace(card, processes=alive, used_bytes=card.used_bytes - gone_bytes)


def _innermost_pid(folder: Path) -> int:
    try:
        lines = (folder / "status").read_text().splitlines()
    except OSError:
        return -1
    numbers = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [folder.name])
    return int(numbers[-1])
