"""One pod group behind scheduling gates: its pods, how far it has come, and what is held for it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf

from gpuslice.core.contract import GATE_POD_GROUP
from gpuslice.core.model import Pod

FIRST_REST_S = 3.0


@dataclass(frozen=True, slots=True)
class Member:
    """A pod as last shown, either alive or succeeded."""

    pod: Pod
    owner: str  # uid of its controller
    succeeded: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a group has come. `waiting`: members that may be given a node and that only we hold back.

    `started`: members that need no cards any more, because they are on a node, have succeeded, or ask for
    none.
    """

    waiting: Mapping[str, Pod]  # by uid
    started: int
    least: int
    in_part: bool  # some have cards, but too few
    rank: tuple[bool, int, int]  # sort key: groups that run in part first, then by priority, then by age


def progress_of(members: Collection[Member]) -> Progress:
    """Derived from the pods alone, so that every process comes to the same result."""
    living = [each.pod for each in members if not each.succeeded]
    waiting = {
        pod.uid: pod
        for pod in living
        if pod.request is not None
        and not (pod.node or pod.terminating)
        and set(pod.gates) <= {GATE_POD_GROUP}
    }
    owners = {each.owner for each in members if not each.succeeded and each.owner}
    started = sum(each.succeeded and each.owner in owners for each in members)
    started += sum(not pod.terminating and bool(pod.node or pod.request is None) for pod in living)
    least = max((pod.group.least for pod in living if pod.group is not None), default=0)
    first = min((pod.version for pod in living), default=0)
    in_part = started < least and any(pod.node and pod.request is not None for pod in living)
    rank = (not in_part, -max((pod.priority for pod in living), default=0), first)
    return Progress(waiting, started, least, in_part, rank)


@dataclass(slots=True)
class GatedGroup:
    """One group: its pods, those for which cards are held, and those of them that filter has let pass."""

    name: str
    members: dict[str, Member] = field(default_factory=dict)  # by uid
    held: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)  # uids that kube-scheduler was told do not fit
    progress_s: float = 0.0  # when cards were held, or when the last member passed
    rests_until_s: float = 0.0
    rest_s: float = FIRST_REST_S
    shut_until_s: float = inf
    tried: int = -1  # the state of the fleet at the last failed attempt
    why_not: str = ""
    why_since_s: float = 0.0
    said: str = ""  # the last reason that owners were told
    news: asyncio.Event = field(default_factory=asyncio.Event)
    _progress: Progress | None = None

    @property
    def progress(self) -> Progress:
        if self._progress is None:
            self._progress = progress_of(self.members.values())
        return self._progress

    def is_whole(self) -> bool:
        """Whether enough members are on a node, or about to be, for the group to start."""
        return self.progress.started + len(self.passed & self.held) >= self.progress.least

    def changed(self) -> None:
        self._progress = None
        self.tried = -1
        self.tell()

    def tell(self) -> None:
        """Wake the binds that wait for other members."""
        self.news.set()
        self.news = asyncio.Event()
