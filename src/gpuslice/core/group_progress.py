"""How far a pod group has come, by its members alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gpuslice.core.contract import GATE_POD_GROUP
from gpuslice.core.model import Pod


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
