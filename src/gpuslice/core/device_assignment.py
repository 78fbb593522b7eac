"""Who holds which device ids, as listed by kubelet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """The device ids of one container. kubelet names the pod without its uid, so a name may be reused."""

    namespace: str
    pod: str
    container: str
    ids: frozenset[str]

    @property
    def pod_key(self) -> str:
        return f"{self.namespace}/{self.pod}"


Receiver = tuple[str, str]
"""A pod's key and the name of its container."""


def still_true(
    assignments: Iterable[DeviceAssignment], given: Mapping[frozenset[str], Receiver | None]
) -> tuple[DeviceAssignment, ...]:
    """The assignments that are still true after later grants. `given`: ids, and to whom if known.

    kubelet gives only what is free, so whoever had such ids before has ended. The name may be a new pod's by
    then.
    """

    def ended(each: DeviceAssignment, ids: frozenset[str], receiver: Receiver | None) -> bool:
        is_that = each.ids == ids and receiver in {None, (each.pod_key, each.container)}
        return not is_that and not each.ids.isdisjoint(ids)

    return tuple(each for each in assignments if not any(ended(each, *grant) for grant in given.items()))


@dataclass(frozen=True, slots=True)
class Match:
    """The assignment to which a set of device ids belongs. `exact`: the sets are equal."""

    assignment: DeviceAssignment
    exact: bool


def holder_of(ids: frozenset[str], assignments: Iterable[DeviceAssignment]) -> Match | None:
    """The container to which these ids were given; None if kubelet lists nobody with any of them.

    kubelet does not list ordinary init containers, but the pod's app containers reuse its ids: if no set is
    equal, the one that shares the most ids belongs to the same pod.
    """
    matches = [Match(each, each.ids == ids) for each in assignments if each.ids & ids]
    return max(matches, key=lambda match: (match.exact, len(match.assignment.ids & ids)), default=None)
