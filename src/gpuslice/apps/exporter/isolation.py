"""What the agent wrote for each container, and what the interposer counted there.

The agent's folder of a container has its owner (``owner.json``), its limits (``etc/limits``) and the region
that the container's processes share (``var/region``).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gpuslice.adapters.region.limits import LimitsEntry, read_limits
from gpuslice.adapters.region.living import all_of_the_living
from gpuslice.adapters.region.reader import NOTHING, CardUsage, Counts, RegionFile
from gpuslice.core.attribution import ContainerKey, Owner


class _Owner(msgspec.Struct, frozen=True):
    namespace: str = ""
    pod: str = ""
    container: str = ""
    uid: str = ""
    earlier: dict[str, Counts] = {}


_OWNER = msgspec.json.Decoder(_Owner)


@dataclass(frozen=True, slots=True)
class ContainerIsolation:
    """One container's limits and counts by card uuid. `counted` is empty before the first CUDA call, and None
    if the region cannot be read.

    `earlier` is what the container's previous runs counted.
    """

    limits: dict[str, LimitsEntry]
    counted: dict[str, CardUsage] | None
    earlier: Mapping[str, Counts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Isolation:
    """All containers of the agent's folder; and what could not be read, in one sentence each."""

    containers: dict[ContainerKey, ContainerIsolation]
    problems: tuple[str, ...] = ()

    def limit(self, key: ContainerKey, uuid: str) -> LimitsEntry | None:
        found = self.containers.get(key)
        return None if found is None else found.limits.get(uuid)

    def counted(self, key: ContainerKey, uuid: str) -> CardUsage | None:
        found = self.containers.get(key)
        return None if found is None or found.counted is None else found.counted.get(uuid)

    def uses_nothing(self, key: ContainerKey, uuid: str) -> bool:
        """Whether the container has a limit there and has not used the card."""
        found = self.containers.get(key)
        if found is None or found.counted is None:
            return False
        return uuid in found.limits and uuid not in found.counted

    def counts(self, key: ContainerKey, uuid: str) -> Counts | None:
        """What all runs of the container have counted; None if nothing counts, or that cannot be read now."""
        found = self.containers.get(key)
        if found is None or found.counted is None or not (uuid in found.counted or uuid in found.limits):
            return None
        return found.earlier.get(uuid, NOTHING).plus(found.counted.get(uuid))

    def without_dead_processes(self, uuids: Container[str], proc: Path) -> Isolation:
        """Without what ended processes left in their regions, on the cards `uuids`.

        A region keeps a killed process's part until another process of its container removes it. Reads all of
        `proc` if any region has counts.
        """
        counted = [
            (key, card)
            for key, each in self.containers.items()
            for card in (each.counted or {}).values()
            if card.processes and card.uuid in uuids
        ]
        if not counted:
            return self
        containers = dict(self.containers)
        for (key, _), card in zip(
            counted, all_of_the_living((card for _, card in counted), proc), strict=True
        ):
            each = containers[key]
            counts = {**(each.counted or {}), card.uuid: card}
            containers[key] = ContainerIsolation(each.limits, counts, each.earlier)
        return Isolation(containers, self.problems)


AT_ONCE = 50
CHECK_EVERY = 3
"""After how many readings a change of a folder's files is seen, which change at a start.

Also of the region of a container without a process, which nobody can change.
"""


BUDGET_S = 0.005
"""CPU time that the region of one container may take per reading, on average.

One that takes more, as a tenant can provoke, is read that much less often, and shown as it was.
"""
LONGEST_REST = 60  # readings


@dataclass(slots=True)
class _Folder:
    stamp: tuple[int, int]
    key: ContainerKey | None
    limits: dict[str, LimitsEntry]
    region: RegionFile
    earlier: dict[str, Counts]
    cards: tuple[CardUsage, ...] | None = None  # of the region, as last read
    isolated: ContainerIsolation | None = None  # made from them
    rests_until: int = 0  # the turn in which its budget is restored

    @property
    def settled(self) -> bool:
        """Whether it is complete; the agent writes a folder file by file."""
        return self.key is not None and bool(self.limits)

    def read(self, *, fresh: bool) -> ContainerIsolation:
        """The same object as last time if nothing changed."""
        last, self.isolated = self.isolated, None  # nothing to compare with if this fails
        cards = self.region.cards(fresh=fresh)
        if last is None or cards is not self.cards:
            self.cards = cards
            last = ContainerIsolation(self.limits, {card.uuid: card for card in cards or ()}, self.earlier)
        self.isolated = last
        return last


class IsolationReader:
    """Reads below ``<root>/containers``; unchanged files are not read again.

    A container whose region cannot be read keeps its limits, which it could hide from view otherwise.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.thread_time) -> None:
        self._folder = root / "containers"
        self._clock = clock
        self._known: dict[str, _Folder] = {}
        self._turn = 0

    async def read(self, busy: Container[Owner] | None = None) -> Isolation:
        """Read everything now. A folder that cannot be read is a problem of its own, not of the others.

        `busy`: who has a process on a card, if known; the regions of all others are read in turns. Yields in
        between: a scrape must not wait for thousands of files.
        """
        self._turn += 1
        try:
            with os.scandir(self._folder) as entries:
                names = [entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            names = []  # no agent, or a node without isolation
        except OSError as error:
            return Isolation({}, (f"{self._folder}: {error.strerror}",))
        for gone in self._known.keys() - set(names):
            self._known.pop(gone).region.close()
        found: dict[ContainerKey, ContainerIsolation] = {}
        problems: list[str] = []
        for place, name in enumerate(names):
            try:
                fresh = (place + self._turn) % CHECK_EVERY == 0
                folder = self._known.get(name)
                if folder is None or not folder.settled or fresh:
                    folder = self._open(name)
                if folder.key is not None:
                    at_rest = not fresh and busy is not None and folder.key not in busy
                    isolated = folder.isolated if at_rest or self._turn < folder.rests_until else None
                    if isolated is None:
                        began_s = self._clock()
                        isolated = folder.read(fresh=fresh)
                        rest = min(int((self._clock() - began_s) / BUDGET_S), LONGEST_REST)
                        folder.rests_until = self._turn + 1 + rest if rest else 0
                    found[folder.key] = isolated
            except (OSError, ValueError) as error:
                problems.append(f"{self._folder / name}: {error}")
                folder = self._known.get(name)
                if folder is not None and folder.key is not None:
                    found[folder.key] = ContainerIsolation(folder.limits, None, folder.earlier)
            if place % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        return Isolation(found, tuple(problems))

    def _open(self, name: str) -> _Folder:
        place = f"{self._folder}/{name}"  # strings, since this is done for every container each second
        stamp = (_stamp(f"{place}/owner.json"), _stamp(f"{place}/etc/limits"))
        known = self._known.get(name)
        if known is not None and known.stamp == stamp:
            return known
        if known is not None:
            known.region.close()
        folder = self._folder / name
        owner = _OWNER.decode((folder / "owner.json").read_bytes()) if stamp[0] else _Owner()
        limits = {limit.uuid: limit for limit in read_limits(folder / "etc" / "limits") or ()}
        key = ContainerKey(owner.namespace, owner.pod, owner.container) if owner.pod else None
        read = _Folder(stamp, key, limits, RegionFile(folder / "var" / "region", limits), owner.earlier)
        self._known[name] = read
        return read


def _stamp(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return 0
